"""Sums that wrap: residues that anybody adds on the way, their error, and what leaves a relay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedcomp.experiments.experiment import TEXT, Config, Experiment, Option
from fedcomp.experiments.findings import Claim, Findings, Say, Table, mean
from fedcomp.experiments.kit import Record, Records, Sweep, claim, curves, repetitions, table, workers
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.rules import Int, Real

if TYPE_CHECKING:
    from fedcomp.codecs import ModularSum
    from fedcomp.layout import Layout, Vector
    from fedcomp.wire import Frame

RIGHT: Final = "the contributors' dithers"
WRONG: Final = "dithers of another round"
NONE: Final = "no dithers"
EXPECTED: Final[Mapping[str, float]] = {RIGHT: 1.0, WRONG: 3.0, NONE: 2.0}
"""Error variance over C δ²/12 by what the server takes off (spec, derived)."""

SNRS: Final = tuple(range(0, 45, 5))

TREES: Final[Mapping[int, str]] = {8: "4,2", 16: "8,4,2", 32: "16,8,4,2"}
"""By number of clients, the aggregators of each level: two share with the server, however many are below."""

SHARING: Final = 2
SUMMANDS: Final = 1797
"""Room for every example of the task: what an update weighs."""

LINES: Final[Mapping[str, str]] = {
    "uploads": "uploads",
    "tree, all payload": "payload",
    "tree, vectors": "vectors",
    "tree, who is in them": "members",
}
"""Lines of the plot of bytes, and what of a record each shows."""

SETTLED: Final = 2
"""First round whose messages count: in the one before, clients and server introduce themselves."""

OPTIONS = {
    "task.hidden": Option("1024", TEXT, "widths of the hidden layers of the model that clients train"),
    "lr": Option(0.2, Real(above=0.0), "step size of the clients' SGD"),
    "max_steps": Option(4, Int(1), "steps of SGD a round"),
    "codec.clip": Option(0.1, Real(above=0.0), "largest change of one coordinate that is sent at once"),
    "codec.levels": Option(127, Int(1, 127), "steps from zero to the clip in what clients send"),
    "seeds": Option(3, Int(1, 100), "draws per row, with the seeds from --seed on"),
    "workers": workers(2),
    "values": Option(20_000, Int(16), "values of an update"),
    "levels": Option(10, Int(1), "steps from zero to the clip, in sums without messages"),
    "trees": Option(40, Int(1), "random trees of relays by which the frames are added"),
    "uses": Option(4, Int(1, 8), "uses of the emulated channel for each value"),
    "senders": Option(8, Int(2), "senders in the emulated channel"),
}


def uploads(clients: int) -> str:
    """Return the label of the row whose clients send the server their integers themselves."""
    return f"uploads, {clients} clients"


def along(clients: int) -> str:
    """Return the label of the row whose sums go along a tree."""
    return f"tree, {clients} clients"


def flat(clients: int) -> str:
    """Return the label of the row in which one client adds all updates."""
    return f"one aggregator, {clients} clients"


FEW: Final = min(TREES)
INTEGERS: Final = f"tree of plain integers, {FEW} clients"
FIELD: Final = f"plain integers in a prime field, {FEW} clients"


def rows(config: Config) -> list[RunSpec]:
    """Uploads, a tree and one aggregator for every number of clients; plain integers along a tree and in a field."""

    def spec(system: str, label: str, clients: int, codec: str = "fixedpoint", **fixed: Any) -> RunSpec:
        settings = {"task.partition": "iid", "evaluate_every": max(1, config.rounds), "feedback": True, **fixed}
        settings |= {} if system == "fixedpoint" else {"transport": "peers", "codec": codec}
        settings |= {"codec.summands": SUMMANDS} if codec == "modular" else {}
        settings |= {"codec.codec": "randomk", "codec.density": 1.0}
        take = ("task.", "lr", "max_steps", "codec.")
        return replace(config.spec(system, label, "digits", take=take, **settings), clients=clients)

    def tree(label: str, clients: int, groups: str, codec: str = "modular") -> RunSpec:
        return spec("relay-mds", label, clients, codec, symbols=2, groups=groups)

    return [
        *(spec("fixedpoint", uploads(n), n) for n in TREES),
        *(tree(along(n), n, groups) for n, groups in TREES.items()),
        *(tree(flat(n), n, "1") for n in TREES),
        tree(INTEGERS, FEW, TREES[FEW], "fixedpoint"),
        spec("sumcode", FIELD, FEW, symbols=3, threshold=1),
    ]


def exact(clients: int, seed: int, *, size: int, levels: int, trees: int) -> dict[str, Any]:
    """Add the frames of some clients along random trees; return errors, bytes, and how many trees differ."""
    from fedcomp.codecs import ModularSum, RandomK
    from fedcomp.layout import Layout, Update
    from fedcomp.rng import Key

    codec, layout = ModularSum(RandomK(1.0), clip=1.0, levels=levels, summands=clients), Layout.flat(size)
    key, rng = Key(seed, "uplink", 1), Key(seed, "modular-sum").generator()
    updates: list[Vector] = [rng.uniform(-1.0, 1.0, size).astype(np.float32) for _ in range(clients)]
    frames = [codec.encode(Update(u, layout), {}, key.at(partition=c))[0] for c, u in enumerate(updates)]
    totals = {_along_a_tree(codec, frames, layout, rng) for _ in range(trees)}
    decoded = sum(codec.decode(frame, layout).astype(np.float64) for frame in frames)
    total = codec.total(next(iter(totals)), layout)
    contributors = dict.fromkeys(range(clients), 1)
    true = np.sum(updates, axis=0, dtype=np.float64)
    unit = clients * codec.step**2 / 12
    found = {
        RIGHT: codec.place(total, 1, layout, key, contributors),
        WRONG: codec.place(total, 1, layout, key.at(round=2), contributors),
        NONE: total * codec.step,
    }
    return {
        "sums": len(totals),
        "off": float(np.abs(found[RIGHT] - decoded).max()),
        "variance": {name: float(np.square(vector - true).mean()) / unit for name, vector in found.items()},
        "bias": float((found[RIGHT] - true).mean() / np.sqrt(unit / size)),
        "frame": len(frames[0]),
        "sum": len(next(iter(totals))),
        "packed": -(-codec.grid.bits * size // 8),
        "plain": sum(map(len, frames)),
    }


def _along_a_tree(codec: ModularSum, frames: list[Frame], layout: Layout, rng: np.random.Generator) -> Frame:
    """Add frames as relays would: some that are there are taken, their sum is put back, until one is left."""
    left = [frames[i] for i in rng.permutation(len(frames))]
    while len(left) > 1:
        count = int(rng.integers(2, len(left) + 1))
        left = [*left[count:], codec.add(left[:count], layout)]
    return left[0]


def air(snr: float, fading: bool, seed: int, *, senders: int, uses: int, size: int) -> dict[str, Any]:
    """Send sums over the emulated channel."""
    from fedcomp.experiments.airsum import errors

    return errors(snr, fading, seed, senders=senders, uses=uses, count=size)


def received(clients: int, results: Mapping[str, RunResult], label: str = "") -> Record:
    """Return what reaches the server in a round along a tree, and by uploads, in bytes; what of it is the sums."""
    tree, plain = results[label or along(clients)], results[uploads(clients)]
    sums = [record.metrics["coded.sum_bytes"] for record in settled(tree)]
    count = sum(array.size for array in tree.arrays.values())
    return Record(
        {
            "clients": clients,
            "aggregators": str(tree.spec.settings["groups"]),
            "vectors": mean(each["vectors"] for each in sums),
            "members": mean(each["members"] for each in sums),
            # Less the heads of the sums, and rounded down: their last bytes are filled up.
            "bits": max((each["vectors"] // SHARING - 12) * 8 // count for each in sums),
            "payload": per_round(tree, "uplink_payload_bytes"),
            "wire": per_round(tree, "uplink_wire_bytes"),
            "between": per_round(tree, "peer_payload_bytes") / clients,
            "uploads": per_round(plain, "uplink_payload_bytes"),
            "uploads_wire": per_round(plain, "uplink_wire_bytes"),
            "missing": clients - min(record.metrics["coded.included"] for record in tree.rounds[1:]),
            "accuracy": tree.final.accuracy - plain.final.accuracy,
        }
    )


def settled(result: RunResult) -> list[RoundRecord]:
    """Return the rounds that count."""
    return [record for record in result.rounds if record.round >= min(SETTLED, result.spec.rounds)]


def per_round(result: RunResult, name: str) -> float:
    """Return the mean of a record's number over the rounds that count."""
    return mean(getattr(record, name) for record in settled(result))


