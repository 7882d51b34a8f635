"""Domains and their data sets, the split of domains among clients, and batched augmentation."""
