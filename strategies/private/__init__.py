"""Strategies with a privacy guarantee: the server side."""
