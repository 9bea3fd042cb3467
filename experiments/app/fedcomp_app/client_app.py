"""The client half."""

from fedcomp.clients.app import app

__all__ = ["app"]
