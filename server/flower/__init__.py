"""Flower's programs: started, watched, given work."""
