"""``python -m coding.bench``: the cost of coding, as ratios taken in one process, and the goals it must meet."""
