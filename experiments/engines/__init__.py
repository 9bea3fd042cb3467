"""Engines: the ways to run one spec with the same server and client apps.

Importing this package imports neither Flower nor Ray; each engine is a module that is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedcomp.errors import ConfigError, nearest
from fedcomp.flower.offline import go_offline
from fedcomp.heap import keep_freed_memory

if TYPE_CHECKING:
    from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec

ENGINES: Final[dict[str, str]] = {
    "inprocess": "clients run one after the other in this process; every message is really serialised",
    "ray": "Flower's simulation: clients run in Ray actors",
    "superlink": "Flower's deployment: a SuperLink and one SuperNode process per client, on loopback",
}
"""Name of each engine, which is also its module's, and what it is."""


def run(
    spec: RunSpec,
    *,
    on_round: Callable[[RoundRecord], object] | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    privacy: Path | None = None,
    ray_address: str | None = None,
    client_states: Path | None = None,
) -> RunResult:
    """Run ``spec`` on its engine.

    Parameters
    ----------
    spec : RunSpec
    on_round : callable, optional
        Called with each round's record when it is complete, round 0 (the initial model) first. It may be called from
        another thread. Rounds restored from a checkpoint are not repeated.
    checkpoint : Path, optional
        A file: when it exists the run continues from it, and it is replaced as the run goes on. On the engine
        ``superlink`` the nodes keep their state in a folder beside it, called as the file with ``.nodes`` behind. The
        engine ``ray`` cannot do this and raises :class:`ConfigError`.
    checkpoint_every : int, optional
        Rounds between two checkpoints, default 1; see :func:`fedcomp.experiments.serve.serve`.
    privacy : Path, optional
        The file in which a private system keeps what it released, on any engine; see
        :func:`fedcomp.experiments.serve.serve`.
    ray_address : str, optional
        ``HOST:PORT`` of a Ray cluster that runs already, for the engine ``ray``: its machines share the clients. This
        process has to be on one of them. Default a Ray of this process's own.
    client_states : Path, optional
        A folder, made where it is missing, in which the in-process engine keeps what clients remember, in place of
        memory: one file each, for as long as the run lasts.

    Raises
    ------
    ConfigError
        For an unknown engine, system, task or setting; the message names the nearest right one.
    """
    if spec.engine not in ENGINES:
        raise ConfigError(f"unknown engine {spec.engine!r}{nearest(spec.engine, ENGINES)}")
    # Flower reads its telemetry switch once, when it is first imported.
    go_offline()
    keep_freed_memory()
    from fedcomp.experiments.systems import check

    check(spec)
    # Each engine has what all have, and what is its own.
    given: dict[str, dict[str, Any]] = {
        "ray": {"ray_address": ray_address},
        "inprocess": {"client_states": client_states, "checkpoint_every": checkpoint_every},
        "superlink": {"checkpoint_every": checkpoint_every},
    }
    own = given[spec.engine]
    for engine_name, options in given.items():
        for name, value in options.items():
            if value is not None and name not in own:
                raise ConfigError(f"{name} is for engine={engine_name}; this run is on engine={spec.engine}")
    engine = importlib.import_module(f"fedcomp.experiments.engines.{spec.engine}")
    result: RunResult = engine.run(spec, on_round=on_round, checkpoint=checkpoint, privacy=privacy, **own)
    return result
