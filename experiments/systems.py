"""The list of systems: everything that can be run, each declared beside its strategy.

The command line, ``flwr run``, the generic apps and the tests iterate over :data:`SYSTEMS`. The client half of every
system is the generic app, which learns from the server's messages what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.experiments.spec import RunSpec
from fedcomp.strategies import conditional, forward, gradiveq, lgc, pair_systems, power_sgd, shared_support
from fedcomp.strategies.coded import linear
from fedcomp.strategies.coded import systems as coded
from fedcomp.strategies.deadlines import Deadline
from fedcomp.strategies.gcn import system as gcn
from fedcomp.strategies.gossip import systems as gossip
from fedcomp.strategies.parts import TASK_PREFIX, below
from fedcomp.strategies.private import systems as private
from fedcomp.strategies.system import System

if TYPE_CHECKING:
    from fedcomp.flower.privacy import Private
    from fedcomp.tasks.base import Task

_DECLARED: Final = (
    *pair_systems.SYSTEMS,
    shared_support.SYSTEM,
    power_sgd.SYSTEM,
    gradiveq.SYSTEM,
    lgc.SYSTEM,
    conditional.SYSTEM,
    forward.SYSTEM,
    *coded.SYSTEMS,
    linear.SYSTEM,
    *gossip.SYSTEMS,
    *private.SYSTEMS,
    gcn.SYSTEM,
)

SYSTEMS: Final[Mapping[str, System]] = MappingProxyType({system.name: system for system in _DECLARED})
"""All of them, by name."""

_FITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "generator": "for a task such as 'digits-generator' use the system 'datalens'",
        "graph": "for a task such as 'digits-graph' use the system 'skewed-gcn'",
    }
)
"""Kinds of tasks that only some systems learn, and what to do with them."""


def get_system(name: str) -> System:
    """Return the row called ``name``; raises :class:`ConfigError` that names the nearest one."""
    if name not in SYSTEMS:
        raise ConfigError(f"unknown system {name!r}{nearest(name, SYSTEMS)}")
    return SYSTEMS[name]


def check(spec: RunSpec) -> None:
    """Raise :class:`ConfigError` when ``spec`` cannot run: wrong names, settings, or parameters of its parts.

    Everything is built once as the run will build it, so that a wrong value is found before any server starts.
    """
    from fedcomp.flower.privacy import find_private
    from fedcomp.tasks import get_task
    from fedcomp.timing import parse_link

    system = get_system(spec.system)
    settings = system.resolve(spec.settings)
    if settings["link"]:
        parse_link(str(settings["link"]))
    if settings["adaptive_deadline"]:
        Deadline.parse(str(settings["adaptive_deadline"]))
    task = get_task(spec.task, **below(settings, TASK_PREFIX))
    task.assignment(spec.clients)
    asked = system.needs.get("task", "")
    if task.needs != (asked if asked in _FITS else ""):
        raise ConfigError(
            f"system {system.name!r} does not fit task {task.name!r}: a generator learns from votes of discriminators, "
            "a graph from rows that its owners exchange, and everything else from records; "
            + _FITS.get(task.needs, f"task {task.name!r} is for systems that train on records, such as 'fedavg'")
        )
    strategy = system.build(settings, spec.seed)
    system.check(strategy, task, spec.clients)
    private = find_private(strategy)
    if private is not None:
        # A delta that is too large for so few clients, a cap, a budget: all of it is about the population.
        declare(private, spec, task)
        # What cannot be stated is not run.
        private.statement()


def declare(private: Private, spec: RunSpec, task: Task) -> None:
    """Tell a private strategy the public numbers its promise is about: of clients, and of records if it asks for them.

    Raises
    ------
    ConfigError
        When its delta is too large for so few.
    """
    if hasattr(private, "declare_records"):
        private.declare_records(len(task.train_split))
    private.declare(spec.clients)
