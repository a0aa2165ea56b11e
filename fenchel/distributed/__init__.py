"""Training by several processes, which torchrun starts: cells, owners, checkpoints."""
