"""Local differential privacy: every client noises its own update before encoding, and no other party is trusted.

The Gaussian mechanism on every client, with integer noise after C. Canonne, G. Kamath, T. Steinke, "The discrete
Gaussian for differential privacy", NeurIPS 2020 (recalled). Whatever follows the noise is post-processing: the codec,
its memory, the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedcomp.codecs import State
from fedcomp.privacy.local import Privatise, privatised
from fedcomp.program import Answer, Ask, Me, Released
from fedcomp.systems.pair import Pair


@dataclass(frozen=True, repr=False, eq=False)
class Local(Pair, id="local-dp"):
    """Clients send their updates encoded by ``codec``, which privatises them first.

    Parameters
    ----------
    codec : Codec or dict
        A chain that begins with :class:`fedcomp.privacy.local.Privatise`.
    """

    RULES: ClassVar[tuple[type, ...]] = (Released,)

    def conflict(self) -> str:
        return "" if privatised(self.codec) is not None else f"{self.codec!r} does not privatise updates"

    @property
    def privatise(self) -> Privatise:
        """What every client does to its update first."""
        found = privatised(self.codec)
        assert found is not None
        return found

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        # What was noised before it was encoded tells of the data no more by its length than by its content.
        return super().client(memory, ask, replace(me, padded=False))
