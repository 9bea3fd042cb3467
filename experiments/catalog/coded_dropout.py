"""Clients die inside the round: whose update is still in the sum, with what bytes, with and without coded relays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from fedcomp.coding.relay import RelayPlan
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Claim, Curves, Findings, Table, different_bytes, mean
from fedcomp.experiments.kit import Record, Records, Say, Sweep, claim, curves, table
from fedcomp.experiments.options import TEXT, Config, Option
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.vanishing import live, relive, wasted
from fedcomp.rng import Key
from fedcomp.rules import Int, OneOf, Real
from fedcomp.timing import parse_link
from fedcomp.timing.dropout import Compute, Fate, OnOff, Trace, World, in_turn, plain, relay

DENSE: Final = "FedAvg, nobody vanishes"
CODECS: Final[Mapping[str, str]] = {"QSGD-8": "qsgd", "top-1 %": "topk"}
UNDISTURBED: Final = {name: f"{name}, nobody vanishes" for name in CODECS}

OPTIONS = {
    "task": Option("digits", OneOf("digits", "mnist"), "data; mnist reads local files where there are any"),
    "task.partition": Option("dirichlet:0.5", TEXT, "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "task.model": Option("mlp", OneOf("mlp", "cnn"), "network"),
    "lr": Option(0.3, Real(above=0.0), "step size of the clients' SGD"),
    "batch_size": Option(16, Int(1), "examples per step"),
    "max_steps": Option(20, Int(1), "steps a client makes in one round at most"),
    "life": Option(20.0, Real(above=0.0), "mean seconds from a round's beginning until a device dies"),
    "stay": Option(6.0, Real(above=0.0), "mean seconds a device stays, where devices come back"),
    "away": Option(4.0, Real(above=0.0), "mean seconds until it is back, there"),
    "trace": Option(
        "", TEXT, "file of lines client,from,until in seconds: when devices can be reached, in place of draws"
    ),
    "period": Option(60.0, Real(above=0.0), "seconds from one round's beginning to the next in a trace"),
    "compute": Option(2.0, Real(least=0.0), "mean seconds a client trains, spread evenly by 30 % to either side"),
    "server_link": Option("100kbit/10mbit@50ms", TEXT, "every device's link to the server", check=parse_link),
    "peer_link": Option("10mbit@5ms", TEXT, "every device's link to its peers", check=parse_link),
    "share_by": Option(3.6, Real(above=0.0), "seconds until shards have to have landed"),
    "end": Option(40.0, Real(above=0.0), "seconds until the server takes nothing more"),
    "symbols": Option(8, Int(1, 256), "K: shards that make an update"),
    "peers": Option(2, Int(1), "peers each update is copied to, by replication"),
    "chunk": Option(4096, Int(1), "bytes that resumed uploads keep at a time"),
    "model_rounds": Option(60, Int(2), "rounds of the model per point of a curve"),
}

_TRAINING: Final = ("task.", "lr", "batch_size", "max_steps")
SLACK: Final = 0.05
"""How far a measured fraction may lie from the model's on the same failures: it takes one size for all updates."""

# From lives at which most devices die within one upload to lives in which hardly any does: the curves cross between.
LIVES: Final = (8.0, 12.0, 18.0, 27.0, 40.0, 60.0, 90.0, 180.0)
SIZES: Final = (2_000, 5_000, 12_000, 25_000, 50_000, 100_000)


@dataclass(frozen=True)
class Scheme:
    """One way to get updates to the server.

    Attributes
    ----------
    name : str
    system : str
        Row of the table of systems; empty for the plain pair.
    symbols, shards : int
        K and N; 0 for what the configuration says, and for all clients.
    chunk : bool
        Whether uploads are resumed.
    """

    name: str
    system: str = ""
    symbols: int = 0
    shards: int = 0
    chunk: bool = False


PLAIN, RESUME, COPIES, MDS, RLNC = "plain", "resume", "replication", "MDS relay", "RLNC relay"


