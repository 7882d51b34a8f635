"""Networks that return ``(features, logits)``, and how their state is divided."""
