"""Concept drift on devices that only infer, and when to send anything about it: torch-free, and without Flower."""
