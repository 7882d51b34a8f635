"""One run: the round loop, its record, its checkpoints."""
