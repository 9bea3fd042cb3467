"""``python -m coding.bench``: what coding costs, as ratios taken in one process, and the goals it has to meet."""
