"""What leaves a client under a privacy promise."""
