"""What all methods share: the contract of a method, the exchange, the checks of replies, and aggregation."""
