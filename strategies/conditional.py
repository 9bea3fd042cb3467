"""Conditional rounds over Flower's messages: :class:`fedcomp.systems.conditional.ConditionalRounds` with a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Identity
from fedcomp.errors import ConfigError
from fedcomp.flower.privacy import find_private
from fedcomp.flower.report import ReportSection, figure
from fedcomp.privacy.local import privatised
from fedcomp.program import Now, Step
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gossip.strategy import GossipRelay
from fedcomp.strategies.pair_systems import build_pair
from fedcomp.strategies.parts import PAIR_PREFIXES, Settings
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.server import Running, Server
from fedcomp.strategies.system import System, settings_of
from fedcomp.strategies.wrapping import require_inner
from fedcomp.systems.conditional import ConditionalRounds

PRIVATE_REASON: Final = "whether a node answers would depend on its data, and a private round does not account for that"
"""Why private rounds are not conditional."""


@dataclass
class Quietness(ReportSection, name="conditional"):
    """What a conditional round adds to a report. Those that are quiet are not among those that an update was asked of.

    Attributes
    ----------
    quiet : list of int
        Nodes that had nothing to send.
    queried : int
        Nodes that were asked whether they have something to send.
    due : list of int
        Nodes that had to send, because they were quiet for as many rounds as is allowed.
    unaware : list of int
        Nodes whose apps lack :func:`fedcomp.clients.conditional.conditional`. They train in every round.
    """

    quiet: list[int] = figure(list, unit="nodes", show="count")
    queried: int = figure(unit="nodes")
    due: list[int] = figure(list, unit="nodes", show="count")
    unaware: list[int] = figure(list, unit="nodes", show="count")

    def line(self) -> str:
        """Return who was quiet, or had to send."""
        counts = {
            "quiet": len(self.quiet),
            "had to send": len(self.due),
            "do not know the query": len(self.unaware),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "quiet")


class Conditional(Server):
    """Conditional rounds: nodes with nothing new send no update, and the mean is taken over the others.

    The clients' apps need :func:`fedcomp.clients.conditional.conditional`; clients without it train in every round.

    Parameters
    ----------
    inner : Strategy
        A :class:`Compressed`, or any strategy that it could wrap; clients then send whole models.
    max_skip, query
        As of :class:`fedcomp.systems.conditional.ConditionalRounds`.

    Raises
    ------
    ConfigError
        For private strategies and codecs, because whether a node replies would depend on its data. For gossip, because
        neighbours would wait for a quiet node and treat it as vanished. For other strategies with their own exchanges.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.strategies.compressed import Compressed
    >>> strategy = Conditional(Compressed(FedAvg(), TopK(density=0.01)), max_skip=10)
    """

    def __init__(self, inner: Strategy, max_skip: int = 10, query: bool = True) -> None:
        if isinstance(inner, GossipRelay):
            raise ConfigError(
                "GossipRelay has no conditional rounds: a node that is quiet for an iteration keeps its neighbours "
                "waiting, and is taken for one that vanished; let it send small differences instead, with a sparse "
                "compressor"
            )
        require_inner(inner, "Conditional")
        if find_private(inner) is not None or promises(inner):
            raise ConfigError(f"{type(inner).__name__} promises privacy: {PRIVATE_REASON}")
        # Whole models in the format's frames.
        pair = inner if isinstance(inner, Compressed) else Compressed(inner, Identity())
        if pair.first_model_at_nodes:
            raise ConfigError("Conditional sends the first model itself: leave first_model_at_nodes=True out")
        if privatised(pair.codec) is not None:
            raise ConfigError(f"{pair.codec!r} promises privacy: {PRIVATE_REASON}")
        super().__init__(ConditionalRounds(pair.codec, max_skip, query), pair.inner, **pair.surroundings)

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        section, seen = x.report.section(Quietness), now.told["round"]
        section.queried = seen["queried"]
        # One that goes by another number since it answered was due under a number that is nobody's now.
        section.quiet, section.due, section.unaware = (
            [x.addresses[node] for node in seen[name] if node in x.addresses] for name in ("quiet", "due", "unaware")
        )
        x.report.asked -= len(section.quiet)
        return super()._take(x, now, step)


def _build(settings: Settings, seed: int) -> Strategy:
    pair = build_pair(settings, seed, codec="topk")
    return Conditional(pair, int(settings["max_skip"]), bool(settings["query"]))


SYSTEM: Final = System(
    "conditional",
    "FLARE (conditional rounds)",
    "Chow, Raza, Mavromatis, Khan 2023, FLARE: detection and mitigation of concept drift for federated learning based "
    "IoT deployments",
    "the largest entries of the update, in rounds in which the losses of the node's own examples have not settled; "
    "otherwise a few bytes",
    _build,
    {"downlink": "", "feedback": True, "codec.density": 0.01, **settings_of(Conditional, "max_skip", "query")},
    PAIR_PREFIXES,
)
