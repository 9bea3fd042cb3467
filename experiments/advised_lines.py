"""The lines that ``fedcomp advise`` compares: the code to paste, when it fits, and the loss measured for it.

They are those of ``docs/choose/use-this-when.md``; ``tests/experiments/test_advise.py`` compares the figures with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import fedcomp as fc

AFTER: Final = (3, 8, 40)
"""Rounds after which accuracy was measured."""

ACCURACY: Final[Mapping[bool, Mapping[str, tuple[tuple[float, ...], ...]]]] = {
    False: {
        "plain FedAvg": ((56.3, 88.5, 97.0), (75.8, 87.6, 93.3), (26.0, 31.0, 38.3)),
        "**A**": ((56.3, 88.2, 97.0), (75.6, 87.8, 93.3), (26.2, 31.3, 38.2)),
        "B": ((50.2, 87.0, 96.8), (74.9, 87.1, 93.3), (24.4, 30.3, 38.2)),
        "C": ((45.9, 84.0, 97.2), (72.1, 85.5, 92.9), (21.0, 27.4, 37.2)),
        "D": ((41.5, 78.5, 96.8), (63.5, 81.9, 92.3), (17.7, 24.6, 36.0)),
        "E": ((47.0, 82.2, 97.0), (70.5, 84.8, 92.8), (20.9, 26.1, 37.1)),
        "I": ((43.4, 80.5, 96.8), (67.1, 83.3, 92.4), (20.1, 26.3, 36.5)),
    },
    True: {
        "plain FedAvg": ((39.3, 39.2, 90.8), (51.2, 74.6, 88.3), (21.7, 25.6, 30.8)),
        "**A**": ((40.0, 39.2, 93.0), (51.4, 73.8, 88.3), (21.7, 25.4, 30.9)),
        "B": ((35.6, 42.0, 92.9), (48.4, 72.3, 87.7), (21.4, 25.2, 30.3)),
        "C": ((30.8, 39.0, 90.0), (45.9, 68.8, 86.7), (17.7, 20.4, 28.2)),
        "D": ((25.8, 39.5, 84.1), (41.3, 64.3, 85.3), (14.5, 18.0, 26.0)),
        "E": ((31.0, 39.6, 90.4), (45.4, 67.1, 86.1), (17.3, 20.0, 28.2)),
        "I": ((29.3, 38.4, 88.4), (45.7, 66.5, 85.8), (18.0, 20.3, 27.3)),
    },
}
"""Accuracy in % on digits, MNIST and the CIFAR subset after so many rounds, by whether clients are sampled (10 of 30,
unlike data) or all 10 take part: ``python -m experiments.run readme``."""


@dataclass(frozen=True)
class Situation:
    """What a user asks for; fields as the parameters of :func:`fedcomp.experiments.advise.advise`."""

    clients: int
    fraction: float
    rounds: int
    may_lose: float = 1.0
    privacy: str = "none"
    vanish: bool = False
    server: bool = True
    median: bool = False
    flat: bool = False
    """Whether all tensors of the model have one dimension."""

    @property
    def participants(self) -> int:
        """Clients of a round."""
        return max(2, int(self.clients * self.fraction)) if self.server else self.clients

    def scaled(self, clients: int, participants: int) -> Situation:
        """Return the situation of a trial with fewer clients."""
        return replace(self, clients=clients, fraction=participants / clients)

    def contradiction(self) -> str:
        """Return why no line does all of it; empty where one does."""
        asked = [
            *([f"privacy={self.privacy!r}"] if self.privacy != "none" else []),
            *(["clients that vanish"] if self.vanish else []),
            *(["no server"] if not self.server else []),
            *(["a median"] if self.median else []),
        ]
        if set(asked) <= {"privacy='hide'", "clients that vanish"}:
            # Sums are coded: they lose nothing when clients vanish.
            few = self.participants < (5 if self.privacy == "hide" else 3)
            return f"{' and '.join(asked)} needs more than {self.participants} clients a round" if asked and few else ""
        return f"no line is for {' and '.join(asked)} together" if len(asked) > 1 else ""


@dataclass(frozen=True)
class Line:
    """One line to paste.

    Attributes
    ----------
    name : str
    text : str
        The line, with the names of :func:`amounts` in braces.
    make : callable
        The same as an object, for a trial in which all clients take part.
    purpose : str
        As :func:`purpose_of` returns it.
    row : str
        Of :data:`ACCURACY`; empty where nothing was measured.
    remembers : bool
        Whether clients keep what they did not send, and need to come back for it.
    least_rounds : int
        Rounds before the line delivers what its clients keep.
    note : str
        What has to be true, or where its figures come from.
    """

    name: str
    text: str
    make: Callable[[Any, Amounts], Any]
    purpose: str = "bytes"
    row: str = ""
    remembers: bool = False
    least_rounds: int = 1
    note: str = ""

    def concerns(self, at: Situation) -> bool:
        """Return whether the line is a row of the table."""
        return self.name == "FedAvg" or self.purpose == purpose_of(at)

    def unfit(self, at: Situation) -> str:
        """Return why the line does not fit; empty where it does."""
        purpose = purpose_of(at)
        if self.name == "FedAvg":
            return "" if purpose == "bytes" else "it is a row to compare with, and does not do what you ask"
        if purpose not in ("bytes", "median"):
            return ""
        if self.remembers and at.fraction < 0.5:
            return "its clients keep what they did not send, and yours seldom come back"
        if at.rounds < self.least_rounds:
            return f"it takes {self.least_rounds} rounds and more"
        lost = measured_loss(self, at)
        if lost is not None and lost > at.may_lose:
            return f"it was measured to lose {lost:.1f} points, and you may lose {at.may_lose:g}"
        return ""

    def code(self, at: Situation) -> str:
        """Return what to paste."""
        sampled = "" if at.fraction == 1.0 else f"fraction_train={at.fraction:g}"
        quiet = ", ".join(filter(None, (sampled, "fraction_evaluate=0.0")))
        # A private strategy accounts for its samples, and draws them itself.
        drawn = "" if at.fraction == 1.0 else f', sampling=fc.Sampling("poisson", rate={at.fraction:g})'
        whole = ", dense_below=0" if at.flat else ""
        words = {"clients": at.clients, "sampled": sampled, "quiet": quiet, "drawn": drawn, "whole": whole}
        return self.text.format(**vars(amounts(at)), **words)


@dataclass(frozen=True)
class Amounts:
    """Settings that follow from the number of participants."""

    population: int
    shards: int
    threshold: int
    symbols: int
    flat: bool = False


def amounts(at: Situation) -> Amounts:
    """Return settings for the situation's participants."""
    relays = at.participants
    # A fifth may read together without learning anything, and another fifth may vanish.
    fifth = max(1, relays // 5)
    return Amounts(at.clients, min(160, max(1, 2 * relays // 3)), fifth, relays - 2 * fifth, at.flat)


def purpose_of(at: Situation) -> str:
    """Return which lines concern a situation: "gossip", "client", "record", "hide", "vanish", "median" or "bytes"."""
    if not at.server:
        return "gossip"
    if at.privacy != "none":
        return at.privacy
    return "vanish" if at.vanish else "median" if at.median else "bytes"


def measured_loss(line: Line, at: Situation) -> float | None:
    """Return the points of accuracy that a line was measured to lose after about so many rounds, at least 0."""
    if line.name in ("FedAvg", "H"):
        return 0.0
    if not line.row:
        return None
    rows = ACCURACY[at.fraction < 1.0]
    column = min(range(len(AFTER)), key=lambda i: abs(math.log(AFTER[i] / at.rounds)))
    pairs = zip(rows["plain FedAvg"], rows[line.row], strict=True)
    return max(0.0, *(round(plain[column] - lossy[column], 1) for plain, lossy in pairs))


RARE: Final = {"observe_every": 1000}
"""Gossip: the server sees models after every thousandth round, and after the last one."""


def _gossip(of: Amounts) -> dict[str, int]:
    # By default tensors of one dimension travel whole: all of such a model would.
    return {**RARE, **({"dense_below": 0} if of.flat else {})}


def pair(up: Callable[[], Any], down: Callable[[], Any] | None = None) -> Callable[[Any, Amounts], Any]:
    """Return what makes the drop-in pair around a strategy."""
    return lambda inner, of: fc.Compressed(inner, up(), *([down()] if down else []))


def _record_level(inner: Any, of: Amounts) -> Any:
    # Without a budget: a trial must not end early.
    plan = fc.DpSgdPlan(noise_multiplier=2.0, rate=0.1, steps=20, delta=1e-5)
    return fc.RecordDp(fc.Compressed(inner, fc.TopK(density=0.05)), plan, records=10_000)


LINES: Final = (
    Line("FedAvg", "FedAvg({sampled})", lambda inner, of: inner),
    Line(
        "A",
        "fc.Compressed(FedAvg({sampled}), fc.EDEN(bits=1))",
        pair(lambda: fc.EDEN(bits=1)),
        row="**A**",
    ),
    Line(
        "B",
        'fc.Compressed(FedAvg({sampled}), fc.EDEN(bits=1), fc.EDEN(bits=1, scale="least"))',
        pair(lambda: fc.EDEN(bits=1), lambda: fc.EDEN(bits=1, scale="least")),
        row="B",
    ),
    Line(
        "C",
        'fc.Compressed(FedAvg({sampled}), fc.TopK(density=0.03, values="q2"))',
        pair(lambda: fc.TopK(density=0.03, values="q2")),
        row="C",
        remembers=True,
        least_rounds=40,
    ),
    Line(
        "D",
        'fc.Compressed(FedAvg({sampled}), fc.TopK(density=0.01, values="q2"))',
        pair(lambda: fc.TopK(density=0.01, values="q2")),
        row="D",
        remembers=True,
        least_rounds=40,
    ),
    Line(
        "E",
        'fc.Compressed(FedAvg({sampled}), fc.TopK(density=0.03, values="q2"), fc.TopK(density=0.05, values="q4"))',
        pair(lambda: fc.TopK(density=0.03, values="q2"), lambda: fc.TopK(density=0.05, values="q4")),
        row="E",
        remembers=True,
        least_rounds=40,
    ),
    Line("H", "fc.Compressed(FedAvg({sampled}), fc.Identity())", pair(lambda: fc.Identity())),
    Line(
        "I",
        "fc.Compressed(FedAvg({sampled}), fc.Auto(bits=0.1, feedback=True))",
        pair(lambda: fc.Auto(bits=0.1, feedback=True)),
        row="I",
        remembers=True,
        least_rounds=40,
        note="Clients need numba or the compiled file of fedcomp.",
    ),
    Line(
        "F",
        "fc.Compressed(FedMedian({sampled}), fc.ScaledSign())",
        pair(lambda: fc.ScaledSign()),
        purpose="median",
        remembers=True,
        least_rounds=10,
    ),
    Line(
        "G",
        "fc.Compressed(FedMedian({sampled}), fc.QSGD(levels=127))",
        pair(lambda: fc.QSGD(levels=127)),
        purpose="median",
    ),
    Line(
        "coded relay",
        'fc.CodedFedAvg(fc.Compressed(FedAvg({sampled}), fc.QSGD(levels=7)), code="mds", symbols={shards}, '
        'transport="peers")',
        lambda inner, of: fc.CodedFedAvg(
            fc.Compressed(inner, fc.QSGD(levels=7)), code="mds", symbols=of.shards, transport="peers"
        ),
        purpose="vanish",
        note="Clients must reach each other. Where they come back, A to E keep their work without it.",
    ),
    Line(
        "coded sum",
        "fc.CodedFedAvg(fc.Compressed(FedAvg({sampled}), fc.FixedPoint(fc.RandomK(1.0), clip=0.05, levels=127)), "
        'construction="sumcode", symbols={symbols}, threshold={threshold}, min_contributors=4, transport="peers", '
        "max_weight=1000)",
        lambda inner, of: fc.CodedFedAvg(
            fc.Compressed(inner, fc.FixedPoint(fc.RandomK(1.0), clip=0.05, levels=127)),
            construction="sumcode",
            symbols=of.symbols,
            threshold=of.threshold,
            min_contributors=4,
            transport="peers",
            max_weight=1000,
        ),
        purpose="hide",
        note="Clients must reach each other, and need peer keys against a server that breaks the protocol. Set clip "
        "near the largest change of one weight in a round.",
    ),
    Line(
        "DpFedAvg",
        "fc.Compressed(fc.DpFedAvg(FedAvg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=2.0, "
        "population={clients}, budget=8.0{drawn}), fc.TopK(density=0.05))",
        lambda inner, of: fc.Compressed(
            fc.DpFedAvg(inner, clip=1.0, noise_multiplier=2.0, population=of.population), fc.TopK(density=0.05)
        ),
        purpose="client",
        note="The server is trusted. Choose the noise: python -m fedcomp.privacy plan --help",
    ),
    Line(
        "RecordDp",
        "fc.RecordDp(fc.Compressed(FedAvg({quiet}), fc.TopK(density=0.05)), fc.DpSgdPlan(noise_multiplier=2.0, "
        "rate=0.1, steps=20, delta=1e-5, budget=3.0), records=1442)",
        _record_level,
        purpose="record",
        note="Set records to the number of all clients' records, and choose the plan by your budget.",
    ),
    Line(
        "CHOCO",
        'fc.GossipRelay(CHOCO(lr=0.05, gamma=1.0, compressor={{"id": "scaledsign"}}), "ring", transport="peers", '
        "observe_every=1000{whole})",
        lambda inner, of: fc.GossipRelay(
            {"name": "choco", "lr": 0.05, "gamma": 1.0, "compressor": {"id": "scaledsign"}},
            "ring",
            transport="peers",
            **_gossip(of),
        ),
        purpose="gossip",
        note="For undirected graphs; take SparsePush on directed ones. Without dense_below=0 tensors of one dimension "
        "travel whole.",
    ),
    Line(
        "SparsePush",
        'fc.GossipRelay(SparsePush(density=0.01, lr=0.05), "exponential", skew_rounds="auto", transport="peers", '
        "observe_every=1000{whole})",
        lambda inner, of: fc.GossipRelay(
            {"name": "sparse-push", "density": 0.01, "lr": 0.05}, "exponential", transport="peers", **_gossip(of)
        ),
        purpose="gossip",
        note="For directed, changing or lossy graphs. Without dense_below=0 tensors of one dimension travel whole.",
    ),
)
"""All lines, in the order of the page."""
