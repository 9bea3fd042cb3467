"""Chaos: trainings in real deployments with injected faults, and the findings of the check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedcomp.experiments import disks, links
from fedcomp.experiments.chaos import CLOCK, DISK, SERVER_APP, Fault, schedule
from fedcomp.experiments.findings import Table
from fedcomp.experiments.kit import Record, Records, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.tables import Found, Studied


def unavailable() -> str:
    """Return in one line why faults cannot be injected here; empty if they can."""
    return links.unavailable() or disks.unavailable()


def faults_of(config: Config, seed: int, *, state: bool) -> list[Fault]:
    """Return the faults of a run. Without a state folder there is no disk to fill."""
    s = config.settings
    found = schedule(seed, config.rounds, config.clients, each=int(s["each"]), server=int(s["server"]))
    return [fault for fault in found if state or fault.kind != DISK]


def shaken(seed: int, state: bool, config: Config) -> dict[str, Any]:
    """Train while the faults of a seed are injected."""
    # Imported here, because listing the experiments needs no Flower.
    from fedcomp.experiments.faulted import faulted

    return faulted(
        seed,
        faults_of(config, seed, state=state),
        rounds=config.rounds,
        nodes=config.clients,
        deadline=float(config.settings["deadline"]),
        pause=float(config.settings["pause"]),
        state=state,
    )


def study(found: Found) -> Studied:
    """Run every seed with state folders, and the first seed without."""
    config = found.config
    if skipped := unavailable():
        found.say(skipped)
        return studied(config, Records([]), skipped)
    cells = [{"seed": seed, "state": True} for seed in repetitions(config)]
    cells.append({"seed": config.seed, "state": False})
    return studied(config, found.sweep(shaken, cells, config=config))


def studied(config: Config, found: Records, skipped: str = "") -> Studied:
    """Return the results of the runs. Nothing is measured if ``skipped`` gives a reason."""
    kept, bare = found.where(state=True), found.where(state=False)

    def most(records: Sequence[Record], name: str) -> float:
        return max((len(record[name]) for record in records), default=math.nan)

    quantities: dict[Any, Any] = {
        "rounds accounted for": min(map(rounds_of, found), default=math.nan),
        "runs that did not end by themselves": float(sum(bool(record.unfinished) for record in found)),
        "updates counted twice": most(found, "twice"),
        ("with a state folder", "nodes that lost mass"): most(kept, "mass"),
        ("with a state folder", "largest share of a node's mass without a place"): max(
            (record.lost for record in kept), default=math.nan
        ),
        "wrong clocks that the node's log did not name": float(sum(clocks_of(r) - r.noticed for r in found)),
        "processes left behind": most(found, "left"),
        ("without a state folder", "nodes that lost mass"): most(bare, "mass"),
    }
    reasons = dict.fromkeys(quantities, skipped)
    if not skipped and not config.settings["each"] and not config.settings["server"]:
        reasons["without a state folder", "nodes that lost mass"] = "no fault ends a memory: set each=1"
    said = (
        f"{quantities['rounds accounted for']:g} of {config.rounds} rounds are accounted for; with state folders "
        f"{sum(len(r.abandoned) for r in kept)} of {sum(r.updates for r in kept)} updates were abandoned by nodes that "
        f"were killed while they made them, and {most(kept, 'mass'):g} nodes lost mass; without "
        f"{most(bare, 'mass'):g} of {config.clients} did."
    )
    return Studied(
        {**quantities, "rounds": config.rounds, "said": skipped or said}, tables=_tables(config, found), skipped=reasons
    )


def _tables(config: Config, found: Records) -> list[Table]:
    return [
        table(
            f"{config.rounds} rounds of {config.clients} nodes under fire",
            {
                "seed": "seed",
                "state folder": lambda r: "yes" if r.state else "no",
                "faults": lambda r: len(r.done),
                "rounds accounted for": rounds_of,
                "submitted again": lambda r: r.get("again", 0) + sum(d["fault"]["kind"] == SERVER_APP for d in r.done),
                "rounds without an update": lambda r: sum(not each["used"] for each in r.ended),
                "updates made": "updates",
                "in the model": "used",
                "counted twice": lambda r: len(r.twice),
                "abandoned (node, message)": lambda r: ", ".join(f"{n}: {i}" for n, i in r.abandoned) or "none",
                "nodes that lost mass": lambda r: len(r.mass),
                "largest share without a place": lambda r: float(f"{r.lost:.1e}"),
                "wrong clocks noticed": lambda r: f"{r.noticed} of {clocks_of(r)}",
                "processes left": lambda r: len(r.left),
                "seconds": lambda r: round(r.seconds),
            },
            found,
            "Submitted again: the server app was killed, or the run was over before the SuperLink was back. "
            "Abandoned: made by a node that was killed before its state was written, so nothing was stored or sent. "
            "All other updates are in the model or in the memory of their node. Noticed: the node's own log says that "
            "its clock is wrong. The file cells.jsonl has the time of every fault.",
        ),
        table(
            "What is lost without a state folder",
            {"what": str},
            [line for record in found.where(state=False) for line in record.mass],
        ),
    ]


def rounds_of(record: Mapping[str, Any]) -> int:
    """Return the number of distinct rounds in the server's last checkpoint."""
    return len({each["round"] for each in record["ended"]})


def clocks_of(record: Mapping[str, Any]) -> int:
    """Return how many clocks were wrong."""
    return sum(each["fault"]["kind"] == CLOCK for each in record["done"])
