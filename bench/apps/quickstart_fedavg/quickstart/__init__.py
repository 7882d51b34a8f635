"""FedAvg as Flower's PyTorch quickstart does it: the opponent of bench/round_time.py."""
