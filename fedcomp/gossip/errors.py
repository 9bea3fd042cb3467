"""Errors of decentralised learning."""

from __future__ import annotations

from typing import Final

from fedcomp.errors import ConfigError, FedcompError, StateError


class TopologyError(ConfigError):
    """A graph or its weights cannot carry the algorithm: not connected, not stochastic, no weight left for oneself."""


TOO_FAR: Final = "the model would move by"
"""How a :class:`MessageError` begins that is about numbers, of a hostile node or of iterations that diverge."""


class MessageError(FedcompError, ValueError):
    """The bytes of a message are not what its sender could have sent: truncated, of another length, or not finite."""


class OutOfStep(StateError):
    """A message does not follow the last one of its sender: the estimate it changes is not the sender's any more.

    Attributes
    ----------
    source : int
        Whose message it was; what mends it is that sender's whole estimate.
    """

    def __init__(self, source: int, message: str) -> None:
        super().__init__(message)
        self.source = source


class Diverged(FedcompError, ArithmeticError):
    """The iterates grow instead of settling, or are not finite any more; the message says which step size to reduce."""


# A kind of divergence, so that a pilot run that ends with it counts as failed (tune_gamma).
class Saturated(Diverged):
    """Innovations left the range of a quantiser whose scale is given in advance."""
