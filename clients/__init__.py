"""The client side on Flower: the same file names as in ``strategies``, and the generic app."""
