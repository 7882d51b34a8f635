"""``goldfinch report``: what runs left in their folders as one HTML file that needs no network."""
