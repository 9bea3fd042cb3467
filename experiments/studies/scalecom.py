"""ScaleCom: bytes and unions of supports by number of clients, and norms of memories with constant gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedcomp.codecs import ErrorFeedback, RandomK, ScaleCom, State, TopK
from fedcomp.codecs.scalecom import support_frame
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import curves, table
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.studies.memories import SEED, memory_norm
from fedcomp.experiments.tables import Found
from fedcomp.layout import NONE_DENSE, Layout, Vector
from fedcomp.program import Answer, Ask, Me, Now, Round, Said, System
from fedcomp.rng import Key
from fedcomp.systems.pair import Pair
from fedcomp.systems.shared_support import Lead, SharedSupport

SIDES: Final = {"local top-k": "local", "CLT-k": "CLT-k"}
"""By label, the first word of a column: every client selects for itself, or a leader selects for all."""

NORM: Final = "memory norm after all rounds, in gradients"

N: Final = 300
SHARE: Final = 0.05
"""Number of coordinates, and the fraction sent, in the measurement of memories."""

SETTLED: Final = 3
"""First round that counts; before it, nodes get whole models."""


def study(found: Found) -> Studied:
    """Measure bytes and unions by number of clients, and memory norms over ``norm_rounds`` rounds."""
    settings, results = found.config.settings, found.results
    rounds, density = int(settings["norm_rounds"]), float(settings["codec.density"])
    norms = found.say.cell("norms", lambda: memory_norms(rounds))
    counts = sorted({result.spec.clients for label, result in results.items() if label.startswith("CLT-k")})
    by = {side: {n: settled(results[f"{side}, {n} clients"], n) for n in counts} for side in SIDES}
    few, many = counts[0], counts[-1]
    led = [sums["union"] for sums in by["CLT-k"].values()]
    columns: dict[str, Any] = {"clients": lambda n: n}
    columns |= {
        f"{word}: {heading}": (lambda n, side=side, name=name: by[side][n][name])
        for side, word in SIDES.items()
        for name, heading in (("union", "union / k"), ("down", "down, kB"))
    }
    return Studied(
        {
            **{(side, "downlink grows, times"): by[side][many]["down"] / by[side][few]["down"] for side in SIDES},
            ("CLT-k", "largest union over k"): max(led),
            ("CLT-k", "smallest union over k"): min(led),
            ("local top-k", "union over k with 8 clients"): by["local top-k"][8]["union"],
            **{(name, NORM): norm for name, norm in norms.items()},
        },
        tables=[
            table(
                "Gradient build-up",
                columns,
                counts,
                f"Payload per client and round, mean over the rounds from {SETTLED} on. k is {100 * density:g} % of "
                "the compressible coordinates; a union counts those that the mean update changes. Biases are sent "
                "whole in both.",
            ),
            table(
                "Memory after all rounds, in gradients",
                {"scheme": lambda name: name, "‖memory‖ / ‖gradient‖": lambda name: round(norms[name], 1)},
                norms,
                f"Mean of four clients with constant gradients, {N} Gaussian coordinates, {SHARE:.0%} sent, after "
                f"{rounds} rounds. When the mean chooses, parts that cancel in the mean are never sent and stay in "
                "the memories.",
            ),
        ],
        figures=[
            curves(
                "Downlink against the number of clients",
                [(side, n, by[side][n]["down"]) for side in SIDES for n in counts],
                lambda point: point[1],
                lambda point: point[2],
                lambda point: point[0],
                x_label="clients",
                y_label="kB per client and round",
                log_x=True,
                log_y=True,
            ),
        ],
        # The bound is for 2000 rounds; after fewer the norm is still growing.
        skipped={} if rounds >= 2000 else {("support of the mean", NORM): "needs norm_rounds=2000"},
    )


def settled(result: RunResult, clients: int) -> dict[str, float]:
    """Return means over the rounds that count: union over k, and downlink kB per client."""
    records, k = [record for record in result.rounds if record.round >= SETTLED], _selected(result)
    return {
        "union": mean(record.metrics["report.changed"] / k for record in records),
        "down": mean(record.downlink_payload_bytes for record in records) / clients / 1000,
    }


def _selected(result: RunResult) -> int:
    """Return k, summed over the layers: both kinds of rows rank by layer."""
    # Shared supports keep the smallest tensors dense; the drop-in pair does not.
    layout = Layout.of(result.arrays, None if result.spec.system == "scalecom" else NONE_DENSE)
    codec = TopK(float(result.spec.settings["codec.density"]), scope="layer")
    return sum(codec.count(stretch) for stretch in codec.stretches(layout))


class Totals(Said):
    """The answer of a client with its whole vector, which no real message has."""

    def __init__(self, vector: Vector) -> None:
        self.vector = vector


@dataclass(frozen=True, repr=False, eq=False)
class Oracle(SharedSupport, id="oracle"):
    """A shared support that is the true top k of the mean of all clients' memory plus update; no leader can do better.

    Its index block is sent as if the leader had chosen it.
    """

    def round(self, now: Now) -> Round:
        """All clients train, the server chooses, all clients send."""
        leader = (now.number - 1) % len(now.nodes)
        trained = yield [Ask(node) for node in now.nodes]
        total, weight = np.zeros(now.layout.size), sum(answer.weight for answer in trained)
        for answer in trained:
            assert isinstance(answer.say, Totals)
            total += answer.weight / weight * answer.say.vector
        supports = self.codec.choose_from(total.astype(np.float32), now.layout, now.key("uplink", leader))
        blobs = {"support": support_frame(supports, self.codec, now.layout)}
        answers = yield [Ask(node, "query", Lead(lead=node == leader), blobs=blobs) for node in now.nodes]
        return self.stepped(now, supports, blobs["support"], answers)

    def client(self, memory: State, ask: Ask, me: Me) -> tuple[State, Answer]:
        """Return the whole vector, or the values on the support; the leader also sends the support."""
        leads = isinstance(ask.say, Lead) and ask.say.lead
        memory, answer = super().client(memory, ask._replace(say=None), me)
        if ask.kind == "train":
            return memory, answer._replace(say=Totals(self.codec.total(memory, me.layout)))
        return memory, answer._replace(frames={**ask.blobs, **answer.frames}) if leads else answer


def memory_norms(rounds: int) -> dict[str, float]:
    """Return, by scheme, the mean of ‖memory‖ / ‖gradient‖ over four clients with constant Gaussian gradients."""
    layout, key = Layout.flat(N), Key(SEED, "gradients")
    # Client 1 leads the first round.
    draws = [key.at(partition=c).generator().standard_normal(N).astype(np.float32) for c in (1, 2, 3, 0)]
    systems: dict[str, System] = {
        "CLT-k, rotating leader": SharedSupport(ScaleCom(SHARE)),
        "local top-k": Pair(ErrorFeedback(TopK(SHARE))),
        "shared random-k": Pair(ErrorFeedback(RandomK(SHARE))),
        "support of the mean": Oracle(ScaleCom(SHARE)),
    }
    return {name: memory_norm(system, layout, draws, rounds) for name, system in systems.items()}
