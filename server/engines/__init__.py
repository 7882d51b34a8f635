"""Engines: the ways to reach the clients."""
