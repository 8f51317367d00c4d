"""Training: the loop, its checkpoints and faults, several processes, learning-rate search."""
