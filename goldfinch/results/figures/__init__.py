"""Figures of runs: legible in print, told apart by colour, dash and marker at once."""
