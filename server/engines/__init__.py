"""Ways to reach the clients."""
