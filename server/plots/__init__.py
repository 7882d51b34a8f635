"""Figures of runs, as PNG: legible in print, told apart by colour, dash and marker at once."""
