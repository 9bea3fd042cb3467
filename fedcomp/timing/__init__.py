"""The cost of bytes and failures in time: alpha-beta link models on counted bytes."""

from fedcomp.timing.links import PRESETS, Link, parse_link, simulated_seconds

__all__ = ["PRESETS", "Link", "parse_link", "simulated_seconds"]
