"""Decentralised learning through a relay: the server side."""
