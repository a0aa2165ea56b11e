"""Words to calls; one file a command, named for it."""
