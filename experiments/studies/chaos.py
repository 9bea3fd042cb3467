"""Chaos: trainings in real deployments to which faults are done, and what the judge found of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedcomp.experiments import disks, links
from fedcomp.experiments.chaos import CLOCK, DISK, LINK, NODE, SERVER_APP, SUPERLINK, Fault, schedule
from fedcomp.experiments.findings import Table
from fedcomp.experiments.kit import Record, Records, curves, repetitions, table
from fedcomp.experiments.options import Config
from fedcomp.experiments.tables import Found, Studied

WORDS: Final = {
    NODE: "SIGKILL of the node",
    LINK: "link pulled",
    DISK: "disk full",
    CLOCK: "power cut, then a wrong clock",
    SERVER_APP: "SIGKILL of the server app",
    SUPERLINK: "SIGKILL of the SuperLink",
}


def unavailable() -> str:
    """Return in one line why faults cannot be done here; empty when they can."""
    return links.unavailable() or disks.unavailable()


def faults_of(config: Config, seed: int, *, state: bool) -> list[Fault]:
    """Return what is done in a run; without a state folder there is no disk to fill."""
    s = config.settings
    found = schedule(seed, config.rounds, config.clients, each=int(s["each"]), server=int(s["server"]))
    return [fault for fault in found if state or fault.kind != DISK]


def shaken(seed: int, state: bool, config: Config) -> dict[str, Any]:
    """Train while the faults of a seed are done."""
    # Here, since a list of the experiments needs no Flower.
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
    """Run every seed with state folders, and the first without."""
    config = found.config
    if skipped := unavailable():
        found.say(skipped)
        return studied(config, Records([]), skipped)
    cells = [{"seed": seed, "state": True} for seed in repetitions(config)]
    cells.append({"seed": config.seed, "state": False})
    return studied(config, found.sweep(shaken, cells, config=config))


def back_after(record: Mapping[str, Any], place: int) -> float:
    """Return the seconds from a fault until an update of its node, or for the server's of any, was used again."""
    done = record["done"][place]
    node, at = done["fault"]["node"], float(done["at"])
    # The round under way may still use what had left before.
    later = [each for each in record["ended"] if each["round"] > done["fault"]["round"] and each["at"] > at]
    return next((each["at"] - at for each in later if (node in each["used"] if node >= 0 else each["used"])), math.inf)


def studied(config: Config, found: Records, skipped: str = "") -> Studied:
    """Return what runs came to; none of it is measured where ``skipped`` says why."""
    kept, bare = found.where(state=True), found.where(state=False)

    def most(records: Sequence[Record], name: str) -> float:
        return max((len(record[name]) for record in records), default=math.nan)

    quantities: dict[Any, Any] = {
        "rounds accounted for": min((rounds_of(record) for record in found), default=math.nan),
        "runs that did not end by themselves": float(sum(bool(record.unfinished) for record in found)),
        "updates counted twice": most(found, "twice"),
        ("with a state folder", "nodes that lost mass"): most(kept, "mass"),
        ("with a state folder", "largest share of a node's mass without a place"): max(
            (record.lost for record in kept), default=math.nan
        ),
        "wrong clocks that the node's log did not name": float(
            sum(clocks_of(record) - record.noticed for record in found)
        ),
        "processes left behind": most(found, "left"),
        ("without a state folder", "nodes that lost mass"): most(bare, "mass"),
    }
    no_bare = "" if bare_loses(config) else "no fault ends a memory: set each=1"
    said = (
        f"{quantities['rounds accounted for']:g} of {config.rounds} rounds are accounted for; with state folders "
        f"{sum(len(r.abandoned) for r in kept)} of {sum(r.updates for r in kept)} updates were abandoned by nodes that "
        f"were killed while they made them, and {most(kept, 'mass'):g} nodes lost mass; without "
        f"{most(bare, 'mass'):g} of {config.clients} did."
    )
    return Studied(
        {**quantities, "rounds": config.rounds, "said": skipped or said},
        tables=_tables(config, found),
        figures=[
            curves(
                "Rounds while things are killed",
                found,
                lambda r: [each["at"] - r.ended[0]["at"] for each in r.ended],
                lambda r: [each["round"] for each in r.ended],
                lambda r: f"seed {r.seed}, {'state folders' if r.state else 'no state folder'}",
                x_label="seconds since the first round ended",
                y_label="round",
                caption="A step to the right is a round that a fault held up.",
            )
        ]
        if found
        else [],
        skipped={
            **(dict.fromkeys(quantities, skipped) if skipped else {}),
            ("without a state folder", "nodes that lost mass"): skipped or no_bare,
        },
    )