def schemes(config: Config) -> dict[str, Scheme]:
    """Return the schemes compared, by name."""
    k, peers = int(config.settings["symbols"]), int(config.settings["peers"])
    found = (
        Scheme(PLAIN),
        Scheme(RESUME, chunk=True),
        # One symbol: every shard is a whole copy, and the coded round is replication.
        Scheme(COPIES, "relay-mds", 1, peers),
        Scheme(MDS, "relay-mds", k),
        Scheme(RLNC, "relay-rlnc", k),
    )
    return {scheme.name: scheme for scheme in found}


def rows(config: Config) -> list[RunSpec]:
    """What averaging reaches, and what it sends, when nobody vanishes."""
    out = [_spec(config, "fedavg", DENSE, {})]
    return out + [_spec(config, codec, UNDISTURBED[name], codec_settings(name)) for name, codec in CODECS.items()]


def codec_settings(name: str) -> dict[str, Any]:
    """Return the settings of a codec, the same in the plain pair and inside a coded round."""
    # Top-1 % is biased and needs its memory; QSGD is unbiased and does without.
    return {"codec.levels": 127} if name == "QSGD-8" else {"codec.density": 0.01, "feedback": True}


def _spec(config: Config, system: str, label: str, fixed: Mapping[str, Any]) -> RunSpec:
    return config.spec(system, label, str(config.settings["task"]), take=_TRAINING, **fixed)


def spec_of(config: Config, scheme: Scheme, name: str, patience: float, **more: Any) -> RunSpec:
    """Return the run of ``scheme`` with the codec called ``name``; ``patience`` is what a collection may take."""
    fixed = {**codec_settings(name), "link": str(config.settings["server_link"])}
    if scheme.system:
        fixed |= {
            "codec": CODECS[name],
            "symbols": scheme.symbols,
            "shards": scheme.shards,
            "share_timeout": float(config.settings["share_by"]),
            "collect_timeout": patience,
        }
    return _spec(config, scheme.system or CODECS[name], f"{name}, {scheme.name}", {**fixed, **more})


