"""Private rounds: a rule in place of the mean, and the systems that need their own client half."""
