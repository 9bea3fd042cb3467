"""The server half."""

from fedcomp.experiments.server_app import app

__all__ = ["app"]
