"""Errors of private systems. Everything fails closed: nothing is released that is not accounted."""

from __future__ import annotations

from fedcomp.errors import FedcompError


class PrivacyError(FedcompError):
    """Base class of the errors of this package."""


class Unbounded(PrivacyError, ValueError):
    """A contribution whose influence cannot be bounded or verified; it is left out of the sum."""


class BudgetExceeded(PrivacyError, RuntimeError):
    """A release would cross the budget; nothing was released."""


class PrivacyLedgerError(PrivacyError, RuntimeError):
    """A ledger is damaged, belongs to another run, or cannot be written: without it nothing may be released."""
