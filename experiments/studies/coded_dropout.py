"""Clients that die within a round: all ways to deliver updates under the same failures, compared with the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from fedcomp.coding.relay import RelayPlan
from fedcomp.experiments.findings import Table, different_bytes, mean
from fedcomp.experiments.kit import Record, Records, curves, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.experiments.tables import Found, Studied, Training
from fedcomp.experiments.vanishing import live, relive
from fedcomp.rng import Key
from fedcomp.timing import parse_link
from fedcomp.timing.dropout import Compute, Fate, OnOff, World, in_turn, plain, relay

CODECS: Final = ("QSGD-8", "top-1 %")

SERVER_LINK, PEER_LINK = "100kbit/10mbit@50ms", "10mbit@5ms"
"""Every device's link to the server, and to its peers."""

COMPUTE: Final = 2.0
"""Mean seconds of a client's training, uniform within 30 % on either side."""

STAY, AWAY = 6.0, 4.0
"""For devices that come back: mean seconds that one stays, and that it is away."""

CHUNK: Final = 4096
"""Size of the pieces, in bytes, after which a broken upload resumes."""

SLACK: Final = 0.05
"""Allowed distance of a measured fraction from the model's on the same failures; the model assumes one size for all
updates."""

# From lifetimes at which most devices die within one upload to lifetimes at which hardly any does. The curves cross in
# between.
LIVES: Final = (8.0, 12.0, 18.0, 27.0, 40.0, 60.0, 90.0, 180.0)
SIZES: Final = (2_000, 5_000, 12_000, 25_000, 50_000, 100_000)

PLAIN, RESUME, COPIES, MDS, RLNC = "plain", "resume", "replication", "MDS relay", "RLNC relay"


@dataclass(frozen=True)
class Scheme:
    """One way to deliver updates to the server.

    Attributes
    ----------
    system : str
        Row in the table of systems; empty for the plain pair.
    symbols, shards : int
        K and N; 0 for all clients.
    chunk : int
        Size of the pieces after which a broken upload resumes, in bytes; 0 if uploads restart.
    """

    system: str = ""
    symbols: int = 0
    shards: int = 0
    chunk: int = 0


def schemes(config: Config) -> dict[str, Scheme]:
    """Return the schemes to compare, by name."""
    k = int(config.settings["symbols"])
    return {
        PLAIN: Scheme(),
        RESUME: Scheme(chunk=CHUNK),
        # With one symbol every shard is a whole copy, and the coded round is replication.
        COPIES: Scheme("relay-mds", 1, 2),
        MDS: Scheme("relay-mds", k),
        RLNC: Scheme("relay-rlnc", k),
    }


