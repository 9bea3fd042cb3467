"""Slow links: trainings over emulated links, their duration, and every byte at the interfaces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final

from fedcomp.clients.edge.links import Link
from fedcomp.experiments.kit import Record, Records, Sweep, table
from fedcomp.experiments.links import HEADERS, pace, unavailable
from fedcomp.experiments.options import Config, numbers
from fedcomp.experiments.tables import TUNING_SEED, Found, Studied

FEDAVG, UP, BOTH, LOW_BIT, STOCK = "FedAvg", "top-k up", "top-k both ways", "EDEN both ways", "stock Flower"
AT_NODES: Final = "EDEN, first model at nodes"
TRAINED: Final = (FEDAVG, UP, BOTH, LOW_BIT)
"""Rows whose trainings differ."""

ROWS: Final = (*TRAINED, AT_NODES)
TRAINS_AS: Final = {row: row for row in TRAINED} | {AT_NODES: LOW_BIT, STOCK: FEDAVG}

LARGE: Final = 8e6
"""Bytes of the model that stock Flower and fedcomp both train."""

LARGE_KBIT: Final = 200.0
LARGE_DOWN: Final = 2000.0
"""Uplink kbit/s of that cell. The downlink is ten times faster, as is common; otherwise the first model alone would
take 5 minutes."""

PER_UNIT: Final = 75
"""Parameters per hidden unit: 64 input pixels, a bias, ten output classes. The ten output biases are extra."""

EMPTY: Final = 1
"""Hidden units of a model of 340 bytes, which shows the overhead of a row's messages."""

TRIALS: Final = 3
"""Number of trainings for each step size, because the number of rounds varies by chance."""

PARTS: Final = ("interfaces", "ledger", "headers", "bundle", "polls", "acknowledgements")
IDLE: Final = 60.0
"""Seconds for which nodes without work are observed."""


def cost(record: Mapping[str, Any], quiet: float, each: float = 0.0) -> Record:
    """Return the bytes at the interfaces by cause, for both directions and all nodes, up to the last finished round.

    Parameters
    ----------
    record : mapping
        The observations of a row.
    quiet : float
        Bytes per second of idle nodes, without the headers of packets.
    each : float
        Flower's other overhead per message in bytes, measured with the same row and an empty model.

    Returns
    -------
    Record
        ``interfaces``: bytes counted by the interfaces; ``ledger``: whole messages; ``headers``: Ethernet, IP and TCP,
        by packets; ``bundle``: the app, once per node; ``polls``: polls of idle nodes; ``acknowledgements``; ``named``:
        the sum of all except the first.
    """
    seen, line = record["interface"], record["line"]
    parts = {
        "ledger": record["up"] + record["down"],
        "headers": HEADERS * (seen["up_packets"] + seen["down_packets"]),
        "bundle": record["bundle"],
        "polls": quiet * line[-1][0] if line else 0.0,
        "acknowledgements": each * record["messages"],
    }
    return Record({"interfaces": seen["up_bytes"] + seen["down_bytes"], **parts, "named": sum(parts.values())})


def unexplained(cost: Mapping[str, Any]) -> float:
    """Return the fraction of the interface's bytes that have no name or are counted twice."""
    return abs(1.0 - cost["named"] / cost["interfaces"]) if cost["interfaces"] else math.nan


def seconds_to(record: Mapping[str, Any], target: float, needed: float) -> tuple[float, bool]:
    """Return the seconds to the target, and whether they were measured.

    A row that was stopped earlier is extrapolated at its speed to the rounds that the same training needs in this
    process.
    """
    line = record["line"]
    reached = next((point[0] for point in line if point[1] >= target), None)
    if reached is not None:
        return float(reached), True
    if not line or not math.isfinite(needed):
        return math.inf, False
    return float(line[0][0] + (needed - 1) * pace(line)), False


def settings(kbit: float) -> dict[str, str]:
    """Return the environment variables that suit a link."""
    return Link.of(f"{kbit:g}kbit").environment


