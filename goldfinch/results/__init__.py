"""Read recorded runs, and show them in tables and reports."""
