"""Detection of clients that do not return: error feedback needs them to, and a sampled cohort may lack them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

WINDOW: Final = 5
"""Rounds that are looked back on, the current one included."""


FEW_RETURN: Final = (
    f"the last {WINDOW} rounds asked more than twice as many clients as one round does. Error feedback keeps what it "
    "did not send at each client, where it waits until that client is asked again, and is out of date by then: "
    "accuracy can end many points below FedAvg's. Use a codec without memory, EDEN() or QSGD(levels=7), or ask clients "
    "more often"
)
"""What is said where memories wait at clients that seldom return."""


class Returning:
    """Counts the nodes that recent rounds asked.

    Few return when the last :data:`WINDOW` rounds together asked more than twice as many nodes as one of them: each
    then waits for more than one round between two that ask it. All nodes in every round, one or two of them replaced,
    or halves by turns are fewer.

    Examples
    --------
    >>> whole, sampled = Returning(), Returning()
    >>> [whole.few(range(10)) for _ in range(6)][-1], [sampled.few(range(k, k + 10)) for k in range(0, 60, 10)][-1]
    (False, True)
    """

    def __init__(self) -> None:
        self._rounds: deque[frozenset[int]] = deque(maxlen=WINDOW)

    def few(self, nodes: Iterable[int]) -> bool:
        """Note the nodes that a round asks; return whether few of a round return, False before there are enough."""
        asked = frozenset(nodes)
        if asked:
            self._rounds.append(asked)
        if len(self._rounds) < WINDOW:
            return False
        return len(frozenset[int]().union(*self._rounds)) * WINDOW > 2 * sum(map(len, self._rounds))
