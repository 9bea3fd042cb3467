"""The app's own experiments."""
