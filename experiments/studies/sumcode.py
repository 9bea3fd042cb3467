"""Coded sums: bytes a round on each link, and rounds compared with integers added without a code."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fedcomp.experiments.findings import Table, mean
from fedcomp.experiments.kit import Record, Records, Sweep, curves, table
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.tables import Found, Studied, Training

SETTLED: Final = 2
"""First round that counts: in the one before, clients and server introduce themselves."""

CHECKED: Final = {"share": 12, "mask": 6}
"""Clients of the runs whose sums are compared with integers added without any code, by mode."""

_LINES: Final = {
    "coded sum": "coded",
    "8-bit uploads": "plain",
    "LightSecAgg": "masked",
    "coded sum, sent by one client to others": "between",
}


def shape(clients: int) -> str:
    """Return K and T as settings: three fifths of the clients and one fifth, so that one fifth may be lost."""
    return f"symbols={3 * clients // 5} threshold={clients // 5}"


def study(found: Found) -> Studied:
    """Bytes a round by number of clients and link; rounds whose model is the integer sum's, bit for bit."""
    results = found.results
    sizes = [int(label.split()[-2]) for label in results if label.startswith("8-bit uploads")]
    federations = Records(federation(n, results) for n in sizes)
    few, *_, many = federations
    less, *_, more = [record for record in federations if record.masked is not None]
    modes = [{"mode": mode, "clients": clients} for mode, clients in CHECKED.items()]
    training = Training.of(found.experiment, found.config)
    exact = Sweep(exact_rounds, modes, "integers beside the code", {"training": training})(found.say)
    hub, direct = (results[f"coded sum{through}, 10 clients"] for through in (" through the server", ""))
    # GF(65521) takes two bytes a symbol; all coordinates are sent.
    vector = 2.0 * sum(array.size for array in results[f"coded sum, {few.clients} clients"].arrays.values())
    points = [
        Record({"line": line, "clients": record.clients, "kB": record[name] / 1000.0})
        for line, name in _LINES.items()
        for record in federations
        if record[name] is not None
    ]
    grows = f"server receives, {many.clients} clients over {few.clients}"
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
        tables=[_received(federations), _exact(exact)],
        figures=[
            curves(
                "What the server receives against the number of clients",
                points,
                "clients",
                "kB",
                "line",
                y_label="kB of payload a round",
                log_x=True,
                log_y=True,
            )
        ],
    )


def federation(n: int, results: Any) -> Record:
    """Return what a round of ``n`` clients sends on each link, in bytes, and how the coded sum's model compares."""
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
            # What is counted at the senders, over all of them: one client's part.
            "between": per_round(coded, "peer_wire_bytes") / n,
            "missing": n - min(record.metrics["coded.included"] for record in coded.rounds[1:]),
            "accuracy": coded.final.accuracy - uploads.final.accuracy,
        }
    )


def per_round(result: RunResult, name: str) -> float:
    """Return the mean of a record's number over the rounds that count; NaN when there are none."""
    return mean(getattr(record, name) for record in result.rounds if record.round >= SETTLED)


def _received(federations: Records) -> Table:
    def kilo(name: str) -> Any:
        return lambda record: None if record[name] is None else record[name] / 1000.0

    columns: dict[str, Any] = {
        "clients": lambda record: str(record.clients),
        "K": lambda record: 3 * record.clients // 5,
        "T": lambda record: record.clients // 5,
        "coded sum: server receives, kB": kilo("coded"),
        "coded sum: on the wire, kB": kilo("coded_wire"),
        "8-bit uploads: server receives, kB": kilo("plain"),
        "8-bit uploads: on the wire, kB": kilo("plain_wire"),
        "LightSecAgg: server receives, kB": kilo("masked"),
        "coded sum: one client to others, kB": kilo("between"),
    }
    return table(
        "Bytes a round",
        columns,
        federations,
        f"Means over the rounds from {SETTLED} on. On the wire includes the framing of every message: a coded round "
        "has three answers per client, of about a kilobyte each.",
    )


def _exact(exact: Records) -> Table:
    return table(
        "Rounds whose model is that of integers added without a code, bit for bit",
        {"mode": "mode", "clients": "clients", "share of the rounds": "share"},
        exact,
        "Weighted by the number of examples, over GF(2^31 - 1).",
    )


