"""Coded replies, sums and gradients: the server side."""
