"""What travels between server and devices, and how it is checked."""
