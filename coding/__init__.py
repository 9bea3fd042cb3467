"""Erasure and network codes; reserved, nothing is here yet."""
