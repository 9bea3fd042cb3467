"""Flower's server side: one file per system."""
