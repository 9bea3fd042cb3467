"""What each node was sent once and keeps: a basis, or weights, under a number made of its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedcomp.stateful import Stateful


class Loans(Stateful):
    """Which node was lent what, until it turns out not to have it.

    A loan counts once the node holds the model of the message that brought it: until then the message may be lost.
    """

    STATE: ClassVar[Mapping[str, Any]] = {"_lent": dict[int, tuple[int, int]]}

    def __init__(self) -> None:
        # By node: the number, and the version of the model in that message.
        self._lent: dict[int, tuple[int, int]] = {}

    def renumber(self) -> None:
        """Forget all loans: nodes may have been lent others since, in place of these."""
        self._lent = {}

    def holds(self, node: int, number: int, version: int) -> bool:
        """Whether ``node``, which holds the model of ``version``, was lent ``number`` with it or with one before."""
        lent, since = self._lent.get(node, (0, 0))
        return lent == number and version >= since

    def lend(self, node: int, number: int, version: int) -> None:
        """Note that a message with the model of ``version`` brings ``number`` to ``node``."""
        self._lent[node] = number, version

    def forget(self, node: int) -> None:
        """Note that ``node`` does not have it."""
        self._lent.pop(node, None)