def different(one: RunResult, other: RunResult) -> int:
    """Return in how many values two models differ, by their bits."""
    pairs = [(array.view("u4"), other.arrays[name].view("u4")) for name, array in one.arrays.items()]
    return sum(int((mine != theirs).sum()) for mine, theirs in pairs)


def _tree_table(trees: Records) -> Table:
    def kilo(name: str) -> Any:
        return lambda record: record[name] / 1000

    return table(
        "What reaches the server along a tree of relays",
        {
            "clients": lambda record: str(record.clients),
            "aggregators, from the clients upwards": "aggregators",
            "bits of a value": "bits",
            "vectors, kB": kilo("vectors"),
            "who is in them, kB": kilo("members"),
            "all payload, kB": kilo("payload"),
            "on the wire, kB": kilo("wire"),
            "uploads: payload, kB": kilo("uploads"),
            "uploads: on the wire, kB": kilo("uploads_wire"),
            "a client to others, kB": kilo("between"),
        },
        trees,
        f"Measured, a round. {SHARING} sums are shared with the server, as shards of which two decode; who is in them "
        "is a number, a weight and the metrics of each client. On the wire includes the framing of every message, most "
        "of it that of each client's answer to its training message.",
    )


def tree_claims(config: Config, trees: Records, differing: Mapping[str, int]) -> list[Claim]:
    """Return what is claimed of trees: flat, no more bits than the modulus has, the same models."""
    few, *_, many = trees
    levels = int(config.settings["codec.levels"])
    most, each = (2 * levels * SUMMANDS).bit_length(), (2 * levels).bit_length()
    return [
        claim(
            f"along a tree: bytes of the sums' vectors with {many.clients} clients over those with {few.clients}",
            many.vectors / few.vectors,
            "<= 1.05",
            "derived: two vectors, whatever is below",
        ),
        claim(
            f"uploads: payload with {many.clients} clients over that with {few.clients}",
            many.uploads / few.uploads,
            f">= {0.99 * many.clients / few.clients}",
            "derived: one vector for each client",
        ),
        claim(
            f"along a tree: all payload over that of uploads, {many.clients} clients",
            many.payload / many.uploads,
            # A tenth for who is in the sums, and for headers.
            f"<= {1.1 * SHARING * most / (each * many.clients)}",
            f"derived: two vectors of ⌈log2 M⌉ = {most} bits for a value against {each} bits from each client",
        ),
        claim("bits of a value in a sum, largest", max(trees.each("bits")), f"<= {most}", "derived: ⌈log2 M⌉"),
        *(
            claim(f"values of the model that differ: {name}", count, "== 0", "integers are added, in any order")
            for name, count in differing.items()
        ),
        claim("clients missing from a tree's sum, largest", max(trees.each("missing")), "== 0", "nobody was lost"),
        claim(
            "accuracy against uploads, largest difference",
            max(abs(record.accuracy) for record in trees),
            "<= 0.03",
            "the same updates, rounded otherwise",
        ),
    ]


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Count bytes along trees of relays; add frames without messages, also with wrong dithers; emulate a channel."""
    trees = Records(received(clients, results) for clients in TREES)
    differing = {
        f"{along(n)}, from one aggregator's": different(results[along(n)], results[flat(n)]) for n in TREES
    } | {f"{INTEGERS}, from the prime field's": different(results[INTEGERS], results[FIELD])}
    plain = received(FEW, results, INTEGERS)
    given = {name: int(config.settings[name]) for name in ("values", "levels", "trees", "uses", "senders", "workers")}
    size, seeds = given["values"], repetitions(config)
    sums = Sweep(
        exact,
        {"clients": [2, 5, 20, 100], "seed": list(seeds)},
        shared={"size": size, "levels": given["levels"], "trees": given["trees"]},
    )(say, given["workers"])
    shared = {"senders": given["senders"], "uses": given["uses"], "size": size}
    over = Sweep(air, {"snr": list(SNRS), "fading": [False, True], "seed": list(seeds)}, "air", shared)(
        say, given["workers"]
    )
    groups = sums.groups("clients")
    by_snr = over.groups("snr", "fading")

    def variance(name: str) -> float:
        return mean([run.variance[name] for run in sums])

    def error(way: str, snr: float, fading: bool = False) -> float:
        return mean(by_snr[snr, fading].each(way))

    worst = max(abs(run.bias) for run in sums)
    high, low = SNRS[-1], SNRS[0]
    lines = [
        {"way": way + (", fading" if fading else ""), "snr": snr, "error": error(way, snr, fading)}
        for fading in (False, True)
        for way in ("uncoded", "coded", "separate")
        if not (fading and way == "separate")
        for snr in SNRS
    ]
    crossing = next((snr for snr in SNRS if error("coded", snr) < error("uncoded", snr)), float("inf"))
    return Findings(
        tables=[
            _tree_table(Records([*trees, Record({**plain, "aggregators": f"{plain.aggregators}, plain integers"})])),
            table(
                "What leaves a relay",
                {
                    "clients below": lambda clients: clients,
                    "a client's frame, bytes": lambda clients: round(mean(groups[clients].each("frame"))),
                    "their sum, bytes": lambda clients: round(mean(groups[clients].each("sum"))),
                    "⌈log2 M⌉ bits each": lambda clients: round(mean(groups[clients].each("packed"))),
                    "unadded, bytes": lambda clients: round(mean(groups[clients].each("plain"))),
                    "times fewer": lambda clients: round(
                        mean(groups[clients].each("plain")) / mean(groups[clients].each("sum")), 1
                    ),
                },
                groups,
                f"Updates of {size} values in {given['levels']} levels either way. A sum is as long as each of the "
                "frames in it, whatever their number; a modulus with room for more summands takes log2 of their number "
                "more bits of everybody.",
            ),
            table(
                "The error of a decoded sum",
                {
                    "the server takes off": lambda name: name,
                    "variance over C δ²/12": lambda name: round(variance(name), 3),
                    "expected": lambda name: EXPECTED[name],
                },
                EXPECTED,
                "Means over numbers of clients and seeds.",
            ),
            table(
                "A channel that adds",
                {
                    "signal to noise, dB": lambda snr: snr,
                    "uncoded": lambda snr: float(f"{error('uncoded', snr):.2g}"),
                    "coded": lambda snr: float(f"{error('coded', snr):.2g}"),
                    "values of a digit": lambda snr: by_snr[snr, False][0].base,
                    "separate, at capacity": lambda snr: float(f"{error('separate', snr):.2g}"),
                    "uncoded, fading": lambda snr: float(f"{error('uncoded', snr, True):.2g}"),
                    "coded, fading": lambda snr: float(f"{error('coded', snr, True):.2g}"),
                },
                SNRS,
                f"Simulated. Mean squared error of a sum of {given['senders']} values in [-1, 1] over {given['uses']} "
                "uses of the channel. The base of the coded digits is chosen for each ratio on other draws. Separate "
                "coding is the bound that no code can beat; under fading senders invert their gain up to 3.",
            ),
        ],
        figures=[
            curves(
                "What reaches the server against the number of clients",
                [
                    Record({"line": line, "clients": record.clients, "kB": record[name] / 1000})
                    for line, name in LINES.items()
                    for record in trees
                ],
                "clients",
                "kB",
                "line",
                y_label="kB a round",
                log_x=True,
                log_y=True,
            ),
            curves(
                "Error of a sum over a channel that adds",
                lines,
                "snr",
                "error",
                "way",
                x_label="signal to noise, dB",
                y_label="mean squared error",
                log_y=True,
            ),
        ],
        claims=[
            *tree_claims(config, trees, differing),
            claim("different sums along all trees", max(sums.each("sums")), "<= 1.0", "spec 3.4: exact, any order"),
            claim(
                "largest difference of a decoded sum from the sum of decoded frames",
                max(run.off for run in sums),
                "<= 1e-4",
                "spec 3.4: up to float32's rounding of a hundred values",
            ),
            claim("mean error, standard errors", worst, "<= 4.0", "spec 3.4: unbiased"),
            *(
                claim(
                    f"error variance over C δ²/12, off by: {name}",
                    abs(variance(name) / expected - 1.0),
                    "<= 0.05",
                    f"spec 3.4: {expected:g} times",
                )
                for name, expected in EXPECTED.items()
            ),
            claim(
                "bytes of a sum of 100 over those of one frame in it",
                mean([run.sum / run.frame for run in groups[100]]),
                "<= 1.0",
                "derived: one packed vector leaves, whatever came",
            ),
            claim(
                f"coded over uncoded error at {high} dB",
                error("coded", high) / error("uncoded", high),
                "<= 0.1",
                "derived: digits in several uses against repetition",
            ),
            claim(
                f"coded over separate error at {high} dB",
                error("coded", high) / error("separate", high),
                "<= 1.0",
                "abstract: less distortion of the aggregate than separate coding",
            ),
            claim(
                f"coded over uncoded error at {low} dB",
                error("coded", low) / error("uncoded", low),
                "<= 1.0",
                "goal: at every ratio",
                gate=False,
            ),
        ],
        answer=f"Along a tree of relays {trees[-1].clients} clients bring the server "
        f"{trees[-1].payload / trees[0].payload:.2f} times the payload of {trees[0].clients}, by uploads "
        f"{trees[-1].uploads / trees[0].uploads:.1f} times, and every model has the bits of the flat sum. The error of "
        f"a sum is {variance(RIGHT):.2f} times the one derived; over a channel that adds, coded sums beat amplitudes "
        f"from {crossing:g} dB on.",
    )


EXPERIMENT = Experiment(
    name="modular_sum",
    question="What does it take to let anybody on the way add updates without decoding them?",
    rows=rows,
    measure=measure,
    options=OPTIONS,
    rounds=3,
    clients=FEW,
    minutes=1.0,
    quick=(
        "rounds=1",
        "task.hidden=32",
        "max_steps=1",
        "seeds=1",
        "values=500",
        "trees=2",
        "levels=3",
        "senders=3",
        "uses=2",
    ),
    notes=(
        "Clients round their updates with a dither of their own to integers modulo M, which has room for the sum of "
        "all. Relays add frames without decoding, along random trees. Whoever knows whose frames are in a sum takes "
        "their dithers off.\n\n"
        "Rows are runs over Flower's messages. Along a tree clients hand their replies to aggregators, which are "
        "clients, too, and these their sums to others, from client to client; the last two share with all, and the "
        "server collects shards. The number of clients is part of each row; the option --clients changes nothing "
        "here.\n\n"
        "The channel is emulated in this process and is no part of the package: it adds real amplitudes and noise, as "
        "a radio does (Zhang, Tao, Wang, Shao 2023, of which the abstract was read; the scheme is derived)."
    ),
)