def spec_of(training: Training, scheme: str, codec: str, patience: float, **more: Any) -> RunSpec:
    """Return the run of a scheme with the codec called ``codec``. ``patience`` is the time that a collection may
    take."""
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
    """Return the devices of ``config``. ``life`` replaces the mean lifetime; ``back`` lets devices come and go."""
    end = float(config.settings["end"])
    stay = life or (STAY if back else float(config.settings["life"]))
    return World(
        # Only the run's seed counts, so every scheme and codec has the same deaths.
        OnOff(stay, AWAY if back else math.inf, Key(config.seed, "dropout"), horizon=end),
        Compute(COMPUTE, 0.3, Key(config.seed, "compute")),
        parse_link(SERVER_LINK),
        parse_link(PEER_LINK),
        # Shards that arrive after the end of the round are useless.
        min(float(config.settings["share_by"]), end),
        end,
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes of the messages of one codec.

    Attributes
    ----------
    update : int
        One client's reply when no client vanishes, with its envelope.
    down : int
        The training request.
    """

    update: int
    down: int

    OVERHEAD = 120
    """Overhead of a shard: packet header, coefficients, parcel header and seal."""
    REPLY = 1500
    """Overhead of a reply: Flower's envelope and our header."""

    @classmethod
    def of(cls, result: RunResult) -> Sizes:
        """Return the sizes in an undisturbed run, as means over clients and rounds."""
        # A run without rounds has no reply to divide by.
        replies = max(1, sum(record.replies for record in result.rounds))
        return cls(result.uplink_wire_bytes // replies, result.downlink_wire_bytes // replies)

    @property
    def patience(self) -> float:
        """Return the seconds that a collection may take: a third more than the time for one update on the link, both
        ways."""
        link = parse_link(SERVER_LINK)
        # A collection asks a relay for about one update's worth of shards, for which its link takes as long as for one
        # upload.
        return round(1.33 * link.up_seconds(self.update + self.REPLY) + 2 * link.latency_s + 0.2, 1)


def predicted(
    config: Config, scheme: Scheme, sizes: Sizes, rounds: Sequence[int], there: World | None = None
) -> list[Fate]:
    """Return the model's prediction for ``rounds``."""
    where = world(config) if there is None else there
    out = []
    for r in rounds:
        found = where.situation(config.clients, r, model=sizes.down)
        if not scheme.system:
            out.append(plain(found, sizes.update, chunk=scheme.chunk))
            continue
        # Both codes have the same holders and sizes, and the model depends on nothing else.
        plan = RelayPlan("mds", scheme.symbols, scheme.shards or config.clients, r)
        shard = -(-sizes.update // scheme.symbols) + sizes.OVERHEAD
        holders = partial(plan.holders, clients=config.clients)
        fate = relay(found, shard, scheme.symbols, holders, in_turn, reply=sizes.REPLY, patience=sizes.patience)
        out.append(fate)
    return out


def study(found: Found) -> Studied:
    """Run every scheme with both codecs under the same failures, and compute the model's prediction."""
    config, results, used = found.config, found.results, list(schemes(found.config))
    still = results["QSGD-8, nobody vanishes"]
    sizes = {codec: Sizes.of(results[f"{codec}, nobody vanishes"]) for codec in CODECS}
    shared: dict[str, Any] = {"training": Training.of(found.experiment, config), "sizes": sizes}
    # Only these runs have twins, because replaying a run without coding costs as much as the run.
    runs = found.sweep(run, {"codec": CODECS, "scheme": used}, **shared, twins=True)
    back = found.sweep(run, {"codec": CODECS[:1], "scheme": used}, "devices come back", **shared, back=True)
    hub = found.sweep(undisturbed, {"transport": ("peers", "hub")}, "nobody vanishes", **shared)
    # The model is the same for both codes, because it ignores dependent packets.
    modelled = {"scheme": [name for name in used if name != RLNC]}
    given: dict[str, Any] = {"config": config, "sizes": sizes["QSGD-8"]}
    by_life = found.sweep(modelled_fraction, {**modelled, "life": LIVES}, "model", **given)
    by_size = found.sweep(modelled_fraction, {**modelled, "size": SIZES}, "model", **given)
    against = partial(curves, y="fraction", by="scheme", y_label="fraction in the sum", log_x=True)
    k, life = int(config.settings["symbols"]), float(config.settings["life"])
    return Studied(
        _quantities(config, still, runs, back, hub),
        tables=[_main(config, sizes, runs, back), _hub(still, hub)],
        figures=[
            against(
                "Where relays help: lifetimes",
                by_life,
                "life",
                x_label="mean seconds a device stays",
                caption=f"The model, QSGD-8, K = {k}, with either code. A device that dies early loses the shards "
                "that it holds for others. With fewer than K relays at the end no update is decoded.",
            ),
            against(
                "Where relays help: sizes",
                by_size,
                "size",
                x_label="update",
                x_bytes=True,
                caption=f"The model, lifetimes of {life:g} s. An update that takes only a moment to send needs no "
                "relay.",
            ),
        ],
    )


def _quantities(config: Config, still: RunResult, runs: Records, back: Records, hub: Records) -> dict[Any, float]:
    dense, sparse = ({run.scheme: run for run in found} for found in runs.groups("codec").values())
    returning = {run.scheme: run.fraction for run in back}
    relayed = dense[RLNC]

    def gain(found: Mapping[str, Record], scheme: str, of: str = "fraction") -> float:
        return float(found[scheme][of] - found[PLAIN][of])

    peers, server = (hub.one(transport=transport) for transport in ("peers", "hub"))
    update = still.uplink_wire_bytes / max(1, sum(record.replies for record in still.rounds))
    through, direct = ((run.up + run.down) / max(1, run.included) for run in (server, peers))
    uncoded = "bytes that differ from averaging the same updates uncoded"
    return {
        **{(_name(run), uncoded): run.different for run in runs if run.different is not None},
        **{(_name(run), "fraction"): run.fraction for run in runs},
        **{(f"QSGD-8, {name}", "fraction more than by plain upload"): gain(dense, name) for name in (MDS, RLNC)},
        # The model's prediction uses the same deaths, so a seed with many early deaths moves both.
        **{f"least expected of an {name}": gain(dense, name, "model") - SLACK for name in (MDS, RLNC)},
        (_name(sparse[RLNC]), "fraction more than by plain upload"): gain(sparse, RLNC),
        "most expected with top-1 %": gain(sparse, RLNC, "model") + SLACK,
        "distance of a fraction from the model's": max(abs(run.fraction - run.model) for run in runs),
        (_name(relayed), "bytes to the server per update, over plain upload's"): (
            per_update(relayed) / per_update(dense[PLAIN])
        ),
        (_name(relayed), "the same where nobody vanishes"): peers.up / max(1, peers.included) / update,
        (_name(relayed), "accuracy in percent, more than with plain upload"): gain(dense, RLNC, "accuracy"),
        ("devices that come back", "fraction with resume less that of plain upload"): (
            returning[RESUME] - returning[PLAIN]
        ),
        ("devices that come back", f"fraction of the {RLNC} less that with resume"): (
            returning[RLNC] - returning[RESUME]
        ),
        ("through the server", "more bytes at its link, in updates"): ((through - direct) / update),
        # Each of the N - 1 other holders gets 1/K of an update, which goes up to the server and down again.
        "least through the server": 0.8 * (2.0 * (config.clients - 1) / int(config.settings["symbols"])),
    }


def run(
    codec: str, scheme: str, *, training: Training, sizes: Mapping[str, Sizes], back: bool = False, twins: bool = False
) -> dict[str, Any]:
    """Return the figures of one run; with ``twins`` also the distance of relays from the same sum without coding."""
    config = training.config
    chosen, size, there = schemes(config)[scheme], sizes[codec], world(config, back=back)
    life = live(spec_of(training, scheme, codec, size.patience), there, chunk=chosen.chunk)
    result = life.result
    different = None
    if twins and scheme in (MDS, RLNC):
        # The same updates without coding, in the same order: decoding must give exactly those replies, byte for byte.
        different = different_bytes(result.arrays, relive(spec_of(training, PLAIN, codec, 0.0), life).arrays)
    return {
        "fraction": life.fraction,
        "model": mean(f.fraction for f in predicted(config, chosen, size, range(1, config.rounds + 1), there)),
        "last": life.last,
        "accuracy": mean(100 * record.accuracy for record in result.rounds[-3:]),
        "included": sum(map(len, life.included.values())),
        **_wire(result),
        "different": different,
    }


def undisturbed(transport: str, *, training: Training, sizes: Mapping[str, Sizes]) -> dict[str, Any]:
    """Return the bytes of two rounds in which no client vanishes and shards use ``transport``."""
    # The deadline is so late that it never applies; the bytes of complete rounds are counted.
    still = replace(world(training.config, life=math.inf), share_by=1e6, end=1e7)
    spec = spec_of(training, RLNC, "QSGD-8", 1e6, transport=transport, share_timeout=1e6)
    result = live(replace(spec, rounds=2), still).result
    included = sum(int(record.metrics.get("coded.included", 0)) for record in result.rounds)
    return {"included": included, **_wire(result)}


def modelled_fraction(
    scheme: str, *, config: Config, sizes: Sizes, life: float | None = None, size: int | None = None
) -> dict[str, float]:
    """Return the model's fraction for another lifetime or update size."""
    found = sizes if size is None else replace(sizes, update=size)
    rounds = range(1, int(config.settings["model_rounds"]) + 1)
    fates = predicted(config, schemes(config)[scheme], found, rounds, world(config, life=life))
    return {"fraction": mean(fate.fraction for fate in fates)}


def _wire(result: RunResult) -> dict[str, int]:
    return {"up": result.uplink_wire_bytes, "down": result.downlink_wire_bytes, "peer": result.peer_wire_bytes}


def per_update(run: Mapping[str, Any], link: str = "up") -> float:
    """Return the bytes on a link, by default to the server, per update in the sum; NaN if there is no update."""
    return run[link] / run["included"] if run["included"] else math.nan


def _name(run: Record) -> str:
    return f"{run.codec}, {run.scheme}"


def _main(config: Config, sizes: Mapping[str, Sizes], runs: Records, back: Records) -> Table:
    def kilo(link: str) -> Any:
        return lambda run: round(run[link] / max(1, config.rounds) / 1000, 1)

    columns: dict[str, Any] = {
        "run": lambda run: _name(run) + run.get("back", ""),
        "fraction": lambda run: round(run.fraction, 3),
        "the model's": lambda run: round(run.model, 3),
        "accuracy, %": lambda run: round(run.accuracy, 1),
        "last reply, s": lambda run: round(run["last"], 1),
        "to the server, kB": kilo("up"),
        "from the server, kB": kilo("down"),
        "between clients, kB": kilo("peer"),
        "to the server per update, kB": lambda run: round(per_update(run) / 1000, 1) if run.included else None,
    }
    weights = ", ".join(f"{name} {size.update / 1000:.1f} kB" for name, size in sizes.items())
    return table(
        "Whose update is in the sum",
        columns,
        [*runs, *(Record({**run, "back": ", devices come back"}) for run in back)],
        f"{config.clients} clients, {config.rounds} rounds; an update weighs {weights}. Fraction: the part of all "
        "clients in all rounds whose update is in the sum. The model computes it from sizes and lifetimes only, for "
        "the same failures. Seconds are simulated, as means over the rounds. Bytes are counted, not computed: "
        "serialised messages with their envelopes, and parcels, of all clients in a round. Devices that come back "
        f"stay {STAY:g} s on average and are away for {AWAY:g} s. A broken upload restarts; with resume it continues "
        f"after the last whole {CHUNK} bytes. The model does not ask a silent relay again; the server does so at the "
        "end.",
    )


def _hub(still: RunResult, hub: Records) -> Table:
    def kilo(link: str) -> Any:
        return lambda run: per_update(run, link) / 1000

    names = {"peers": "RLNC relay, between clients", "hub": "RLNC relay, through the server"}
    replies = max(1, sum(record.replies for record in still.rounds))
    # Plain uploads use no peers, so the ledger of such a run has no link between clients.
    uploads = {"name": "plain upload", "included": replies, **_wire(still), "peer": 0}
    links = {"to the server": "up", "from the server": "down", "between clients": "peer"}
    return table(
        "Shards through the server save nothing",
        {
            "QSGD-8, nobody vanishes": "name",
            **{heading: kilo(link) for heading, link in links.items()},
        },
        [uploads, *({"name": names[run.transport], **run, "included": max(1, run.included)} for run in hub)],
        "kB per update in the sum. With transport through the server, every shard crosses its link twice before it is "
        "collected.",
    )
