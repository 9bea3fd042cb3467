"""Strategies that keep a privacy promise: the server's side."""
