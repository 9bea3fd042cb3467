"""Gradients from scalars: directions that both sides draw, and how far along each of them the loss changes."""
