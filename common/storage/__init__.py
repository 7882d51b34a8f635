"""Named tensors, and files on disk."""
