"""What every method stands on: the contract, the exchange, aggregation, and the gate."""