def _tables(config: Config, found: Records) -> list[Table]:
    bare = found.where(state=False)
    done = [(record, place) for record in found for place in range(len(record["done"]))]
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
                "abandoned (node, message)": lambda r: named(r.abandoned),
                "nodes that lost mass": lambda r: len(r.mass),
                "largest share without a place": lambda r: float(f"{r.lost:.1e}"),
                "wrong clocks noticed": lambda r: f"{r.noticed} of {clocks_of(r)}",
                "processes left": lambda r: len(r.left),
                "seconds": lambda r: round(r.seconds),
            },
            found,
            "Submitted again: a server app that was killed, or a run that was over before the SuperLink was back. "
            "Abandoned: made by a node that was killed before its state was written; nothing of it was kept or "
            "sent. All other updates are in the model, or in the memory of their node. Noticed: the node's own log "
            "says that its clock is wrong.",
        ),
        table(
            "What was done",
            {
                "seed": lambda pair: pair[0].seed,
                "state folder": lambda pair: "yes" if pair[0].state else "no",
                "round": lambda pair: fault_of(pair)["round"],
                "fault": lambda pair: WORDS[fault_of(pair)["kind"]],
                "node": lambda pair: fault_of(pair)["node"] if fault_of(pair)["node"] >= 0 else None,
                "processes killed": lambda pair: pair[0].done[pair[1]]["processes"] or None,
                "used again after, s": lambda pair: _seconds(back_after(*pair)),
            },
            done,
            "A killed node that has a key is let in again when the SuperLink has missed it for up to a minute.",
        ),
        table(
            "What is lost without a state folder",
            {"what": str},
            [
                line
                for record in bare
                for line in (
                    *(
                        f"until round {number} node {node} has begun again with an empty memory"
                        for number, node in begun(record)
                    ),
                    *record.mass,
                )
            ],
        ),
    ]


def bare_loses(config: Config) -> bool:
    """Whether anything is done that ends a memory which is nowhere else."""
    return int(config.settings["each"]) > 0 or int(config.settings["server"]) > 0


def rounds_of(record: Mapping[str, Any]) -> int:
    """Return how many rounds the server's last checkpoint has, each once."""
    return len({each["round"] for each in record["ended"]})


def begun(record: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return round and node where an update that was used is of another memory than the one before.

    The report's ``fresh`` is about the update with which a memory begins, which may itself have been lost.
    """
    memories: dict[str, int] = {}
    found = []
    for each in record["ended"]:
        now = each["memories"]
        found += [(each["round"], int(node)) for node in sorted(now) if memories.get(node, now[node]) != now[node]]
        memories |= now
    return found


def clocks_of(record: Mapping[str, Any]) -> int:
    """Return how many clocks were wrong."""
    return sum(each["fault"]["kind"] == CLOCK for each in record["done"])


def fault_of(pair: tuple[Mapping[str, Any], int]) -> Mapping[str, Any]:
    """Return a fault as it was done."""
    record, place = pair
    fault: Mapping[str, Any] = record["done"][place]["fault"]
    return fault


def named(abandoned: Sequence[Sequence[int]]) -> str:
    """Return nodes and the numbers of their messages in words."""
    return ", ".join(f"{node}: {sequence}" for node, sequence in abandoned) or "none"


def _seconds(value: float) -> float | None:
    return round(value, 1) if math.isfinite(value) else None
