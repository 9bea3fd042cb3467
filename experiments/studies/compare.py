"""Which systems are comparable: those whose rounds and bytes have the same meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fedcomp.errors import ConfigError
from fedcomp.experiments.spec import Scalar, parse_settings

REFERENCES: Final[Mapping[str, str]] = {"records": "fedavg", "gossip": "dpsgd"}
"""By kind of system, the default reference and a description."""

KINDS: Final[Mapping[str, str]] = {
    "records": "trains on each client's records and averages at the server",
    "gossip": "is decentralised: a round is one gradient step of each node, and its bytes go from node to node",
    "linear": "makes one step of full-batch gradient descent in a round",
    "generator": "trains a generator by votes",
    "graph": "trains on a graph whose owners exchange rows",
}


def named(entry: str) -> tuple[str, dict[str, Scalar]]:
    """Return the name at the start of ``"name key=value ..."`` and the settings after it."""
    name, _, settings = entry.strip().partition(" ")
    return name, parse_settings(settings)


def entries_of(text: str) -> list[str]:
    """Return the texts that commas separate."""
    return [" ".join(entry.split()) for entry in text.split(",") if entry.strip()]


def kind_of(name: str) -> str:
    """Return the kind of system ``name``, a key of :data:`KINDS`. Only systems of the same kind can be compared."""
    from fedcomp.experiments.systems import get_system

    needs = get_system(name).needs
    return needs.get("task") or ("gossip" if "topology" in needs else "records")


def check_systems(text: str) -> None:
    """Raise :class:`ConfigError` if a text names no system, or if two are of different kinds."""
    names = [named(entry)[0] for entry in entries_of(text)]
    if not names:
        raise ConfigError("name at least one system, for instance systems=topk,qsgd")
    first, *others = names
    for name in others:
        if kind_of(name) != kind_of(first):
            raise ConfigError(
                f"{first!r} {KINDS[kind_of(first)]}, and {name!r} {KINDS[kind_of(name)]}: their rounds and bytes are "
                "not the same things; compare each with systems of its own kind"
            )
    # A single name has not been checked so far; this refuses it if it is unknown.
    kind_of(first)


def check_task(text: str) -> None:
    """Raise :class:`ConfigError` if a text does not name a task and its options."""
    from fedcomp.tasks import get_task  # imports torch

    name, options = named(text)
    get_task(name, **options)
