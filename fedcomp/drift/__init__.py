"""Concept drift on inference-only devices, and when they report it; needs neither torch nor Flower."""
