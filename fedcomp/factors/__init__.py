"""Gradients as sums of outer products: what layers saw and what came back to them, captured while a model trains."""
