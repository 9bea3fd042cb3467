"""Decentralised learning through a relay: the server's side."""
