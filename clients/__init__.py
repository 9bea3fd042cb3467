"""Flower's client side: the same file names as in ``strategies``, and the generic app."""
