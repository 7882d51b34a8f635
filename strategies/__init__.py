"""The methods, one file each, behind the contract in :mod:`strategies.core.method`."""
