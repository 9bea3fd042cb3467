"""A Flower app that sends compressed updates."""
