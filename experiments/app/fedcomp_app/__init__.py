"""The two halves of the app, taken from the installed library."""
