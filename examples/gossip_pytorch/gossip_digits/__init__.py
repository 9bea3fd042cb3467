"""A decentralised app: PyTorch and Flower on handwritten digits, models stay on the nodes."""
