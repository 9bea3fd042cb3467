"""Any systems on any task, side by side: what they send, what they reach, and how long they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fedcomp.errors import ConfigError
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.kit import table
from fedcomp.experiments.options import TEXT, Config, Option
from fedcomp.experiments.spec import RunResult, RunSpec, Scalar, parse_settings

REFERENCES: Final[Mapping[str, str]] = {"records": "fedavg", "gossip": "dpsgd"}
"""By kind of system: what the others are compared with where nothing else is asked for."""

KINDS: Final[Mapping[str, str]] = {
    "records": "trains on each client's records and averages at the server",
    "gossip": "is decentralised: a round is one gradient step of each node, and its bytes go from node to node",
    "linear": "makes one step of full-batch gradient descent in a round",
    "generator": "trains a generator by votes",
    "graph": "trains on a graph whose owners exchange rows",
}

_TASK: Final = "task."


def _named(entry: str) -> tuple[str, dict[str, Scalar]]:
    """Return the name at the beginning of ``"name key=value ..."``, and the settings behind it."""
    name, _, settings = entry.strip().partition(" ")
    return name, parse_settings(settings)


def _entries(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(",") if entry.strip()]


def kind_of(name: str) -> str:
    """Return which kind of system ``name`` is, a key of :data:`KINDS`; only systems of one kind can be compared."""
    from fedcomp.experiments.systems import get_system

    needs = get_system(name).needs
    return needs.get("task") or ("gossip" if "topology" in needs else "records")


def _check_systems(text: str) -> None:
    names = [_named(entry)[0] for entry in _entries(text)]
    if not names:
        raise ConfigError("name at least one system, for instance systems=topk,qsgd")
    first, *others = names
    for name in others:
        if kind_of(name) != kind_of(first):
            raise ConfigError(
                f"{first!r} {KINDS[kind_of(first)]}, and {name!r} {KINDS[kind_of(name)]}: their rounds and bytes are "
                "not the same things; compare each with systems of its own kind"
            )
    # One name alone was compared with nothing so far: this refuses it if it is unknown.
    kind_of(first)


def _check_task(text: str) -> None:
    from fedcomp.tasks import get_task  # brings torch

    name, options = _named(text)
    get_task(name, **options)


OPTIONS = {
    "systems": Option(
        "topk feedback=true, qsgd",
        TEXT,
        "systems, separated by commas, each with settings of its own: 'topk codec.density=0.05, qsgd'",
        check=_check_systems,
    ),
    "task": Option(
        "digits", TEXT, "what is learnt, with its options: 'mnist model=cnn partition=shards:2'", check=_check_task
    ),
    "settings": Option("", TEXT, "settings of all systems: 'lr=0.3 batch_size=16 link=10mbit'", check=parse_settings),
    "reference": Option(
        "", TEXT, "what they are compared with; empty: fedavg, of decentralised systems dpsgd, else the first"
    ),
}


def rows(config: Config) -> list[RunSpec]:
    """Return the reference, then the systems in the order asked for."""
    entries = _entries(str(config.settings["systems"]))
    kind = kind_of(_named(entries[0])[0])
    reference = " ".join(str(config.settings["reference"]).split()) or REFERENCES.get(kind, entries[0])
    # Once more with the reference, which the check of the single setting did not see.
    _check_systems(",".join([reference, *entries]))
    task, options = _named(str(config.settings["task"]))
    shared = {_TASK + key: value for key, value in options.items()} | parse_settings(str(config.settings["settings"]))
    specs = []
    # A system that is its own reference is one row, since labels are unique.
    for entry in dict.fromkeys([reference, *entries]):
        system, own = _named(entry)
        settings: dict[str, Any] = {**shared, **own}
        specs.append(config.spec(system, entry, task, **settings))
    return specs


def _wire(result: RunResult) -> int:
    """Return the bytes of all serialised messages, both ways, and of what clients handed to each other."""
    return result.uplink_wire_bytes + result.downlink_wire_bytes + result.peer_wire_bytes


def measure(config: Config, results: Mapping[str, RunResult], say: Say) -> Findings:
    """Compare every system with the reference; nothing is claimed of systems that a user chose."""
    reference = next(iter(results.values()))

    def lost(result: RunResult) -> float:
        return 100 * (reference.accuracy - result.accuracy)

    def times(result: RunResult) -> float | None:
        return _wire(reference) / _wire(result) if _wire(result) else None

    columns: dict[str, Any] = {
        "system": lambda result: result.spec.label,
        "rounds": lambda result: result.final.round,
        "accuracy, %": lambda result: 100 * result.accuracy,
        "points lost": lost,
        "to the server, bytes": "uplink_wire_bytes",
        "from the server, bytes": "downlink_wire_bytes",
        "between clients, bytes": lambda result: result.peer_wire_bytes or None,
        "on edges, bytes": lambda result: sum(int(r.metrics.get("gossip.edge", 0)) for r in result.rounds) or None,
        "times fewer, all links": times,
        "simulated seconds": lambda result: result.simulated_seconds or None,
        "seconds here": lambda result: round(result.seconds, 2),
    }
    optional = ("between clients, bytes", "on edges, bytes", "simulated seconds")
    said = [
        f"{r.spec.label}: {times(r) or 0:.3g} times fewer bytes, {lost(r):.1f} points lost" for r in results.values()
    ]
    return Findings(
        tables=[
            table(
                "Against the first row",
                columns,
                results.values(),
                "Bytes of serialised messages with their envelopes, training and evaluation, whole run. On edges: what "
                "decentralised nodes sent each other, which here travels through the server. Seconds here are this "
                "machine's, one process after the other.",
                optional=optional,
            )
        ],
        answer=f"Against {reference.spec.label}: {'; '.join(said[1:])}." if len(said) > 1 else "",
    )


EXPERIMENT = Experiment(
    name="compare",
    question="What do the systems that you name send and reach, on the task that you name?",
    rows=rows,
    measure=measure,
    options=OPTIONS,
    rounds=20,
    clients=10,
    minutes=0.3,
    quick=("rounds=1", "clients=2", "task=digits hidden=8"),
    notes=(
        "Every system trains from the same model on the same parts of the data, with the same batches, and differs in "
        "its own settings alone. Names are those of the table of systems, with its defaults: settings of one system "
        "follow its name, those of all in 'settings'. One seed tells little; repeat it with others.\n\n"
        "Systems are comparable where a round is the same thing: those that average at a server, those whose nodes "
        "gossip, and so on. Others are refused."
    ),
)