def known(row: str, hidden: int, rate: float, seed: int, tuning: bool, *, config: Config) -> dict[str, Any]:
    """Train in this process, with a validation split or as over the links."""
    from fedcomp.experiments.slow import here

    return here(**_asked(config, row, hidden, rate, seed), tuning=tuning)


def over_link(
    row: str, kbit: float, hidden: int, rate: float, *, config: Config, needed: Mapping[tuple[str, int], float]
) -> dict[str, Any]:
    """Train over the emulated links; ``needed`` are the rounds by row and size, where known."""
    from fedcomp.experiments.slow import linked

    large = kbit == LARGE_KBIT and hidden == hidden_of(LARGE)
    return linked(
        _asked(config, row if row != STOCK else FEDAVG, hidden, rate, config.seed),
        rate=1e3 * kbit,
        down=1e3 * LARGE_DOWN if large else None,
        limit=float(config.settings["stock_limit" if large else "limit"]),
        settings=None if row == STOCK else settings(kbit),
        needed=None if large else needed.get((row, hidden)),
        idle=min(IDLE, float(config.settings["limit"])) if hidden == EMPTY else 0.0,
    )


def _asked(config: Config, row: str, hidden: int, rate: float, seed: int) -> dict[str, Any]:
    s = config.settings
    # An empty model never reaches the target, so a few rounds are enough.
    rounds, target = (8, 101.0) if hidden == EMPTY else (config.rounds, float(s["target"]))
    what = {"row": row, "hidden": hidden, "rate": rate, "seed": seed}
    return {**what, "rounds": rounds, "steps": int(s["local"]), "target": target}


def hidden_of(size: float) -> int:
    """Return the number of hidden units for a model of ``size`` bytes."""
    return max(1, round((size / 4 - 10) / PER_UNIT))


def study(found: Found) -> Studied:
    """Choose step sizes in this process, train over links, then assign every byte to a cause."""
    config, say, s = found.config, found.say, found.config.settings
    rates, grid = numbers(str(s["rates"])), numbers(str(s["steps"]))
    sizes = {kbit: hidden_of(min(4e6, 125.0 * kbit * float(s["dense"]))) for kbit in rates}
    seeds = [config.seed + TUNING_SEED + i for i in range(TRIALS)]
    axes = {"row": TRAINED, "hidden": sorted(set(sizes.values())), "rate": grid, "seed": seeds, "tuning": [True]}
    tuned = found.sweep(known, axes, "step size", config=config)
    best = {key: _soonest(group) for key, group in tuned.groups("row", "hidden").items()}
    same = {"seed": config.seed, "tuning": False}
    cells = [{"row": row, "hidden": hidden, "rate": rate, **same} for (row, hidden), rate in best.items()]
    here = found.sweep(known, cells, "here", config=config)
    if skipped := unavailable():
        say(skipped)
        return studied(config, here, Records([]), skipped)
    # The slowest first, because they end last. The large model uses the step sizes of the largest tuned model.
    large, size = {"kbit": LARGE_KBIT, "hidden": hidden_of(LARGE)}, max(sizes.values())
    cells = [{"row": row, **large, "rate": best[TRAINS_AS[row], size]} for row in ((STOCK, BOTH) if s["stock"] else ())]
    cells += [
        {"row": row, "kbit": kbit, "hidden": sizes[kbit], "rate": best[TRAINS_AS[row], sizes[kbit]]}
        for kbit in rates
        for row in ROWS
    ]
    # Measured once per row, because it depends on the number of arrays in a message and not on the rate (29 to 30 kB
    # with FedAvg's four, 14 kB with one frame, at 64 kbit/s and at 10 Mbit/s).
    cells += [{"row": row, "kbit": max(rates), "hidden": EMPTY, "rate": grid[0]} for row in TRAINED]
    shared = {"config": config, "needed": _needed(here)}
    return studied(config, here, Sweep(over_link, cells, "link", shared)(say, int(s["links"])), "")


def _needed(here: Records) -> dict[tuple[str, int], float]:
    """Return the number of rounds that every row needs, by row and size."""
    rounds = {(r.row, r.hidden): r.needed for r in here}
    return {(row, hidden): rounds[TRAINS_AS[row], hidden] for row in ROWS for _, hidden in rounds}


