"""A device's resident trainer: a process that keeps torch, net and data between the messages of its SuperNode."""
