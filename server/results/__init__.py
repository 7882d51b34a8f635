"""Finished runs: read, tabulated, reported."""
