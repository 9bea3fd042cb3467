"""The server side on Flower: one file per system."""
