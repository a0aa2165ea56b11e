"""The loop, losses, checkpoints and the run directory."""
