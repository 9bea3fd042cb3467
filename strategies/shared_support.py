"""ScaleCom over Flower's messages: :class:`fedcomp.systems.shared_support.SharedSupport` with a cohort of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from fedcomp.codecs.scalecom import ScaleCom
from fedcomp.program import Now, Step
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.averaging import Averaging, averaging_system
from fedcomp.strategies.server import Running
from fedcomp.systems import shared_support


class SharedSupport(Averaging):
    """ScaleCom: average updates on a support that one client chooses for all.

    Parameters
    ----------
    codec : ScaleCom or dict, optional
        Density, low-pass factor, selector, scope, value format; default 1 % with classical memory.
    server_lr, warmup_rounds, policy, guard, seed, **cohort
        As of :class:`~fedcomp.strategies.averaging.Averaging`.

    Attributes
    ----------
    leaders : dict of int to int
        Partition of the client whose support each round used.

    Examples
    --------
    >>> from fedcomp.codecs import ScaleCom
    >>> strategy = SharedSupport(ScaleCom(density=0.01), warmup_rounds=3, fraction_train=0.5)
    """

    CODEC = ScaleCom
    SYSTEM = shared_support.SharedSupport

    STATE: ClassVar[Mapping[str, Any]] = {"leaders": dict[int, int]}

    def _begin(self) -> None:
        super()._begin()
        self.leaders: dict[int, int] = {}

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        if step is not None:
            self.leaders[now.number] = now.told["leader"]
        return super()._take(x, now, step)


SYSTEM: Final = averaging_system(
    "scalecom",
    "ScaleCom",
    "Chen et al. 2020, ScaleCom: scalable sparsified gradient compression for communication-efficient distributed "
    "training",
    "entries that the round's leader chose, the same for all clients, so that their sum is as short as one update; "
    "the rest is remembered",
    SharedSupport,
    ("density", "beta"),
)