def world(config: Config, *, life: float | None = None, back: bool = False) -> World:
    """Return the devices of ``config``; ``life`` replaces the mean lifetime, ``back`` lets devices come and go."""
    s, end = config.settings, float(config.settings["end"])
    failures: OnOff | Trace
    # A trace is of real devices: what asks for another lifetime, or for devices that come back, is drawn.
    if str(s["trace"]) and life is None and not back:
        failures = Trace.parse(Path(str(s["trace"])).read_text(encoding="utf-8"), float(s["period"]))
    else:
        stay = life or float(s["stay" if back else "life"])
        # By the run's seed alone, so that every scheme and codec meets the same deaths.
        failures = OnOff(stay, float(s["away"]) if back else math.inf, Key(config.seed, "dropout"), horizon=end)
    return World(
        failures,
        Compute(float(s["compute"]), 0.3, Key(config.seed, "compute")),
        parse_link(str(s["server_link"])),
        parse_link(str(s["peer_link"])),
        # Shards that land after the end of the round are of no use.
        min(float(s["share_by"]), end),
        end,
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes of the messages of one codec.

    Attributes
    ----------
    update : int
        One client's reply when nobody vanishes, envelope and all.
    down : int
        The message it trains on.
    """

    update: int
    down: int

    OVERHEAD = 120
    """Of a shard: packet header, coefficients, parcel header and seal."""
    REPLY = 1500
    """Of a reply beside what is in it: Flower's envelope and our header."""

    @classmethod
    def of(cls, result: RunResult) -> Sizes:
        """Return the sizes of an undisturbed run: the mean over clients and rounds."""
        # A run of no rounds has no reply to divide by.
        replies = max(1, sum(record.replies for record in result.rounds))
        return cls(result.uplink_wire_bytes // replies, result.downlink_wire_bytes // replies)

    def patience(self, config: Config) -> float:
        """Return how long a collection may take: a third longer than one update on the link, and two ways."""
        link = parse_link(str(config.settings["server_link"]))
        # A collection asks a relay for about one update's worth of shards, for which its link takes as long as for one
        # upload.
        return round(1.33 * link.up_seconds(self.update + self.REPLY) + 2 * link.latency_s + 0.2, 1)


def predicted(
    config: Config, scheme: Scheme, sizes: Sizes, rounds: Sequence[int], there: World | None = None
) -> list[Fate]:
    """Return what the model says becomes of ``rounds``."""
    where = world(config) if there is None else there
    out = []
    for r in rounds:
        found = where.situation(config.clients, r, model=sizes.down)
        if not scheme.system:
            chunk = int(config.settings["chunk"]) if scheme.chunk else 0
            out.append(plain(found, sizes.update, chunk=chunk))
            continue
        # Either code has the same holders and sizes; the model knows nothing else of a code.
        plan = RelayPlan("mds", scheme.symbols, scheme.shards or config.clients, r)
        shard = -(-sizes.update // scheme.symbols) + sizes.OVERHEAD
        holders = partial(plan.holders, clients=config.clients)
        fate = relay(found, shard, scheme.symbols, holders, in_turn, reply=sizes.REPLY, patience=sizes.patience(config))
        out.append(fate)
    return out


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Run every scheme with both codecs under the same failures, and the model beside them."""
    sizes = {name: Sizes.of(results[UNDISTURBED[name]]) for name in CODECS}
    shared = {"config": config, "sizes": sizes}
    used = list(schemes(config))
    # Twins only here: replaying a run without coding costs as much as the run.
    runs = Sweep(run, {"codec": list(CODECS), "scheme": used}, "", {**shared, "twins": True})(say)
    back = Sweep(run, {"codec": ["QSGD-8"], "scheme": used}, "devices come back", {**shared, "back": True})(say)
    hub = Sweep(undisturbed, {"transport": ("peers", "hub")}, "nobody vanishes", shared)(say)
    # The model is the same for both codes: it does not know dependent packets.
    modelled = {"scheme": [name for name in used if name != RLNC]}
    lives = Sweep(modelled_fraction, {**modelled, "life": LIVES}, "model", shared)(say)
    by_size = Sweep(modelled_fraction, {**modelled, "size": SIZES}, "model", shared)(say)
    still = results[UNDISTURBED["QSGD-8"]]
    coded, plain = (runs.one(codec="QSGD-8", scheme=scheme) for scheme in (RLNC, PLAIN))
    return Findings(
        tables=[
            _main_table(config, sizes, runs),
            _bytes_table(config, runs),
            _back_table(config, back),
            _hub_table(still, hub),
        ],
        figures=[*_model_figures(config, lives, by_size), *_accuracy(runs)],
        claims=claims(config, still, runs, back, hub),
        answer=f"{100 * coded.fraction:.0f} % of the updates reach the sum through a coded relay, "
        f"{100 * plain.fraction:.0f} % by plain upload (QSGD-8), for {per_update(coded) / per_update(plain):.2f} times "
        "the bytes to the server per update.",
    )


def run(
    codec: str, scheme: str, *, config: Config, sizes: Mapping[str, Sizes], back: bool = False, twins: bool = False
) -> dict[str, Any]:
    """Return the figures of one run; with ``twins`` also how far relays are from the same sum without coding."""
    chosen, size, there = schemes(config)[scheme], sizes[codec], world(config, back=back)
    spec = spec_of(config, chosen, codec, size.patience(config))
    life = live(spec, there, chunk=int(config.settings["chunk"]) if chosen.chunk else 0)
    result = life.result
    different = None
    if twins and scheme in (MDS, RLNC):
        uncoded = relive(spec_of(config, Scheme(PLAIN), codec, 0.0), life)
        # The same updates without coding, in the same order: what is decoded must be those replies, byte for byte.
        different = different_bytes(result.arrays, uncoded.arrays)
    return {
        "fraction": life.fraction,
        "model": mean(f.fraction for f in predicted(config, chosen, size, range(1, config.rounds + 1), there)),
        "seconds": life.seconds,
        "last": life.last,
        "accuracy": [record.accuracy for record in result.rounds],
        "included": sum(map(len, life.included.values())),
        **_wire(result),
        "vain": wasted(life),
        # Round 0 is the evaluation of the initial model and has no waves.
        "waves": mean(float(record.metrics.get("coded.waves", 0)) for record in result.rounds[1:]),
        "different": different,
    }


def undisturbed(transport: str, *, config: Config, sizes: Mapping[str, Sizes]) -> dict[str, Any]:
    """Return the bytes of two rounds in which nobody vanishes and shards travel as ``transport`` says."""
    short = replace(config, rounds=2)
    # So late that no deadline is ever met: what is counted are the bytes of complete rounds.
    still = replace(world(config, life=math.inf), share_by=1e6, end=1e7)
    spec = spec_of(short, schemes(config)[RLNC], "QSGD-8", 1e6, transport=transport, share_timeout=1e6)
    result = live(spec, still).result
    included = sum(int(record.metrics.get("coded.included", 0)) for record in result.rounds)
    return {"included": included, **_wire(result)}


def modelled_fraction(
    scheme: str, *, config: Config, sizes: Mapping[str, Sizes], life: float | None = None, size: int | None = None
) -> dict[str, float]:
    """Return the model's fraction for updates of QSGD-8, of another lifetime or size."""
    found = sizes["QSGD-8"] if size is None else replace(sizes["QSGD-8"], update=size)
    rounds = range(1, int(config.settings["model_rounds"]) + 1)
    there = world(config, life=life)
    return {"fraction": mean(f.fraction for f in predicted(config, schemes(config)[scheme], found, rounds, there))}


def _wire(result: RunResult) -> dict[str, int]:
    return {"up": result.uplink_wire_bytes, "down": result.downlink_wire_bytes, "peer": result.peer_wire_bytes}


def per_update(run: Record, *links: str) -> float:
    """Return the bytes on ``links``, by default to the server, per update in the sum; NaN where none is."""
    return sum(run[link] for link in links or ("up",)) / run.included if run.included else math.nan


def _name(run: Record) -> str:
    return f"{run.codec}, {run.scheme}"


def _main_table(config: Config, sizes: Mapping[str, Sizes], runs: Records) -> Table:
    columns: dict[str, Any] = {
        "run": _name,
        "fraction": lambda run: round(run.fraction, 3),
        "the model's": lambda run: round(run.model, 3),
        "accuracy, %": lambda run: round(_last(run.accuracy), 1),
        "last reply, s": lambda run: round(run["last"], 1),
        "server waits, s": lambda run: round(run.seconds, 1),
        "waves": lambda run: round(run.waves, 1) or None,
    }
    weights = ", ".join(f"{name} {size.update / 1000:.1f} kB" for name, size in sizes.items())
    return table(
        "Whose update is in the sum",
        columns,
        runs,
        f"{config.clients} clients, {config.rounds} rounds; an update weighs {weights}. Fraction: of all clients of "
        "all rounds, those whose update is in the sum. The model's is computed from sizes and lifetimes alone, for the "
        "same failures. Seconds are simulated, means over the rounds: a server that misses a reply waits until its "
        "deadline, which all schemes have in common.",
    )


def _bytes_table(config: Config, runs: Records) -> Table:
    def each(link: str) -> Any:
        return lambda run: round(run[link] / max(1, config.rounds) / 1000, 1)

    columns: dict[str, Any] = {
        "run": _name,
        "to the server": each("up"),
        "from the server": each("down"),
        "between clients": each("peer"),
        "sent in vain": each("vain"),
        "to the server, per update": lambda run: round(per_update(run) / 1000, 1) if run.included else None,
    }
    return table(
        "Bytes by link, kB per round",
        columns,
        runs,
        "Serialised messages with their envelopes, and parcels, of all clients together; counted, not computed. "
        "Between clients: what was handed to the links. In vain: what had left devices of uploads that never came to "
        "their end, from the simulated links.",
    )


def _back_table(config: Config, back: Records) -> Table:
    s = config.settings
    columns: dict[str, Any] = {
        "QSGD-8": "scheme",
        "fraction": lambda run: round(run.fraction, 3),
        "the model's": lambda run: round(run.model, 3),
        "accuracy, %": lambda run: round(_last(run.accuracy), 1),
        "seconds per round": lambda run: round(run.seconds, 1),
        "sent in vain, kB per round": lambda run: round(run.vain / max(1, config.rounds) / 1000, 1),
    }
    return table(
        "Devices that come back",
        columns,
        back,
        f"Devices stay {float(s['stay']):g} s in the mean and are away for {float(s['away']):g} s. An upload that "
        f"broke off restarts, with resume after the last whole {int(s['chunk'])} bytes. The model does not ask a "
        "relay again that was silent; the server does, once, at the end.",
    )


def _hub_table(still: RunResult, hub: Records) -> Table:
    names = {"peers": "RLNC relay, between clients", "hub": "RLNC relay, through the server"}
    replies = max(1, sum(record.replies for record in still.rounds))
    # Plain uploads know no peers; the ledger of such a run has no link between clients.
    uploads = Record({"name": "plain upload", "included": replies, **_wire(still), "peer": 0})
    relays = [Record({"name": names[run.transport], **run, "included": max(1, run.included)}) for run in hub]
    columns: dict[str, Any] = {
        "QSGD-8, nobody vanishes": "name",
        "to the server": lambda run: per_update(run, "up") / 1000,
        "from the server": lambda run: per_update(run, "down") / 1000,
        "between clients": lambda run: per_update(run, "peer") / 1000,
    }
    return table(
        "Shards through the server save nothing",
        columns,
        [uploads, *relays],
        "kB per update in the sum. Through the server every shard crosses its link twice before it is collected.",
    )


def _model_figures(config: Config, lives: Records, by_size: Records) -> list[Curves]:
    def code(run: Record) -> str:
        return "MDS or RLNC relay" if run.scheme == MDS else str(run.scheme)

    k = int(config.settings["symbols"])
    return [
        curves(
            "Where relays help: lifetimes",
            lives,
            "life",
            "fraction",
            code,
            x_label="mean seconds a device stays",
            y_label="fraction in the sum",
            log_x=True,
            caption=f"The model, QSGD-8, K = {k}. Devices that die soon take the shards of all others with them: below "
            "K relays at the end nobody is decoded.",
        ),
        curves(
            "Where relays help: sizes",
            by_size,
            lambda run: float(run.size),
            "fraction",
            code,
            x_label="update",
            y_label="fraction in the sum",
            log_x=True,
            x_bytes=True,
            caption=f"The model, lifetimes of {float(config.settings['life']):g} s. What is sent in a moment needs no "
            "relay.",
        ),
    ]


def _accuracy(runs: Records) -> list[Curves]:
    return [
        curves(
            f"Accuracy, {codec}",
            found,
            lambda run: range(len(run.accuracy)),
            lambda run: [_percent(accuracy) for accuracy in run.accuracy],
            "scheme",
            x_label="round",
            y_label="test accuracy (%)",
        )
        for codec, found in runs.groups("codec").items()
    ]


def _percent(accuracy: float | None) -> float:
    return math.nan if accuracy is None else 100 * accuracy


def _last(accuracy: Sequence[float | None], over: int = 3) -> float:
    """Return the accuracy in percent, the mean over the last rounds."""
    return mean(_percent(value) for value in accuracy[-over:])


def claims(config: Config, still: RunResult, runs: Records, back: Records, hub: Records) -> list[Claim]:
    """Coded sums are the uncoded ones bit for bit; what they gain, and what they do not save, is what was computed."""
    by_scheme = {codec: {run.scheme: run for run in found} for codec, found in runs.groups("codec").items()}
    dense, sparse = by_scheme["QSGD-8"], by_scheme["top-1 %"]
    returning = {run.scheme: run.fraction for run in back}

    def gain(found: Mapping[str, Record], scheme: str, field: str = "fraction") -> float:
        return float(found[scheme][field] - found[PLAIN][field])

    ratio = per_update(dense[RLNC]) / per_update(dense[PLAIN])
    peers, server = (hub.one(transport=transport) for transport in ("peers", "hub"))
    update = still.uplink_wire_bytes / max(1, sum(record.replies for record in still.rounds))
    ingress = f"QSGD-8, {RLNC}: bytes to the server per update in the sum, over plain upload's"
    return [
        *(
            claim(
                f"{_name(run)}: bytes of the final model that differ from averaging the same updates uncoded",
                run.different,
                "== 0.0",
                "theory: what is decoded are the bytes of the replies themselves",
            )
            for run in runs
            if run.different is not None
        ),
        *(
            claim(
                f"QSGD-8, {scheme}: fraction in the sum, more than by plain upload",
                gain(dense, scheme),
                # The bound is what the model expects under these very deaths, so that a seed with many early deaths
                # moves both.
                f">= {gain(dense, scheme, 'model') - SLACK}",
                f"the model on the same failures, less {SLACK:g}",
            )
            for scheme in (MDS, RLNC)
        ),
        claim(
            f"top-1 %, {RLNC}: fraction in the sum, more than by plain upload",
            gain(sparse, RLNC),
            f"<= {gain(sparse, RLNC, 'model') + SLACK}",
            f"the model, and {SLACK:g}: what is uploaded in a moment gains little from relays",
        ),
        claim(
            "largest distance of a fraction from the model's",
            max(abs(run.fraction - run.model) for run in runs),
            f"<= {2 * SLACK}",
            "the model's one size for all",
        ),
        claim(ingress, ratio, ">= 1.0", "derived: K shards of 1/K and their headers; relays do not lower it"),
        claim(
            f"{ingress}, at most",
            ratio,
            "<= 1.25",
            "goal: shards of updates that were never completed are all that relays add; many deaths miss it",
            gate=False,
        ),
        claim(
            f"{ingress}, nobody vanishes",
            # Without deaths nothing is sent in vain, and only the overhead of coding is left.
            peers.up / max(1, peers.included) / update,
            "<= 1.1",
            "derived: 1 + K packet headers, a reply to say that it has shared, and a relay's envelope; about 1.03",
        ),
        claim(
            f"QSGD-8, {RLNC}: accuracy in percent, more than with plain upload",
            _last(dense[RLNC].accuracy) - _last(dense[PLAIN].accuracy),
            ">= 0.0",
            "goal: more updates are no worse; clients vanish by chance, and the difference is within a run's noise",
            gate=False,
        ),
        claim(
            "devices that come back: fraction with resume less that of plain upload",
            returning[RESUME] - returning[PLAIN],
            ">= 0.0",
            "theory: who ends an upload in one go ends it in pieces no later",
        ),
        claim(
            f"devices that come back: fraction of the {RLNC} less that with resume",
            returning[RLNC] - returning[RESUME],
            "<= 0.0",
            "the model: peers that come and go miss shards and answer late; a relay is no help where waiting is",
        ),
        claim(
            "through the server: bytes at its link more than between clients, in updates per update",
            ((server.up + server.down) / max(1, server.included) - (peers.up + peers.down) / max(1, peers.included))
            / update,
            # Each of the N - 1 other holders gets 1/K of an update, which goes up to the server and down from it.
            f">= {0.8 * (2.0 * (config.clients - 1) / int(config.settings['symbols']))}",
            "derived: N - 1 shards of 1/K each, up and down; 0.8 of it, as an update's envelope is not coded twice",
        ),
    ]


EXPERIMENT = Experiment(
    name="coded_dropout",
    question="Clients die inside the round: do coded shards at their peers keep their updates in the sum?",
    rows=rows,
    measure=measure,
    options=OPTIONS,
    rounds=8,
    clients=20,
    minutes=2.5,
    quick=(
        "rounds=1",
        "clients=6",
        "task.model=cnn",
        "max_steps=1",
        "symbols=2",
        "model_rounds=2",
        "life=40",
        "share_by=4",
        "end=30",
    ),
    notes=(
        "Every scheme meets the same failures: when a device can be reached is a function of seed, round and client. A "
        "device that leaves loses what it is sending. Deaths, training and transfers take simulated time, computed "
        "from the real bytes of the real messages and parcels; a shard that would not have landed is taken from the "
        "peer's store before the server asks for it. All schemes have the same end of the round.\n\n"
        "With a relay a contributor is not needed from the K-th shard on that a peer holds. The peers then upload as "
        "much as the contributors would have: over the same slow links, for as long, while they die as well. So a "
        "relay wins where peers are fast and lifetimes are long against one upload, and loses everything at once where "
        "fewer than K relays live to the end; the curves show both. It does not lower what the server receives.\n\n"
        "Clients vanish by chance and are back in the next round: accuracy tells the schemes apart by less than it "
        "moves from round to round, and is a goal that does not gate.\n\n"
        "Replication is the relay with K = 1. The two codes differ only where K random shards happen to be dependent, "
        "four times in a thousand at exactly K."
    ),
)
