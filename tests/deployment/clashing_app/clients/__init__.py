"""The app's own clients."""
