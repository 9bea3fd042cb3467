"""Clients die inside the round: all ways to get updates to the server, under the same failures, beside the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from fedcomp.coding.relay import RelayPlan
from fedcomp.experiments.findings import Curves, Table, different_bytes, mean
from fedcomp.experiments.kit import Record, Records, curves, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.tables import Found, Studied, Training
from fedcomp.experiments.vanishing import live, relive, wasted
from fedcomp.rng import Key
from fedcomp.timing import parse_link
from fedcomp.timing.dropout import Compute, Fate, OnOff, World, in_turn, plain, relay

CODECS: Final = ("QSGD-8", "top-1 %")

SERVER_LINK, PEER_LINK = "100kbit/10mbit@50ms", "10mbit@5ms"
"""Every device's link to the server, and to its peers."""

COMPUTE: Final = 2.0
"""Mean seconds a client trains, spread evenly by 30 % to either side."""

STAY, AWAY = 6.0, 4.0
"""Where devices come back: mean seconds one stays, and until it is back."""

CHUNK: Final = 4096
"""Bytes that resumed uploads keep at a time."""

SLACK: Final = 0.05
"""How far a measured fraction may lie from the model's on the same failures: it takes one size for all updates."""

# From lives at which most devices die within one upload to lives in which hardly any does: the curves cross between.
LIVES: Final = (8.0, 12.0, 18.0, 27.0, 40.0, 60.0, 90.0, 180.0)
SIZES: Final = (2_000, 5_000, 12_000, 25_000, 50_000, 100_000)


PLAIN, RESUME, COPIES, MDS, RLNC = "plain", "resume", "replication", "MDS relay", "RLNC relay"


@dataclass(frozen=True)
class Scheme:
    """One way to get updates to the server.

    Attributes
    ----------
    system : str
        Row of the table of systems; empty for the plain pair.
    symbols, shards : int
        K and N; 0 for all clients.
    chunk : int
        Bytes at a time that resumed uploads keep; 0 where none is resumed.
    """

    system: str = ""
    symbols: int = 0
    shards: int = 0
    chunk: int = 0


def schemes(config: Config) -> dict[str, Scheme]:
    """Return the schemes compared, by name."""
    k = int(config.settings["symbols"])
    return {
        PLAIN: Scheme(),
        RESUME: Scheme(chunk=CHUNK),
        # One symbol: every shard is a whole copy, and the coded round is replication.
        COPIES: Scheme("relay-mds", 1, 2),
        MDS: Scheme("relay-mds", k),
        RLNC: Scheme("relay-rlnc", k),
    }


def spec_of(training: Training, scheme: str, codec: str, patience: float, **more: Any) -> RunSpec:
    """Return the run of a scheme with the codec called ``codec``; ``patience`` is what a collection may take."""
    pair, chosen = training.spec(f"{codec}, nobody vanishes", link=SERVER_LINK), schemes(training.config)[scheme]
    if not chosen.system:
        return pair
    fixed: dict[str, Any] = {
        "codec": pair.system,
        "symbols": chosen.symbols,
        "shards": chosen.shards,
        "share_timeout": float(training.config.settings["share_by"]),
        "collect_timeout": patience,
    }
    return replace(pair, system=chosen.system, settings={**pair.settings, **fixed, **more})