def _bytes(hidden: int) -> float:
    """Return the bytes of a model."""
    return 4.0 * (PER_UNIT * hidden + 10)


def _soonest(group: Records) -> float:
    """Return the step size with the fewest rounds as the mean of its trials."""

    def rounds(trials: Records) -> tuple[float, float]:
        # If none reaches the target, the step size that comes closest.
        nearest = sum(max(_finite(r.line), default=0.0) for r in trials)
        return sum(r.needed for r in trials), -nearest

    return float(min(group.groups("rate").items(), key=lambda pair: rounds(pair[1]))[0])


def _finite(line: Sequence[float]) -> list[float]:
    return [value for value in line if math.isfinite(value)]


def studied(config: Config, here: Records, found: Records, skipped: str) -> Studied:
    """Return seconds, bytes and accuracies, and the reasons for quantities that were not measured."""
    target, longest = (float(config.settings[name]) for name in ("target", "stock_limit"))
    large = hidden_of(LARGE)
    small = Records(r for r in found if r.hidden not in (EMPTY, large))
    beside = found.where(hidden=large)
    needed = _needed(here)

    def ended(record: Record) -> tuple[float, bool]:
        return seconds_to(record, target, needed.get((record.row, record.hidden), math.inf))

    def factor(row: str, kbit: float) -> float:
        pair = [small.where(row=each, kbit=kbit) for each in (FEDAVG, row)]
        if not all(pair):
            return math.nan
        dense, ours = (ended(records[0])[0] for records in pair)
        if row == AT_NODES:
            # FedAvg could also omit what this row omits.
            dense -= _bytes(pair[0][0].hidden) / (125.0 * kbit)
        return dense / ours if math.isfinite(ours) else 0.0

    empty = found.where(hidden=EMPTY)
    idle = min(IDLE, float(config.settings["limit"]))

    def bodies(seen: Mapping[str, Any]) -> float:
        # Headers are counted per packet.
        return float(seen["up_bytes"] + seen["down_bytes"] - HEADERS * (seen["up_packets"] + seen["down_packets"]))

    quiet = median(bodies(r.quiet) / idle for r in empty) if empty else 0.0
    # Bytes per message without another name.
    alone = {r.row: (cost(r, quiet), max(1, r.messages)) for r in empty}
    each = {row: max(0.0, (c.interfaces - c.named) / messages) for row, (c, messages) in alone.items()}
    finished = [r for r in small if r.line]
    costs = [Record({"row": r.row, "kbit": r.kbit, **cost(r, quiet, each[TRAINS_AS[r.row]])}) for r in finished]
    off = max(map(unexplained, costs), default=math.nan)
    same = {(r.row, r.hidden): r.line for r in here}
    apart = [abs(p[1] - v) for r in finished for p, v in zip(r.line, same[TRAINS_AS[r.row], r.hidden], strict=False)]
    fast = max(ROWS[1:], key=lambda row: factor(row, 1000.0) if math.isfinite(factor(row, 1000.0)) else -1.0)
    gained = factor(fast, 1000.0)
    no_mega = skipped or ("" if math.isfinite(gained) else "1000 is not among the rates")
    no_stock = skipped or ("" if beside else "set stock=true")
    stock, ours = (next(iter(beside.where(row=row)), None) for row in (STOCK, BOTH))
    versus = math.nan
    said = f"At 1 Mbit/s {fast} reaches {target:g} % {gained:.1f} times sooner than FedAvg; "
    if stock is not None and ours is not None:
        reached, _ = seconds_to(stock, target, math.inf)
        versus = (reached if math.isfinite(reached) else longest) / ended(ours)[0]
        said += f"{LARGE / 1e6:g} MB at {LARGE_KBIT:g} kbit/s: stock Flower {_outcome(stock, target)}, "
        said += f"top-k both ways {_outcome(ours, target)}; "
    said += f"all but {100 * off:.1f} % of the bytes at the interfaces have a name."
    quantities: dict[Any, Any] = {
        ("1 Mbit/s", "seconds of FedAvg over the best of ours"): gained,
        "share of the bytes at the interfaces without a name": off,
        "bytes at the interfaces of FedAvg over the ledger's": max(
            (c.interfaces / c.ledger for c in costs if c.row == FEDAVG), default=math.nan
        ),
        "accuracies over links, points off those in this process": max(apart, default=math.nan),
        ("8 MB at 200 kbit/s", "seconds of stock Flower over ours"): versus,
    }
    listed = ", ".join(f"{row} {value:.0f}" for row, value in each.items())
    reasons = dict.fromkeys(quantities, skipped)
    reasons["1 Mbit/s", "seconds of FedAvg over the best of ours"] = no_mega
    reasons["8 MB at 200 kbit/s", "seconds of stock Flower over ours"] = no_stock
    return Studied(
        {**quantities, "said": skipped or said},
        tables=[
            table(
                f"Seconds to {target:g} % over real links",
                {
                    "kbit/s": lambda r: f"{r.kbit:g}",
                    "row": "row",
                    "model, MB": lambda r: round(1e-6 * _bytes(r.hidden), 2),
                    "step size": "rate",
                    "first round, s": lambda r: round(r.line[0][0], 1) if r.line else None,
                    "a later round, s": lambda r: round(pace(r.line), 1) if len(r.line) > 1 else None,
                    "rounds": lambda r: len(r.line),
                    "of": lambda r: _seconds(needed[r.row, r.hidden], True),
                    "seconds": lambda r: _seconds(*ended(r)),
                    "FedAvg's over it": lambda r: round(factor(r.row, r.kbit), 1),
                },
                small,
                "Two nodes, each on its own link. About: the row was stopped at its time limit and is extrapolated "
                "at its speed to the rounds that the same training needs in this process. All rows but stock Flower "
                f"send in pieces that suit the link. Of {AT_NODES!r} the last column is against FedAvg without the "
                "seconds for its first model (derived: the model over the rate).",
            ),
            table(
                f"A model of {LARGE / 1e6:g} MB at {LARGE_KBIT:g} kbit/s up and {LARGE_DOWN:g} down",
                {
                    "row": "row",
                    "rounds": lambda r: len([point for point in r.line if math.isfinite(point[1])]),
                    "rounds without a reply": lambda r: len([p for p in r.line if not math.isfinite(p[1])]),
                    "seconds": lambda r: _seconds(*ended(r)) if math.isfinite(ended(r)[0]) else r.error,
                    "accuracy, %": lambda r: max((round(v, 1) for v in _finite([p[1] for p in r.line])), default=None),
                    "MB up at the interfaces": lambda r: round(r.everything["up_bytes"] / 1e6, 2),
                    "MB down": lambda r: round(r.everything["down_bytes"] / 1e6, 2),
                },
                beside,
                "Stock Flower uses its own settings: pieces of 5 MB, two at once.",
            ),
            table(
                "Where the bytes went, KB",
                {
                    "kbit/s": lambda c: f"{c.kbit:g}",
                    "row": "row",
                    **{part: partial(lambda name, c: round(c[name] / 1e3, 1), part) for part in PARTS},
                    "without a name, %": lambda c: round(100 * unexplained(c), 1),
                },
                costs,
                "Both ways and both nodes, up to the last finished round. Headers: 66 bytes a packet. Polls: two idle "
                f"nodes send and receive {quiet:.0f} bytes a second besides. Acknowledgements: what a training of the "
                f"same row with an empty model showed, bytes a message: {listed}.",
            ),
        ],
        skipped=reasons,
    )


def _outcome(record: Record, target: float) -> str:
    reached, measured = seconds_to(record, target, math.inf)
    finished = len(_finite([point[1] for point in record.line]))
    said = "" if record.error.startswith("not in") else f" ({record.error})"
    return (
        f"is there after {reached:.0f} s" if measured else f"had {finished} rounds after {record.seconds:.0f} s{said}"
    )


def _seconds(value: float, measured: bool) -> str:
    if not math.isfinite(value):
        return "never"
    return f"{value:.0f}" if measured else f"about {value:.0f}"
