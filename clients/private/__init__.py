"""The client side of private systems."""
