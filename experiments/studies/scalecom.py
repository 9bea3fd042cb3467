"""ScaleCom: bytes and unions against the number of clients, and norms of memories with constant gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from fedcomp.codecs import Codec, RandomK, ScaleCom, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.experiments.experiment import Studied
from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import curves, table
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.tables import Found
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

SIDES: Final = {"local top-k": "local", "CLT-k": "CLT-k"}
"""Every client selects by itself; a leader selects for all. By label, a column's first word."""

NORM: Final = "memory norm after all rounds, in gradients"

SETTLED: Final = 3
"""First round that counts: before it, nodes get whole models."""


def study(found: Found) -> Studied:
    """Bytes and unions by number of clients, and memory norms over ``norm_rounds`` rounds."""
    settings, results = found.config.settings, found.results
    rounds, density = int(settings["norm_rounds"]), float(settings["codec.density"])
    norms = found.say.cell("norms", lambda: memory_norms(rounds, found.say))
    counts = sorted({result.spec.clients for label, result in results.items() if label.startswith("CLT-k")})
    by = {side: {n: settled(results[f"{side}, {n} clients"], n) for n in counts} for side in SIDES}
    few, many = counts[0], counts[-1]
    led = [sums["union"] for sums in by["CLT-k"].values()]
    columns: dict[str, Any] = {"clients": lambda n: n}
    for side, word in SIDES.items():
        for name, heading in (("union", "union / k"), ("down", "down, kB"), ("up", "up, kB")):
            # Bound as defaults: closures would see the last of the loops only.
            columns[f"{word}: {heading}"] = lambda n, side=side, name=name: by[side][n][name]
    return Studied(
        {
            **{(side, "downlink grows, times"): by[side][many]["down"] / by[side][few]["down"] for side in SIDES},
            ("CLT-k", "largest union over k"): max(led),
            ("CLT-k", "smallest union over k"): min(led),
            ("local top-k", "union over k with 8 clients"): by["local top-k"][8]["union"],
            **{
                (name, "memory norm after all rounds, in gradients"): line[-1] for name, line in norms["ratios"].items()
            },
        },
        tables=[
            table(
                "Gradient build-up",
                columns,
                counts,
                f"Payload per client and round, mean over the rounds from {SETTLED} on. k is {100 * density:g} % of "
                "the compressible coordinates; a union counts those that the mean update changes. "
                "Biases travel whole in both.",
            )
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
            curves(
                "Memory against gradient, four clients with constant gradients",
                norms["ratios"].items(),
                lambda line: norms["rounds"],
                lambda line: line[1],
                lambda line: line[0],
                x_label="round",
                y_label="‖memory‖ / ‖gradient‖, mean",
                log_x=True,
                log_y=True,
                caption="n = 300 Gaussian coordinates, k = 15. What cancels in the mean is never sent when the mean "
                "chooses, and stays in the memories.",
            ),
        ],
        # The bound is that of 2000 rounds; after fewer the norm is still on its way.
        skipped={} if rounds >= 2000 else {("support of the mean", NORM): "needs norm_rounds=2000"},
    )


def settled(result: RunResult, clients: int) -> dict[str, float]:
    """Return means over the rounds that count: union over k, and kB per client down and up."""
    records, k = [record for record in result.rounds if record.round >= SETTLED], _selected(result)
    return {
        "union": mean(record.metrics["report.changed"] / k for record in records),
        "down": mean(record.downlink_payload_bytes for record in records) / clients / 1000,
        "up": mean(record.uplink_payload_bytes for record in records) / clients / 1000,
    }


def _selected(result: RunResult) -> int:
    """Return k, summed over the layers."""
    # These bring Flower.
    from fedcomp.experiments.systems import get_system
    from fedcomp.strategies.compressed import Compressed

    system = get_system(result.spec.system)
    strategy = system.build(system.resolve(result.spec.settings), result.spec.seed)
    # Shared supports keep the smallest tensors dense, the drop-in pair none.
    layout = Layout.of(result.arrays, strategy.policy if isinstance(strategy, Compressed) else None)
    # By layer, as both kinds of rows rank.
    codec = TopK(float(result.spec.settings["codec.density"]), scope="layer")
    return sum(codec.count(stretch) for stretch in codec.stretches(layout))


def memory_norms(rounds: int, say: Callable[[str], object] = lambda _text: None) -> dict[str, Any]:
    """Run four clients with constant Gaussian gradients and return ‖memory‖ / ‖gradient‖ over the rounds.

    The rotating leader, local top-k and a shared random support are codecs as they are; the support of the mean is what
    no client could know.
    """
    # A fixed key and not the run's: the bounds of the norms are of these very gradients.
    layout, key = Layout.flat(300), Key(5, "gradients")
    draws = [key.at(partition=c).generator().standard_normal(300) for c in range(4)]
    updates = [Update(draw.astype(np.float32), layout) for draw in draws]
    lengths = [float(np.linalg.norm(update.vector)) for update in updates]
    marks = sorted({int(m) for m in np.geomspace(1, rounds, 40)} | {rounds})
    schemes: dict[str, Callable[[list[Any], int], list[Any]]] = {
        "CLT-k, rotating leader": lambda states, t: _clt(updates, states, t, layout),
        "local top-k": lambda states, t: _apart(ErrorFeedback(TopK(0.05)), updates, states, t),
        "shared random-k": lambda states, t: _apart(ErrorFeedback(RandomK(0.05)), updates, states, t),
        "support of the mean": lambda states, t: _clt(updates, states, t, layout, of_the_mean=True),
    }
    ratios: dict[str, list[float]] = {}
    for name, advance in schemes.items():
        say(f"memory norms over {rounds} rounds: {name}")
        states: list[Any] = [{"memory": np.zeros(300, np.float32)} for _ in updates]
        series = []
        for t in range(1, rounds + 1):
            states = advance(states, t)
            if t in marks:
                norms = [float(np.linalg.norm(s["memory"])) / n for s, n in zip(states, lengths, strict=True)]
                series.append(mean(norms))
        ratios[name] = series
    return {"rounds": marks, "ratios": ratios}


def _clt(updates: list[Update], states: list[Any], t: int, layout: Layout, *, of_the_mean: bool = False) -> list[Any]:
    codec, key = ScaleCom(0.05), Key(5, "uplink", t)
    waiting = [codec.begin(u, s, key) for u, s in zip(updates, states, strict=True)]
    if of_the_mean:
        total = np.sum([codec.total(w, layout) for w in waiting], axis=0, dtype=np.float32)
        supports = codec.choose_from(np.asarray(total), layout, key)
    else:
        supports = codec.choose(waiting[t % len(waiting)], layout, key)
    return [codec.send(w, supports, t, layout, key)[1] for w in waiting]


def _apart(codec: Codec, updates: list[Update], states: list[Any], t: int) -> list[Any]:
    pairs = enumerate(zip(updates, states, strict=True))
    return [codec.encode(update, state, Key(5, "uplink", t, c))[1] for c, (update, state) in pairs]
