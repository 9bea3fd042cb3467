"""Coded replies, sums and gradients: the client side."""
