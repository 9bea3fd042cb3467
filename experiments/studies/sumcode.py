"""Coded sums: bytes per round on each link, and rounds compared with uncoded integer sums."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fedcomp.experiments.findings import mean
from fedcomp.experiments.kit import Record, Records, curves, table
from fedcomp.experiments.spec import RunResult, parse_settings
from fedcomp.experiments.tables import Found, Studied, Training

SETTLED: Final = 2
"""First round that counts; in the round before, clients register with the server."""

_LINES: Final = {
    "coded sum": "coded",
    "8-bit uploads": "plain",
    "LightSecAgg": "masked",
    "coded sum, sent by one client to others": "between",
}


def shape(clients: int) -> str:
    """Return the settings of K and T: three fifths of the clients and one fifth, so one fifth may be lost."""
    return f"symbols={3 * clients // 5} threshold={clients // 5}"


def study(found: Found) -> Studied:
    """Measure bytes per round by number of clients and link, and the rounds whose model equals the integer sum's, bit
    for bit."""
    results = found.results
    sizes = [int(label.split()[-2]) for label in results if label.startswith("8-bit uploads")]
    federations = Records(federation(n, results) for n in sizes)
    few, *_, many = federations
    less, *_, more = [record for record in federations if record.masked is not None]
    training = Training.of(found.experiment, found.config)
    modes = [{"mode": mode, "clients": clients} for mode, clients in (("share", 12), ("mask", 6))]
    exact = found.sweep(exact_rounds, modes, "integers beside the code", training=training)
    hub, direct = (results[f"coded sum{through}, 10 clients"] for through in (" through the server", ""))
    # GF(65521) takes two bytes a symbol, and all coordinates are sent.
    vector = 2.0 * sum(array.size for array in results[f"coded sum, {few.clients} clients"].arrays.values())
    grows = f"server receives, {many.clients} clients over {few.clients}"

    def kilo(name: str) -> Any:
        return lambda record: None if record[name] is None else record[name] / 1000.0

    return Studied(
        {
            ("coded sum", grows): many.coded / few.coded,
            ("8-bit uploads", grows): many.plain / few.plain,
            ("LightSecAgg", f"server receives, {more.clients} clients over {less.clients}"): more.masked / less.masked,
            f"coded sum over 8-bit uploads: server receives, {many.clients} clients": many.coded / many.plain,
            f"coded sum over 8-bit uploads: bytes on the wire, {many.clients} clients": (
                many.coded_wire / many.plain_wire
            ),
            "vectors that one client sends to others": max(federations.each("between")) / vector,
            "sum through the server: it receives, over that with links between clients": (
                per_round(hub, "uplink_payload_bytes") / per_round(direct, "uplink_payload_bytes")
            ),
            **{f"exact rounds, mode {record.mode}": record.share for record in exact},
            "exact rounds": min(exact.each("share")),
            "clients missing": max(federations.each("missing")),
            "difference of accuracy": max(abs(record.accuracy) for record in federations),
        },
        tables=[
            table(
                "Bytes a round",
                {
                    "clients": lambda record: str(record.clients),
                    "K": lambda record: 3 * record.clients // 5,
                    "T": lambda record: record.clients // 5,
                    "coded sum: server receives, kB": kilo("coded"),
                    "coded sum: on the wire, kB": kilo("coded_wire"),
                    "8-bit uploads: server receives, kB": kilo("plain"),
                    "8-bit uploads: on the wire, kB": kilo("plain_wire"),
                    "LightSecAgg: server receives, kB": kilo("masked"),
                    "coded sum: one client to others, kB": kilo("between"),
                },
                federations,
                f"Means over the rounds from {SETTLED} on. On the wire includes the framing of every message. A coded "
                "round has three answers per client, with about a kilobyte of framing each.",
            )
        ],
        figures=[
            curves(
                "What the server receives against the number of clients",
                [(line, record) for line, name in _LINES.items() for record in federations if record[name] is not None],
                lambda point: point[1].clients,
                lambda point: point[1][_LINES[point[0]]] / 1000.0,
                lambda point: point[0],
                x_label="clients",
                y_label="kB of payload a round",
                log_x=True,
                log_y=True,
            )
        ],
    )


def federation(n: int, results: Any) -> Record:
    """Return the bytes of a round of ``n`` clients on each link, and compare the model of the coded sum."""
    coded, uploads = results[f"coded sum, {n} clients"], results[f"8-bit uploads, {n} clients"]
    masked = results.get(f"LightSecAgg, {n} clients")
    return Record(
        {
            "clients": n,
            "coded": per_round(coded, "uplink_payload_bytes"),
            "coded_wire": per_round(coded, "uplink_wire_bytes"),
            "plain": per_round(uploads, "uplink_payload_bytes"),
            "plain_wire": per_round(uploads, "uplink_wire_bytes"),
            "masked": None if masked is None else per_round(masked, "uplink_payload_bytes"),
            # Counted over all senders, so divided by the number of clients.
            "between": per_round(coded, "peer_wire_bytes") / n,
            "missing": n - min(record.metrics["coded.included"] for record in coded.rounds[1:]),
            "accuracy": coded.final.accuracy - uploads.final.accuracy,
        }
    )


def per_round(result: RunResult, name: str) -> float:
    """Return the mean of a number in a record over the rounds that count; NaN if there are none."""
    return mean(getattr(record, name) for record in result.rounds if record.round >= SETTLED)


def exact_rounds(mode: str, clients: int, *, training: Training) -> dict[str, float]:
    """Return the ``share`` of rounds whose model is the previous one plus the mean of all clients' integers, bit for
    bit.

    The row's program runs in memory. Its clients never send a single frame, so frames are taken from inside them. Their
    integers are added as Python integers, without field or bound.
    """
    from fedcomp.codecs import fixed_point_of
    from fedcomp.experiments.central import Clients
    from fedcomp.experiments.systems import get_system
    from fedcomp.local import Local
    from fedcomp.tasks import get_task

    rounds = int(training.config.settings["exact_rounds"])
    spec = training.spec(
        next(label for label in training.rows if label.startswith("coded sum")),
        # Weighted, with unequal clients, because equal weights could hide a wrong one.
        **{"weighted": True, "mode": mode, **parse_settings(shape(clients))},
    )
    task = get_task(spec.task, partition="dirichlet:0.5", hidden=str(spec.settings["task.hidden"]))
    learning = {"lr": spec.settings["lr"], "max_steps": spec.settings["max_steps"]}
    row = get_system(spec.system)
    strategy: Any = row.build(row.resolve(spec.settings), spec.seed)
    members = Clients(task, clients, spec.seed, learning, dense=strategy.policy)
    sizes, layout, codec = list(map(len, members.data)), members.layout, fixed_point_of(strategy.system.codec)
    local = Local(
        strategy.system,
        layout,
        members.vector,
        lambda number, node, start: members.train(number, node, start),
        lambda node: float(sizes[node]),
        clients,
        spec.seed,
    )
    exact = 0
    for number in range(1, rounds + 1):
        before, total = local.model, np.zeros(layout.size, object)
        local.step(number)
        for node, weight in enumerate(sizes):
            frame = local.clients[node].pending
            if frame is None:
                raise AssertionError(f"client {node} made no frame although nothing is lost here")
            # Decoded values are whole steps of the grid, up to float32 rounding.
            steps = np.rint(codec.decode(frame, layout).astype(np.float64) / codec.step)
            total += steps.astype(np.int64).astype(object) * weight
        # Divided and rounded once, as the server does.
        change = np.array([float(t) * (codec.step / sum(sizes)) for t in total]).astype(np.float32)
        # Bytes are compared, because the values -0.0 and 0.0 are equal.
        exact += (before + change).tobytes() == local.model.tobytes()
    return {"share": exact / rounds}
