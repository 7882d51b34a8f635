"""Domains, the data sets they come from, who holds what, and batched augmentation."""