def exact_rounds(mode: str, clients: int, *, training: Training) -> dict[str, Any]:
    """Run a federation whose frames are kept, and compare every round's model with the sum of the integers in them.

    Returns
    -------
    dict
        ``share`` of the rounds in which they are equal, bit for bit.
    """
    from flwr.clientapp import ClientApp

    from fedcomp.clients import app as generic  # brings torch and Flower
    from fedcomp.clients.client import client
    from fedcomp.clients.half import ClientHalf
    from fedcomp.experiments.serve import serve
    from fedcomp.experiments.spec import parse_settings
    from fedcomp.flower.grid import InProcessGrid

    rounds = int(training.config.settings["exact_rounds"])
    witness = Witness()
    # Inside the half that encodes and shares: of what leaves the client single updates are not to be had.
    app = client(ClientApp(), ClientHalf("witness", witness, inside=("compression",)), only=["compression"])
    app.train()(generic.train)
    app.query()(generic.query)
    # Weighted, and with unequal clients: equal weights could hide a wrong one.
    own: dict[str, Any] = {"task.partition": "dirichlet:0.5", "weighted": True, "mode": mode}
    own |= {"evaluate_every": rounds, "rounds": rounds, "clients": clients, **parse_settings(shape(clients))}
    spec = training.spec(next(label for label in training.rows if label.startswith("coded sum")), **own)
    with InProcessGrid(app, clients, seed=spec.seed) as grid:
        result = serve(spec, grid)
    # The model after the last round begins no round that the witness could see.
    witness.models[rounds + 1] = result.arrays
    return {"share": witness.exact(spec, rounds) / rounds}


class Witness:
    """A half beside the app that keeps what every client trained, and the model each round begins with."""

    def __init__(self) -> None:
        self.trained: dict[int, dict[int, tuple[dict[str, Any], int]]] = {}
        self.models: dict[int, dict[str, Any]] = {}

    def __call__(self, msg: Any, context: Any, call_next: Any) -> Any:
        from fedcomp.flower.records import to_arrays

        if msg.metadata.message_type != "train":
            return call_next(msg, context)
        number = int(msg.content.config_records["config"]["server-round"])
        self.models[number] = to_arrays(next(iter(msg.content.array_records.values())))
        reply = call_next(msg, context)
        if not reply.has_error():
            after = to_arrays(next(iter(reply.content.array_records.values())))
            weight = next(iter(reply.content.metric_records.values()))["num-examples"]
            self.trained.setdefault(number, {})[int(context.node_config["partition-id"])] = after, int(weight)
        return reply

    def exact(self, spec: RunSpec, rounds: int) -> int:
        """Return in how many rounds the next model is the last one plus the mean of all clients' integers."""
        from fedcomp.codecs import fixed_point_of
        from fedcomp.experiments.systems import get_system
        from fedcomp.layout import Layout, Update
        from fedcomp.rng import Key

        strategy: Any = get_system(spec.system).build(get_system(spec.system).resolve(spec.settings), spec.seed)
        sends, codec = strategy.system.codec, fixed_point_of(strategy.system.codec)
        memories: dict[int, Any] = {}
        count = 0
        for number in range(1, rounds + 1):
            before, after = self.models[number], self.models[number + 1]
            layout = Layout.of(before, strategy.policy)
            # Divided and rounded once, as the server does; added as Python's integers, without field or bound.
            total = np.zeros(layout.size, object)
            for node, (made, weight) in self.trained[number].items():
                update = Update(layout.difference(made, before), layout)
                memory = memories[node] if node in memories else sends.init(layout)
                frame, memories[node] = sends.encode(update, memory, Key(spec.seed, "uplink", number, node))
                # Decoded values are whole steps of the grid, up to the rounding of float32.
                steps = np.rint(codec.decode(frame, layout).astype(np.float64) / codec.step)
                total += steps.astype(np.int64).astype(object) * weight
            weights = sum(weight for _, weight in self.trained[number].values())
            mean_update = np.array([float(t) * (codec.step / weights) for t in total]).astype(np.float32)
            expected = layout.unflatten(layout.flatten(before) + mean_update)
            # Bytes and not values: -0.0 equals 0.0.
            count += all(expected[name].tobytes() == after[name].tobytes() for name in after)
        return count
