"""Rounds of coded replies, sums and gradients: the client's side."""
