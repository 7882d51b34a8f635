"""The papers' tables: what was published, the runs that make each row again, and both side by side."""
