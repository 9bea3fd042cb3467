"""Rounds of coded replies, sums and gradients: the server's side."""
