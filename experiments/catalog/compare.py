"""Any systems on any task, side by side: bytes, accuracy and time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import TEXT, Config, Option
from fedcomp.experiments.spec import parse_settings
from fedcomp.experiments.studies.compare import REFERENCES, check_systems, check_task, entries_of, kind_of, named

if TYPE_CHECKING:
    from fedcomp.experiments.tables import Found


def rows(config: Config) -> dict[str, str]:
    """Return the reference, then the systems in the requested order. A system's text is also its label."""
    entries = entries_of(str(config.settings["systems"]))
    kind = kind_of(named(entries[0])[0])
    reference = " ".join(str(config.settings["reference"]).split()) or REFERENCES.get(kind, entries[0])
    # Check again with the reference, which the check of the setting alone did not see.
    check_systems(",".join([reference, *entries]))
    # A system that is also the reference is one row, since labels are unique.
    return {entry: entry for entry in (reference, *entries)}


def every(config: Config) -> str:
    """Return the task with its options, and the settings of all systems."""
    task, options = named(str(config.settings["task"]))
    shared = " ".join(f"task.{key}={value}" for key, value in options.items())
    return f"task={task} {shared} {config.settings['settings']}"


_ALL: Final = ("wire_up", "wire_down", "peer")


def _edges(found: Found, row: str) -> int | None:
    """Traffic between decentralised nodes, which travels through the server here."""
    return sum(int(r.metrics.get("gossip.edge", 0)) for r in found.results[row].rounds) or None


def answer(found: Found) -> str:
    """Compare every system with the reference. There are no claims about systems that a user chose."""
    said = [
        f"{row}: {found.ratio(row, *_ALL):.3g} times fewer bytes, {{{row} | points lost:.1f}} points lost"
        for row in found.rows
        if row != found.baseline
    ]
    return f"Against {found.baseline}: {'; '.join(said)}." if said else ""


EXPERIMENT = Experiment(
    name="compare",
    question="How many bytes do the systems you name send on the task you name, and what accuracy do they reach?",
    rows=rows,
    each=every,
    last=1,
    options={
        "systems": Option(
            "topk feedback=true, qsgd",
            TEXT,
            "systems, separated by commas, each with settings of its own: 'topk codec.density=0.05, qsgd'",
            check=check_systems,
        ),
        "task": Option(
            "digits", TEXT, "what is learnt, with its options: 'mnist model=cnn partition=shards:2'", check=check_task
        ),
        "settings": Option(
            "", TEXT, "settings of all systems: 'lr=0.3 batch_size=16 link=10mbit'", check=parse_settings
        ),
        "reference": Option(
            "", TEXT, "what they are compared with; empty: fedavg, of decentralised systems dpsgd, else the first"
        ),
    },
    title="Against the first row",
    columns={
        "rounds": lambda found, row: found.results[row].final.round,
        "accuracy, %": lambda found, row: found.mean(row, "accuracy"),
        "points lost": lambda found, row: found.of(row, "points lost"),
        "to the server, bytes": lambda found, row: found.each(row, "wire_up")[0],
        "from the server, bytes": lambda found, row: found.each(row, "wire_down")[0],
        "between clients, bytes": lambda found, row: found.each(row, "peer")[0] or None,
        "on edges, bytes": _edges,
        "times fewer, all links": lambda found, row: found.ratio(row, *_ALL),
        "simulated seconds": lambda found, row: found.mean(row, "simulated") or None,
        "seconds here": "seconds here",
    },
    caption=(
        "Bytes of serialised messages with their envelopes, training and evaluation, whole run. The edge columns "
        "count traffic between decentralised nodes, which travels through the server here. Seconds are those of this "
        "machine, with one process after the other."
    ),
    answer=answer,
    rounds=20,
    clients=10,
    minutes=0.3,
    quick=("rounds=1", "clients=2", "task=digits hidden=8"),
    notes=(
        "Every system starts from the same model and trains on the same parts of the data with the same batches. Only "
        "its own settings differ. Names are those of the table of systems, with its defaults: settings of one system "
        "follow its name, those of all in 'settings'. One seed says little, so repeat the run with others.\n\n"
        "Systems are comparable if a round means the same for them: systems that average at a server, systems whose "
        "nodes gossip, and so on. Mixtures are refused."
    ),
)
