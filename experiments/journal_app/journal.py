"""Both halves."""

from fedcomp.experiments.journal import client, server

__all__ = ["client", "server"]
