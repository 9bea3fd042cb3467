"""The privacy audit: its subjects, its tiers, and incorrect variants that it must detect."""
