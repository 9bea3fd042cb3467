"""Chaos: what becomes of a compressed training while everything it consists of is killed in turn?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedcomp.experiments import disks, links
from fedcomp.experiments.chaos import CLOCK, DISK, LINK, NODE, SERVER_APP, SUPERLINK, Fault, schedule
from fedcomp.experiments.experiment import Experiment, no_rows
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.kit import Record, Records, Sweep, claim, curves, repetitions, table
from fedcomp.experiments.options import Config, Option
from fedcomp.experiments.spec import RunResult
from fedcomp.rules import Int, Real

PLACES: Final = 1e-5
"""Share of a node's mass that float32 sums of sixty rounds may leave without a place."""

OPTIONS = {
    "seeds": Option(3, Int(1), "runs with state folders, each with a schedule of its own; one without is run beside"),
    "each": Option(3, Int(0, 8), "faults of each kind that nodes have: SIGKILL, pulled link, full disk, wrong clock"),
    "server": Option(1, Int(0, 4), "faults of each kind that the server has: SIGKILL of app and of SuperLink"),
    "deadline": Option(
        30.0, Real(least=4.0, most=600.0), "seconds that a round waits for nodes that answered the one before"
    ),
    "pause": Option(
        1.0,
        Real(least=0.0, most=5.0),
        "seconds that a client waits before its state is written, so that faults find it",
    ),
    "workers": 4,
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


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Run every seed with state folders, and the first without."""
    if skipped := unavailable():
        say(skipped)
        return findings(config, Records([]), skipped)
    cells = [{"seed": seed, "state": True} for seed in repetitions(config)]
    cells.append({"seed": config.seed, "state": False})
    return findings(config, Sweep(shaken, cells, shared={"config": config})(say, int(config.settings["workers"])))


def back_after(record: Mapping[str, Any], place: int) -> float:
    """Return the seconds from a fault until an update of its node, or for the server's of any, was used again."""
    done = record["done"][place]
    node, at = done["fault"]["node"], float(done["at"])
    # The round under way may still use what had left before.
    later = [each for each in record["ended"] if each["round"] > done["fault"]["round"] and each["at"] > at]
    return next((each["at"] - at for each in later if (node in each["used"] if node >= 0 else each["used"])), math.inf)


def findings(config: Config, found: Records, skipped: str = "") -> Findings:
    """Return tables and claims."""
    kept, bare = found.where(state=True), found.where(state=False)
    done = [(record, place) for record in found for place in range(len(record["done"]))]

    def most(records: Sequence[Record], name: str) -> float:
        return max((len(record[name]) for record in records), default=math.nan)

    accounted = min((rounds_of(record) for record in found), default=math.nan)
    share = max((record.lost for record in kept), default=math.nan)
    return Findings(
        tables=[
            table(
                f"{config.rounds} rounds of {config.clients} nodes under fire",
                {
                    "seed": "seed",
                    "state folder": lambda r: "yes" if r.state else "no",
                    "faults": lambda r: len(r.done),
                    "rounds accounted for": rounds_of,
                    "submitted again": lambda r: (
                        r.get("again", 0) + sum(d["fault"]["kind"] == SERVER_APP for d in r.done)
                    ),
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
        ],
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
        claims=[
            claim(
                "rounds accounted for, least of all runs",
                accounted,
                f">= {config.rounds}",
                "a run ends or is resumed",
                skipped=skipped,
            ),
            claim(
                "runs that did not end by themselves",
                float(sum(bool(record.unfinished) for record in found)),
                "<= 0",
                "after its last round a run has completed",
                skipped=skipped,
            ),
            claim(
                "updates counted twice, most of a run",
                most(found, "twice"),
                "<= 0",
                "every update is in the model once, in a memory, or named",
                skipped=skipped,
            ),
            claim(
                "with a state folder: nodes that lost mass, most of a run",
                most(kept, "mass"),
                "<= 0",
                "the state is on the disk before the reply leaves",
                skipped=skipped,
            ),
            claim(
                "with a state folder: largest share of a node's mass without a place",
                share,
                f"<= {PLACES}",
                "derived: float32 sums",
                skipped=skipped,
            ),
            claim(
                "wrong clocks that the node's log did not name",
                float(sum(clocks_of(record) - record.noticed for record in found)),
                "<= 0",
                "Flower refuses such a node without a reason; ours says it, and comes back when the clock is set",
                skipped=skipped,
            ),
            claim(
                "processes left behind, most of a run",
                most(found, "left"),
                "<= 0",
                "whatever is killed, all else ends",
                skipped=skipped,
            ),
            claim(
                "without a state folder: nodes that lost mass",
                most(bare, "mass"),
                ">= 1",
                "memories die with their processes; else the judge sees nothing",
                skipped=skipped or ("" if bare_loses(config) else "no fault ends a memory: set each=1"),
            ),
        ],
        answer=skipped
        or f"{accounted:g} of {config.rounds} rounds are accounted for; with state folders "
        f"{sum(len(r.abandoned) for r in kept)} of {sum(r.updates for r in kept)} updates were abandoned by nodes that "
        f"were killed while they made them, and {most(kept, 'mass'):g} nodes lost mass; without "
        f"{most(bare, 'mass'):g} of {config.clients} did.",
    )


WORDS: Final = {
    NODE: "SIGKILL of the node",
    LINK: "link pulled",
    DISK: "disk full",
    CLOCK: "power cut, then a wrong clock",
    SERVER_APP: "SIGKILL of the server app",
    SUPERLINK: "SIGKILL of the SuperLink",
}


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


EXPERIMENT = Experiment(
    name="chaos",
    question="What becomes of a compressed training while everything it consists of is killed in turn?",
    # Runs are deployments of their own.
    rows=no_rows,
    measure=measure,
    options=OPTIONS,
    rounds=60,
    clients=4,
    engines=("superlink",),
    minutes=12.0,
    quick=("rounds=11", "clients=3", "seeds=1", "each=1"),
    notes=(
        "Real deployments: fedcomp link with TLS, keys and a database, fedcomp node for each node, a network namespace "
        "and a small disk for each; Linux, root and iproute2. Top-k with error feedback, a perceptron on digits.\n\n"
        "The judge believes nobody: clients write down inner products of what they made before anything of it is kept "
        "or sent; these are compared with the model that came out, and with what lies in the state folders at the "
        "end. A server app that was killed is submitted again and goes on from its checkpoint. A wrong clock is 400 s "
        "behind, as that of a board without a battery after a power cut.\n\n"
        "What is lost without a state folder is estimated from what clients wrote down of their memories."
    ),
)
