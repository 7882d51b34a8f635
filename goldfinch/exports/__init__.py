"""Trained models in folders of their own: written in several formats, and described to people."""
