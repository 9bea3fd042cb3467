"""Gradients as sums of outer products: layer inputs and output gradients, captured during training."""
