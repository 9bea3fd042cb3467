"""Coded sums: does what the server receives stay the same when clients are added, and is what it decodes the sum?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Claim, Findings, Table, mean
from fedcomp.experiments.kit import Record, Records, Say, Sweep, claim, curves, table
from fedcomp.experiments.options import TEXT, Config, Option
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.rules import Int, Real

TASK = "digits"
SYSTEM = "sumcode"
# Up to fifty: at ten times the clients a growth that is linear cannot be taken for a constant.
FEDERATIONS = (5, 10, 20, 50)
MASKED = (5, 10, 20)
THROUGH_SERVER = 10
SETTLED = 2
"""First round that counts: in the one before, clients and server introduce themselves."""

CHECKED = {"share": 12, "mask": 6}
"""Clients of the runs whose sums are compared with integers added without any code, by mode."""

OPTIONS = {
    "task.hidden": Option("1024", TEXT, "widths of the model's hidden layers"),
    "lr": Option(0.2, Real(above=0.0), "step size of the clients' SGD"),
    "max_steps": Option(4, Int(1), "steps of SGD a round"),
    "codec.density": Option(1.0, Real(above=0.0, most=1.0), "share of the coordinates sent, the same on all clients"),
    "codec.clip": Option(0.1, Real(above=0.0), "largest change of one coordinate that is sent at once"),
    "codec.levels": Option(127, Int(1, 127), "steps from zero to the clip"),
    "exact_rounds": Option(3, Int(1), "rounds that are compared with the sum of integers"),
}

_TAKE = ("task.", "lr", "max_steps", "codec.")
_KILO = 1000.0


def plain(clients: int) -> str:
    """Return the label of the row whose clients upload the same integers to the server, in the clear."""
    return f"8-bit uploads, {clients} clients"


def summed(clients: int) -> str:
    """Return the label of the row whose clients add shards among themselves."""
    return f"coded sum, {clients} clients"


def masked(clients: int) -> str:
    """Return the label of the row whose clients upload masked integers and add shards of the masks."""
    return f"LightSecAgg, {clients} clients"


HUB = f"coded sum through the server, {THROUGH_SERVER} clients"


def code(clients: int) -> dict[str, int]:
    """Return K and T: three fifths of the clients and one fifth, so that one fifth may be lost."""
    return {"symbols": 3 * clients // 5, "threshold": clients // 5}


def rows(config: Config) -> list[RunSpec]:
    """Plain uploads and coded sums for every number of clients; masks for some; one sum through the server."""

    def spec(system: str, label: str, clients: int, **fixed: Any) -> RunSpec:
        settings = {"task.partition": "iid", "evaluate_every": max(1, config.rounds), **fixed}
        return replace(config.spec(system, label, TASK, take=_TAKE, **settings), clients=clients)

    # Everybody counts the same, as with equal shares of the data; weights would need the field of four bytes.
    even: dict[str, Any] = {"weighted": False}
    out = [spec("fixedpoint", plain(n), n) for n in FEDERATIONS]
    out += [spec(SYSTEM, summed(n), n, **code(n), **even) for n in FEDERATIONS]
    out += [spec(SYSTEM, masked(n), n, mode="mask", **code(n), **even) for n in MASKED]
    out.append(spec(SYSTEM, HUB, THROUGH_SERVER, transport="hub", **code(THROUGH_SERVER), **even))
    return out


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Bytes a round by number of clients and link; rounds whose model is the integer sum's, bit for bit."""
    modes = [{"mode": mode, "clients": clients} for mode, clients in CHECKED.items()]
    exact = Sweep(exact_rounds, modes, "integers beside the code", {"config": config})(say)
    few, *_, many = federations = Records(federation(n, results) for n in FEDERATIONS)
    lines = {
        "coded sum": "coded",
        "8-bit uploads": "plain",
        "LightSecAgg": "masked",
        "coded sum, sent by one client to others": "between",
    }
    points = [
        Record({"line": line, "clients": record.clients, "kB": record[name] / _KILO})
        for line, name in lines.items()
        for record in federations
        if record[name] is not None
    ]
    return Findings(
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
        claims=claims(config, results, federations, exact),
        answer=f"With {many.clients} clients in place of {few.clients} the server receives "
        f"{many.coded / few.coded:.2f} times the bytes of coded sums, {many.plain / few.plain:.1f} times those of "
        f"8-bit uploads; {100 * min(exact.each('share')):.0f} % of the sums are exact.",
    )


