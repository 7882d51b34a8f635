"""Named tensors and files on the disk."""
