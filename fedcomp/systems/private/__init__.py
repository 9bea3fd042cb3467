"""Private rounds: one rule in place of the mean, and the systems that need a client half of their own."""
