"""What both sides of a federation know: payloads, prototypes, losses, models and data. Never imports flwr or ray."""
