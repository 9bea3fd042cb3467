"""Both halves."""

from fedcomp.experiments.slow import client, server

__all__ = ["client", "server"]
