"""Clients die inside the round: whose update is still in the sum, with what bytes, with and without coded relays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from fedcomp.coding.relay import RelayPlan
from fedcomp.experiments.experiment import Config, Experiment, Option
from fedcomp.experiments.findings import Claim, Curves, Findings, Say, Series, Table, different_bytes, mean
from fedcomp.experiments.kit import judged
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.vanishing import World, live, relive, wasted
from fedcomp.rng import Key
from fedcomp.timing import parse_link
from fedcomp.timing.dropout import Compute, Fate, OnOff, Trace, in_turn, plain, relay, situation

DENSE: Final = "FedAvg, nobody vanishes"
CODECS: Final[Mapping[str, str]] = {"QSGD-8": "qsgd", "top-1 %": "topk"}
UNDISTURBED: Final = {name: f"{name}, nobody vanishes" for name in CODECS}

OPTIONS = {
    "task": Option("digits", "data; mnist reads local files where there are any", choices=("digits", "mnist")),
    "task.partition": Option("dirichlet:0.5", "how examples are spread: iid, dirichlet:ALPHA, shards:COUNT"),
    "task.model": Option("mlp", "network", choices=("mlp", "cnn")),
    "lr": Option(0.3, "step size of the clients' SGD", above=0.0),
    "batch_size": Option(16, "examples per step", least=1),
    "max_steps": Option(20, "steps a client makes in one round at most", least=1),
    "life": Option(20.0, "mean seconds from a round's beginning until a device dies", above=0.0),
    "stay": Option(6.0, "mean seconds a device stays, where devices come back", above=0.0),
    "away": Option(4.0, "mean seconds until it is back, there", above=0.0),
    "trace": Option("", "file of lines client,from,until in seconds: when devices can be reached, in place of draws"),
    "period": Option(60.0, "seconds from one round's beginning to the next in a trace", above=0.0),
    "compute": Option(2.0, "mean seconds a client trains, spread evenly by 30 % to either side", least=0.0),
    "server_link": Option("100kbit/10mbit@50ms", "every device's link to the server", check=parse_link),
    "peer_link": Option("10mbit@5ms", "every device's link to its peers", check=parse_link),
    "share_by": Option(3.6, "seconds until shards have to have landed", above=0.0),
    "end": Option(40.0, "seconds until the server takes nothing more", above=0.0),
    "symbols": Option(8, "K: shards that make an update", least=1, most=256),
    "peers": Option(2, "peers each update is copied to, by replication", least=1),
    "chunk": Option(4096, "bytes that resumed uploads keep at a time", least=1),
    "model_rounds": Option(60, "rounds of the model per point of a curve", least=2),
}

_TRAINING: Final = ("task.", "lr", "batch_size", "max_steps")
SLACK: Final = 0.05
"""How far a measured fraction may lie from the model's on the same failures: it takes one size for all updates."""

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
    if str(s["trace"]) and life is None and not back:
        failures = Trace.parse(Path(str(s["trace"])).read_text(encoding="utf-8"), float(s["period"]))
    else:
        stay = life or float(s["stay" if back else "life"])
        failures = OnOff(stay, float(s["away"]) if back else math.inf, Key(config.seed, "dropout"), horizon=end)
    return World(
        failures,
        Compute(float(s["compute"]), 0.3, Key(config.seed, "compute")),
        parse_link(str(s["server_link"])),
        parse_link(str(s["peer_link"])),
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
        replies = max(1, sum(record.replies for record in result.rounds))
        return cls(result.uplink_wire_bytes // replies, result.downlink_wire_bytes // replies)

    def patience(self, config: Config) -> float:
        """Return how long a collection may take: a third longer than one update on the link, and two ways."""
        link = parse_link(str(config.settings["server_link"]))
        return round(1.33 * link.up_seconds(self.update + self.REPLY) + 2 * link.latency_s + 0.2, 1)


def predicted(
    config: Config, scheme: Scheme, sizes: Sizes, rounds: Sequence[int], there: World | None = None
) -> list[Fate]:
    """Return what the model says becomes of ``rounds``."""
    where = world(config) if there is None else there
    out = []
    for r in rounds:
        found = situation(
            where.failures,
            where.compute,
            config.clients,
            r,
            server=where.server,
            peer=where.peer,
            model=sizes.down,
            share_by=where.share_by,
            end=where.end,
        )
        if not scheme.system:
            chunk = int(config.settings["chunk"]) if scheme.chunk else 0
            out.append(plain(found, sizes.update, chunk=chunk))
            continue
        plan = RelayPlan("mds", scheme.symbols, scheme.shards or config.clients, r)
        shard = -(-sizes.update // scheme.symbols) + sizes.OVERHEAD
        holders = partial(plan.holders, clients=config.clients)
        fate = relay(found, shard, scheme.symbols, holders, in_turn, reply=sizes.REPLY, patience=sizes.patience(config))
        out.append(fate)
    return out


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Run every scheme with both codecs under the same failures, and the model beside them."""
    sizes = {name: Sizes.of(results[UNDISTURBED[name]]) for name in CODECS}
    used = schemes(config)
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for name in CODECS:
        for scheme in used.values():
            say(f"{name}, {scheme.name}")
            make = partial(_run, config, scheme, name, sizes[name], world(config), twin=scheme.name in (MDS, RLNC))
            runs[name, scheme.name] = say.cell(f"{name}/{scheme.name}", make)
    back: dict[str, dict[str, Any]] = {}
    for scheme in used.values():
        say(f"devices come back: {scheme.name}")
        make = partial(_run, config, scheme, "QSGD-8", sizes["QSGD-8"], world(config, back=True))
        back[scheme.name] = say.cell(f"back/{scheme.name}", make)
    say("through the server instead of between clients")
    hub = say.cell("hub", partial(_hub, config, sizes["QSGD-8"]))
    say("the model, over lifetimes and sizes")
    curves = say.cell("curves", partial(_curves, config, sizes["QSGD-8"]))
    return Findings(
        tables=[
            _main_table(config, sizes, runs),
            _bytes_table(config, runs),
            _back_table(config, back),
            _hub_table(results, hub, runs),
        ],
        figures=[*_figures(config, curves), *_accuracy(runs)],
        values=_values(config, sizes, runs, back, results, hub),
    )


def _run(
    config: Config, scheme: Scheme, name: str, sizes: Sizes, there: World, *, twin: bool = False
) -> dict[str, Any]:
    """Return the figures of one run; with ``twin`` also how far it is from the same sum without coding."""
    spec = spec_of(config, scheme, name, sizes.patience(config))
    life = live(spec, there, chunk=int(config.settings["chunk"]) if scheme.chunk else 0)
    result, rounds = life.result, range(1, config.rounds + 1)
    model = predicted(config, scheme, sizes, rounds, there)
    summary: dict[str, Any] = {
        "fraction": life.fraction,
        "model": mean(fate.fraction for fate in model),
        "seconds": life.seconds,
        "last": life.last,
        "model seconds": mean(fate.seconds for fate in model),
        "accuracy": [record.accuracy for record in result.rounds],
        "included": sum(map(len, life.included.values())),
        "up": result.uplink_wire_bytes,
        "down": result.downlink_wire_bytes,
        "peer": result.peer_wire_bytes,
        "vain": wasted(life),
        "decode": median(result.notes["seconds"]["coded.decode_seconds"].values()) if scheme.system else 0.0,
        "waves": mean(float(record.metrics.get("coded.waves", 0)) for record in result.rounds[1:]),
        "recollects": sum(int(record.metrics.get("coded.recollects", 0)) for record in result.rounds[1:]),
        "dependent": sum(int(record.metrics.get("coded.dependent", 0)) for record in result.rounds[1:]),
    }
    if twin:
        uncoded = relive(spec_of(config, Scheme(PLAIN), name, 0.0), life)
        summary["different"] = different_bytes(result.arrays, uncoded.arrays)
    return summary


def _hub(config: Config, sizes: Sizes) -> dict[str, Any]:
    """Return the bytes of two rounds in which nobody vanishes and shards go through the server."""
    short = replace(config, rounds=2)
    still = replace(world(config, life=math.inf), share_by=1e6, end=1e7)
    out: dict[str, Any] = {}
    for transport in ("peers", "hub"):
        spec = spec_of(short, schemes(config)[RLNC], "QSGD-8", 1e6, transport=transport, share_timeout=1e6)
        result = live(spec, still).result
        out[transport] = {
            "up": result.uplink_wire_bytes,
            "down": result.downlink_wire_bytes,
            "peer": result.peer_wire_bytes,
            "included": sum(int(record.metrics.get("coded.included", 0)) for record in result.rounds),
        }
    return out


def _curves(config: Config, sizes: Sizes) -> dict[str, Any]:
    """Return the model's fractions by scheme, over lifetimes and over sizes."""
    rounds = range(1, int(config.settings["model_rounds"]) + 1)
    lives: dict[str, list[float]] = {}
    by_size: dict[str, list[float]] = {}
    for scheme in schemes(config).values():
        if scheme.name == RLNC:
            continue  # the model tells the codes apart in nothing
        lives[scheme.name] = [
            mean(fate.fraction for fate in predicted(config, scheme, sizes, rounds, world(config, life=life)))
            for life in LIVES
        ]
        by_size[scheme.name] = [
            mean(f.fraction for f in predicted(config, scheme, replace(sizes, update=size), rounds)) for size in SIZES
        ]
    return {"lives": lives, "sizes": by_size}


def _main_table(config: Config, sizes: Mapping[str, Sizes], runs: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    lines: list[list[Any]] = [
        [
            f"{name}, {scheme}",
            round(found["fraction"], 3),
            round(found["model"], 3),
            round(_last(found["accuracy"]), 1),
            round(found["last"], 1),
            round(found["seconds"], 1),
            round(found["waves"], 1) or None,
            round(1000 * found["decode"], 1) or None,
        ]
        for (name, scheme), found in runs.items()
    ]
    weights = ", ".join(f"{name} {size.update / 1000:.1f} kB" for name, size in sizes.items())
    return Table(
        "Whose update is in the sum",
        ("run", "fraction", "the model's", "accuracy, %", "last reply, s", "server waits, s", "waves", "decoding, ms"),
        lines,
        f"{config.clients} clients, {config.rounds} rounds; an update weighs {weights}. Fraction: of all clients of "
        "all rounds, those whose update is in the sum. The model's is computed from sizes and lifetimes alone, for the "
        "same failures. Seconds are simulated, means over the rounds: a server that misses a reply waits until its "
        "deadline, which all schemes have in common. Decoding is this machine's time, median of the rounds.",
    )


def _bytes_table(config: Config, runs: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    lines: list[list[Any]] = []
    for (name, scheme), found in runs.items():
        rounds, included = max(1, config.rounds), found["included"]
        cells = [round(found[link] / rounds / 1000, 1) for link in ("up", "down", "peer", "vain")]
        lines.append([f"{name}, {scheme}", *cells, round(found["up"] / included / 1000, 1) if included else None])
    return Table(
        "Bytes by link, kB per round",
        ("run", "to the server", "from the server", "between clients", "sent in vain", "to the server, per update"),
        lines,
        "Serialised messages with their envelopes, and parcels, of all clients together; counted, not computed. "
        "Between clients: what was handed to the links. In vain: what had left devices of uploads that never came to "
        "their end, from the simulated links.",
    )


def _back_table(config: Config, back: Mapping[str, Mapping[str, Any]]) -> Table:
    s = config.settings
    return Table(
        "Devices that come back",
        ("QSGD-8", "fraction", "the model's", "accuracy, %", "seconds per round", "sent in vain, kB per round"),
        [
            [
                name,
                round(found["fraction"], 3),
                round(found["model"], 3),
                round(_last(found["accuracy"]), 1),
                round(found["seconds"], 1),
                round(found["vain"] / max(1, config.rounds) / 1000, 1),
            ]
            for name, found in back.items()
        ],
        f"Devices stay {float(s['stay']):g} s in the mean and are away for {float(s['away']):g} s. An upload that "
        f"broke off begins anew, with resume after the last whole {int(s['chunk'])} bytes. The model does not ask a "
        "relay again that was silent; the server does, once, at the end.",
    )


def _hub_table(
    results: Mapping[str, RunResult],
    hub: Mapping[str, Mapping[str, Any]],
    runs: Mapping[tuple[str, str], Mapping[str, Any]],
) -> Table:
    still = results[UNDISTURBED["QSGD-8"]]
    replies = max(1, sum(record.replies for record in still.rounds))
    up, down = (n / replies / 1000 for n in (still.uplink_wire_bytes, still.downlink_wire_bytes))
    names = {"peers": "RLNC relay, between clients", "hub": "RLNC relay, through the server"}
    lines: list[list[Any]] = [["plain upload", up, down, 0]]
    for transport, found in hub.items():
        included = max(1, found["included"])
        lines.append([names[transport], *(found[link] / included / 1000 for link in ("up", "down", "peer"))])
    return Table(
        "Shards through the server save nothing",
        ("QSGD-8, nobody vanishes", "to the server", "from the server", "between clients"),
        lines,
        "kB per update in the sum. Through the server every shard crosses its link twice before it is collected.",
    )


def _figures(config: Config, curves: Mapping[str, Any]) -> list[Curves]:
    k = int(config.settings["symbols"])

    def series(found: Mapping[str, Sequence[float]], x: Sequence[float]) -> list[Series]:
        return [Series("MDS or RLNC relay" if name == MDS else name, x, y) for name, y in found.items()]

    return [
        Curves(
            "Where relays help: lifetimes",
            "mean seconds a device stays",
            "fraction in the sum",
            series(curves["lives"], LIVES),
            log_x=True,
            caption=f"The model, QSGD-8, K = {k}. Devices that die soon take the shards of all others with them: below "
            "K relays at the end nobody is decoded.",
        ),
        Curves(
            "Where relays help: sizes",
            "update",
            "fraction in the sum",
            series(curves["sizes"], [float(size) for size in SIZES]),
            log_x=True,
            x_bytes=True,
            caption=f"The model, lifetimes of {float(config.settings['life']):g} s. What is sent in a moment needs no "
            "relay.",
        ),
    ]


def _accuracy(runs: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[Curves]:
    return [
        Curves(
            f"Accuracy, {name}",
            "round",
            "test accuracy (%)",
            [
                Series(scheme, list(range(len(found["accuracy"]))), [_percent(a) for a in found["accuracy"]])
                for (codec, scheme), found in runs.items()
                if codec == name
            ],
        )
        for name in CODECS
    ]


def _percent(accuracy: float | None) -> float:
    return math.nan if accuracy is None else 100 * accuracy


def _last(accuracy: Sequence[float | None], over: int = 3) -> float:
    """Return the accuracy in percent, the mean over the last rounds."""
    return mean(_percent(value) for value in accuracy[-over:])


def _values(
    config: Config,
    sizes: Mapping[str, Sizes],
    runs: Mapping[tuple[str, str], Mapping[str, Any]],
    back: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, RunResult],
    hub: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    values: dict[str, float] = {}
    for (name, scheme), found in runs.items():
        place = f"{name}/{scheme}"
        values |= {
            f"fraction/{place}": found["fraction"],
            f"model/{place}": found["model"],
            f"accuracy/{place}": _last(found["accuracy"]),
            f"per update/{place}": found["up"] / found["included"] if found["included"] else math.nan,
        }
        if "different" in found:
            values[f"different/{place}"] = found["different"]
    values |= {f"back/{scheme}": found["fraction"] for scheme, found in back.items()}
    values |= {f"back model/{scheme}": found["model"] for scheme, found in back.items()}
    still = results[UNDISTURBED["QSGD-8"]]
    replies = max(1, sum(record.replies for record in still.rounds))
    both = {t: (found["up"] + found["down"]) / max(1, found["included"]) for t, found in hub.items()}
    values["hub/extra"] = (both["hub"] - both["peers"]) / (still.uplink_wire_bytes / replies)
    values["ingress/still"] = (
        hub["peers"]["up"] / max(1, hub["peers"]["included"]) / (still.uplink_wire_bytes / replies)
    )
    values["hub/expected"] = 2.0 * (config.clients - 1) / int(config.settings["symbols"])
    return values


def claims(config: Config, results: Mapping[str, RunResult], findings: Findings) -> list[Claim]:
    """Coded sums are the uncoded ones bit for bit; what they gain, and what they do not save, is what was computed."""
    values = findings.values
    out = [
        Claim(
            f"{name}, {scheme}: bytes of the final model that differ from averaging the same updates uncoded",
            values[f"different/{name}/{scheme}"],
            "==",
            0.0,
            "theory: what is decoded are the bytes of the replies themselves",
        )
        for name in CODECS
        for scheme in (MDS, RLNC)
    ]
    for scheme in (MDS, RLNC):
        gain = f"{{}}/QSGD-8/{scheme}"
        expected = values[gain.format("model")] - values[f"model/QSGD-8/{PLAIN}"]
        out.append(
            Claim(
                f"QSGD-8, {scheme}: fraction in the sum, more than by plain upload",
                values[gain.format("fraction")] - values[f"fraction/QSGD-8/{PLAIN}"],
                ">=",
                expected - SLACK,
                f"the model on the same failures, less {SLACK:g}",
            )
        )
    out.append(
        Claim(
            f"top-1 %, {RLNC}: fraction in the sum, more than by plain upload",
            values[f"fraction/top-1 %/{RLNC}"] - values[f"fraction/top-1 %/{PLAIN}"],
            "<=",
            values[f"model/top-1 %/{RLNC}"] - values[f"model/top-1 %/{PLAIN}"] + SLACK,
            f"the model, and {SLACK:g}: what is uploaded in a moment gains little from relays",
        )
    )
    worst = max(abs(values[f"fraction/{n}/{s}"] - values[f"model/{n}/{s}"]) for n in CODECS for s in schemes(config))
    out += [
        Claim(
            "largest distance of a fraction from the model's", worst, "<=", 2 * SLACK, "the model's one size for all"
        ),
        *_ingress(values),
        Claim(
            f"QSGD-8, {RLNC}: accuracy in percent, more than with plain upload",
            values[f"accuracy/QSGD-8/{RLNC}"] - values[f"accuracy/QSGD-8/{PLAIN}"],
            ">=",
            0.0,
            "goal: more updates are no worse; clients vanish by chance, and the difference is within a run's noise",
            gate=False,
        ),
        Claim(
            "devices that come back: fraction with resume less that of plain upload",
            values[f"back/{RESUME}"] - values[f"back/{PLAIN}"],
            ">=",
            0.0,
            "theory: who ends an upload in one go ends it in pieces no later",
        ),
        Claim(
            f"devices that come back: fraction of the {RLNC} less that with resume",
            values[f"back/{RLNC}"] - values[f"back/{RESUME}"],
            "<=",
            0.0,
            "the model: peers that come and go miss shards and answer late; a relay is no help where waiting is",
        ),
        Claim(
            "through the server: bytes at its link more than between clients, in updates per update",
            values["hub/extra"],
            ">=",
            0.8 * values["hub/expected"],
            "derived: N - 1 shards of 1/K each, up and down; 0.8 of it, as an update's envelope is not coded twice",
        ),
    ]
    return out


def _ingress(values: Mapping[str, float]) -> list[Claim]:
    name = f"QSGD-8, {RLNC}: bytes to the server per update in the sum, over plain upload's"
    return [
        Claim(
            name,
            values[f"per update/QSGD-8/{RLNC}"] / values[f"per update/QSGD-8/{PLAIN}"],
            ">=",
            1.0,
            "derived: K shards of 1/K and their headers; relays do not lower it",
        ),
        Claim(
            f"{name}, at most",
            values[f"per update/QSGD-8/{RLNC}"] / values[f"per update/QSGD-8/{PLAIN}"],
            "<=",
            1.25,
            "goal: shards of updates that were never completed are all that relays add; many deaths miss it",
            gate=False,
        ),
        Claim(
            f"{name}, nobody vanishes",
            values["ingress/still"],
            "<=",
            1.1,
            "derived: 1 + K packet headers, a reply to say that it has shared, and a relay's envelope; about 1.03",
        ),
    ]


def answer(config: Config, results: Mapping[str, RunResult], findings: Findings) -> str:
    """Return what came out, in this run's figures."""
    coded, plain = (findings.values[f"fraction/QSGD-8/{scheme}"] for scheme in (RLNC, PLAIN))
    more = findings.values[f"per update/QSGD-8/{RLNC}"] / findings.values[f"per update/QSGD-8/{PLAIN}"]
    return (
        f"{100 * coded:.0f} % of the updates reach the sum through a coded relay, {100 * plain:.0f} % by plain upload "
        f"(QSGD-8), for {more:.2f} times the bytes to the server per update."
    )


EXPERIMENT = Experiment(
    name="coded_dropout",
    question="Clients die inside the round: do coded shards at their peers keep their updates in the sum?",
    rows=rows,
    measure=judged(measure, claims, answer),
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