def world(config: Config, *, life: float | None = None, back: bool = False) -> World:
    """Return the devices of ``config``; ``life`` replaces the mean lifetime, ``back`` lets devices come and go."""
    end = float(config.settings["end"])
    stay = life or (STAY if back else float(config.settings["life"]))
    return World(
        # By the run's seed alone, so that every scheme and codec meets the same deaths.
        OnOff(stay, AWAY if back else math.inf, Key(config.seed, "dropout"), horizon=end),
        Compute(COMPUTE, 0.3, Key(config.seed, "compute")),
        parse_link(SERVER_LINK),
        parse_link(PEER_LINK),
        # Shards that land after the end of the round are of no use.
        min(float(config.settings["share_by"]), end),
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

    @property
    def patience(self) -> float:
        """Seconds that a collection may take: a third longer than one update on the link, and two ways."""
        link = parse_link(SERVER_LINK)
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
            out.append(plain(found, sizes.update, chunk=scheme.chunk))
            continue
        # Either code has the same holders and sizes; the model knows nothing else of a code.
        plan = RelayPlan("mds", scheme.symbols, scheme.shards or config.clients, r)
        shard = -(-sizes.update // scheme.symbols) + sizes.OVERHEAD
        holders = partial(plan.holders, clients=config.clients)
        fate = relay(found, shard, scheme.symbols, holders, in_turn, reply=sizes.REPLY, patience=sizes.patience)
        out.append(fate)
    return out


def study(found: Found) -> Studied:
    """Run every scheme with both codecs under the same failures, and the model beside them."""
    config, results, used = found.config, found.results, list(schemes(found.config))
    sizes = {name: Sizes.of(results[f"{name}, nobody vanishes"]) for name in CODECS}
    shared: dict[str, Any] = {"training": Training.of(found.experiment, config), "sizes": sizes}
    # Twins only here: replaying a run without coding costs as much as the run.
    runs = found.sweep(run, {"codec": CODECS, "scheme": used}, **shared, twins=True)
    back = found.sweep(run, {"codec": CODECS[:1], "scheme": used}, "devices come back", **shared, back=True)
    hub = found.sweep(undisturbed, {"transport": ("peers", "hub")}, "nobody vanishes", **shared)
    # The model is the same for both codes: it does not know dependent packets.
    modelled = {"scheme": [name for name in used if name != RLNC]}
    given: dict[str, Any] = {"config": config, "sizes": sizes["QSGD-8"]}
    lives = found.sweep(modelled_fraction, {**modelled, "life": LIVES}, "model", **given)
    by_size = found.sweep(modelled_fraction, {**modelled, "size": SIZES}, "model", **given)
    still = results["QSGD-8, nobody vanishes"]
    return Studied(
        _quantities(config, still, runs, back, hub),
        tables=[_who(config, sizes, runs), _bytes(config, runs), _back(config, back), _hub(still, hub)],
        figures=[*_model_figures(config, lives, by_size), *_accuracy(runs)],
    )


def _quantities(config: Config, still: RunResult, runs: Records, back: Records, hub: Records) -> dict[Any, float]:
    dense, sparse = ({run.scheme: run for run in found} for found in runs.groups("codec").values())
    returning = {run.scheme: run.fraction for run in back}

    def gain(found: Mapping[str, Record], scheme: str, of: str = "fraction") -> float:
        return float(found[scheme][of] - found[PLAIN][of])

    peers, server = (hub.one(transport=transport) for transport in ("peers", "hub"))
    update = still.uplink_wire_bytes / max(1, sum(record.replies for record in still.rounds))
    through, direct = ((run.up + run.down) / max(1, run.included) for run in (server, peers))
    return {
        **{
            (_name(run), "bytes that differ from averaging the same updates uncoded"): run.different
            for run in runs
            if run.different is not None
        },
        **{(_name(run), "fraction"): run.fraction for run in runs},
        **{(f"QSGD-8, {name}", "fraction more than by plain upload"): gain(dense, name) for name in (MDS, RLNC)},
        # What the model expects under these very deaths, so that a seed with many early deaths moves both.
        **{f"least expected of an {name}": gain(dense, name, "model") - SLACK for name in (MDS, RLNC)},
        (f"top-1 %, {RLNC}", "fraction more than by plain upload"): gain(sparse, RLNC),
        "most expected with top-1 %": gain(sparse, RLNC, "model") + SLACK,
        "distance of a fraction from the model's": max(abs(run.fraction - run.model) for run in runs),
        (f"QSGD-8, {RLNC}", "bytes to the server per update, over plain upload's"): (
            per_update(dense[RLNC]) / per_update(dense[PLAIN])
        ),
        (f"QSGD-8, {RLNC}", "the same where nobody vanishes"): peers.up / max(1, peers.included) / update,
        (f"QSGD-8, {RLNC}", "accuracy in percent, more than with plain upload"): (
            _last(dense[RLNC].accuracy) - _last(dense[PLAIN].accuracy)
        ),
        ("devices that come back", "fraction with resume less that of plain upload"): (
            returning[RESUME] - returning[PLAIN]
        ),
        ("devices that come back", f"fraction of the {RLNC} less that with resume"): (
            returning[RLNC] - returning[RESUME]
        ),
        ("through the server", "more bytes at its link, in updates"): ((through - direct) / update),
        # Each of the N - 1 other holders gets 1/K of an update, which goes up to the server and down from it.
        "least through the server": 0.8 * (2.0 * (config.clients - 1) / int(config.settings["symbols"])),
    }


def run(
    codec: str, scheme: str, *, training: Training, sizes: Mapping[str, Sizes], back: bool = False, twins: bool = False
) -> dict[str, Any]:
    """Return the figures of one run; with ``twins`` also how far relays are from the same sum without coding."""
    config = training.config
    chosen, size, there = schemes(config)[scheme], sizes[codec], world(config, back=back)
    life = live(spec_of(training, scheme, codec, size.patience), there, chunk=chosen.chunk)
    result = life.result
    different = None
    if twins and scheme in (MDS, RLNC):
        # The same updates without coding, in the same order: what is decoded must be those replies, byte for byte.
        different = different_bytes(result.arrays, relive(spec_of(training, PLAIN, codec, 0.0), life).arrays)
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


def undisturbed(transport: str, *, training: Training, sizes: Mapping[str, Sizes]) -> dict[str, Any]:
    """Return the bytes of two rounds in which nobody vanishes and shards travel as ``transport`` says."""
    # So late that no deadline is ever met: what is counted are the bytes of complete rounds.
    still = replace(world(training.config, life=math.inf), share_by=1e6, end=1e7)
    spec = spec_of(training, RLNC, "QSGD-8", 1e6, transport=transport, share_timeout=1e6)
    result = live(replace(spec, rounds=2), still).result
    included = sum(int(record.metrics.get("coded.included", 0)) for record in result.rounds)
    return {"included": included, **_wire(result)}


def modelled_fraction(
    scheme: str, *, config: Config, sizes: Sizes, life: float | None = None, size: int | None = None
) -> dict[str, float]:
    """Return the model's fraction, of another lifetime or size of an update."""
    found = sizes if size is None else replace(sizes, update=size)
    rounds = range(1, int(config.settings["model_rounds"]) + 1)
    fates = predicted(config, schemes(config)[scheme], found, rounds, world(config, life=life))
    return {"fraction": mean(fate.fraction for fate in fates)}


def _wire(result: RunResult) -> dict[str, int]:
    return {"up": result.uplink_wire_bytes, "down": result.downlink_wire_bytes, "peer": result.peer_wire_bytes}


def per_update(run: Record, *links: str) -> float:
    """Return the bytes on ``links``, by default to the server, per update in the sum; NaN where none is."""
    return sum(run[link] for link in links or ("up",)) / run.included if run.included else math.nan


def _name(run: Record) -> str:
    return f"{run.codec}, {run.scheme}"


def _who(config: Config, sizes: Mapping[str, Sizes], runs: Records) -> Table:
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


def _bytes(config: Config, runs: Records) -> Table:
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


def _back(config: Config, back: Records) -> Table:
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
        f"Devices stay {STAY:g} s in the mean and are away for {AWAY:g} s. An upload that "
        f"broke off restarts, with resume after the last whole {CHUNK} bytes. The model does not ask a "
        "relay again that was silent; the server does, once, at the end.",
    )


def _hub(still: RunResult, hub: Records) -> Table:
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
