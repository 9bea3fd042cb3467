"""The communication layer for Flower; see docs/architecture.md for the rooms of this package."""
