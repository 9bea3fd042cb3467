"""Both halves."""

from fedcomp.experiments.slept import client, server

__all__ = ["client", "server"]
