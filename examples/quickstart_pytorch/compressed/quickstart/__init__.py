"""A quickstart app: PyTorch and Flower on handwritten digits."""