def federation(n: int, results: Mapping[str, RunResult]) -> Record:
    """Return what a round of ``n`` clients sends on each link, in bytes, and how the coded sum's model compares."""
    coded, uploads = results[summed(n)], results[plain(n)]
    return Record(
        {
            "clients": n,
            "coded": per_round(coded, "uplink_payload_bytes"),
            "coded_wire": per_round(coded, "uplink_wire_bytes"),
            "plain": per_round(uploads, "uplink_payload_bytes"),
            "plain_wire": per_round(uploads, "uplink_wire_bytes"),
            # Every masked client uploads a vector of its own, so that fifty of them only repeat what twenty show.
            "masked": per_round(results[masked(n)], "uplink_payload_bytes") if n in MASKED else None,
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
        return lambda record: None if record[name] is None else record[name] / _KILO

    columns: dict[str, Any] = {
        "clients": lambda record: str(record.clients),
        "K": lambda record: code(record.clients)["symbols"],
        "T": lambda record: code(record.clients)["threshold"],
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


def exact_rounds(mode: str, clients: int, *, config: Config) -> dict[str, Any]:
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
    from fedcomp.flower.grid import InProcessGrid

    rounds = int(config.settings["exact_rounds"])
    witness = Witness()
    # Inside the half that encodes and shares: of what leaves the client single updates are not to be had.
    app = client(ClientApp(), ClientHalf("witness", witness, inside=("compression",)), only=["compression"])
    app.train()(generic.train)
    app.query()(generic.query)
    settings: dict[str, Any] = {
        "task.partition": "dirichlet:0.5",
        "mode": mode,
        "evaluate_every": rounds,
        **code(clients),
    }
    # Weighted, and with unequal clients: equal weights could hide a wrong one.
    spec = replace(config.spec(SYSTEM, f"exact/{mode}", TASK, take=_TAKE, **settings), clients=clients, rounds=rounds)
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

        strategy: Any = get_system(SYSTEM).build(get_system(SYSTEM).resolve(spec.settings), spec.seed)
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


def claims(config: Config, results: Mapping[str, RunResult], federations: Records, exact: Records) -> list[Claim]:
    """Flat for the code, linear without, exact every round."""
    few, *_, many = federations
    less, *_, more = [record for record in federations if record.masked is not None]
    coordinates = sum(array.size for array in results[summed(few.clients)].arrays.values())
    # GF(65521) takes two bytes a symbol.
    vector = 2.0 * coordinates * float(config.settings["codec.density"])
    return [
        claim(
            f"coded sum: payload the server receives with {many.clients} clients over that with {few.clients}",
            many.coded / few.coded,
            "<= 1.1",
            "derived: (K + T)/K vectors whatever the number of clients, 52 bytes for each of the K + T sums and "
            "33 of each client's tag and report",
        ),
        claim(
            f"8-bit uploads: payload the server receives with {many.clients} clients over that with {few.clients}",
            many.plain / few.plain,
            # A hundredth for headers, which do not grow with the update.
            f">= {0.99 * many.clients / few.clients}",
            "derived: one vector per client; the code's constant is no news without this growth",
        ),
        claim(
            f"coded sum over 8-bit uploads: payload the server receives with {many.clients} clients",
            many.coded / many.plain,
            # A tenth more for headers and for the sums' tags.
            f"<= {1.1 * 2.0 * 4.0 / 3.0 / many.clients}",
            "derived: two bytes a symbol and K + T = 4/3 K, against one byte a coordinate and client",
        ),
        claim(
            f"coded sum over 8-bit uploads: bytes on the wire with {many.clients} clients, framing included",
            many.coded_wire / many.plain_wire,
            "<= 0.15",
            "measured 0.10: the framing of three answers per client grows with the clients, and weighs the more, the "
            "smaller the model",
        ),
        claim(
            "coded sum: what one client sends to others, in vectors of two bytes a coordinate, largest",
            max(federations.each("between")) / vector,
            # K is three fifths of N, so that N/K is 5/3; a tenth more for the parcels' headers.
            f"<= {1.1 * 5.0 / 3.0}",
            "derived: N/K shards; the price of the code",
        ),
        claim(
            f"LightSecAgg: payload the server receives with {more.clients} clients over that with {less.clients}",
            more.masked / less.masked,
            ">= 2.5",
            "derived: every client uploads a vector of its own, masked, beside the 4/3 for the sum of the masks",
        ),
        claim(
            "coded sum through the server: payload it receives, over that with links between clients",
            per_round(results[HUB], "uplink_payload_bytes")
            / per_round(results[summed(THROUGH_SERVER)], "uplink_payload_bytes"),
            ">= 5.0",
            "derived: all N (N - 1) shards cross its link; without links between clients the code saves nothing",
        ),
        *(
            claim(
                f"rounds whose model is the integer sum's bit for bit, mode {record.mode}",
                record.share,
                "== 1.0",
                "a sum in the field is a sum of integers, or nothing",
            )
            for record in exact
        ),
        claim(
            "clients missing from a sum in which nobody was lost, largest",
            max(federations.each("missing")),
            "== 0.0",
            "every update is in",
        ),
        claim(
            "accuracy against 8-bit uploads, largest difference",
            max(abs(record.accuracy) for record in federations),
            "<= 0.03",
            "the same integers are added; weights differ by one example, and so do roundings after the first round",
        ),
    ]


EXPERIMENT = Experiment(
    name="sumcode",
    question="Does what the server receives stay the same when clients are added, and is what it decodes the sum?",
    rows=rows,
    measure=measure,
    options=OPTIONS,
    rounds=4,
    clients=FEDERATIONS[0],
    minutes=1.0,
    quick=(
        "rounds=1",
        "task.hidden=32",
        "max_steps=1",
        "exact_rounds=1",
    ),
    notes=(
        "The number of clients is part of each row; the option --clients changes nothing here. K is three fifths of "
        "the clients, T one fifth, so that one fifth of them may be lost. All rows send the same integers, one for "
        "every coordinate, with error feedback; coded sums over GF(65521) with equal weights.\n\n"
        "What the server receives is flat, what it sends is not: every client still gets the whole model.\n\n"
        "The price is between the clients: each hands N/K vectors of two bytes a coordinate to the others."
    ),
)
