"""The privacy audit: what is audited, by which tiers, and wrong variants that it must catch."""
