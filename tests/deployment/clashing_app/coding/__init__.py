"""The app's own codes."""
