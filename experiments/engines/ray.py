"""Flower's simulation engine: the same apps, with clients in Ray actors.

Uses the Python entry point because it takes the very app objects that the other engines run; ``flwr run`` would load
its own from a bundle. Client state lives in the simulation's process and cannot be stored, so a run cannot be resumed.

The actors are where Ray has processors: on this machine, or on all machines of a cluster whose address is given.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedcomp.clients.app import app as client_app
from fedcomp.errors import ConfigError, FedcompError, optional
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.flower.wrapper import GridWrapper

CONNECT_SECONDS: Final = 5.0


class SimulationError(FedcompError, RuntimeError):
    """The simulation ended without a result."""


def run(
    spec: RunSpec,
    *,
    on_round: Callable[[RoundRecord], object] | None = None,
    checkpoint: Path | None = None,
    privacy: Path | None = None,
    ray_address: str | None = None,
) -> RunResult:
    """Run ``spec`` under Ray. See :func:`fedcomp.experiments.engines.run`."""
    if checkpoint is not None:
        raise ConfigError(
            "the ray engine cannot be resumed: the simulation keeps the clients' state to itself; use engine=inprocess"
        )
    if ray_address is not None:
        _require_cluster(ray_address)
    results: list[RunResult] = []
    stop = threading.Event()
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(serve(spec, _StoppableGrid(grid, stop), on_round=on_round, privacy=privacy))

    with _environment(), _without_deprecation(), contextlib.ExitStack() as left:
        left.callback(stop.set)
        run_simulation(
            server_app=app,
            client_app=client_app,
            num_supernodes=spec.clients,
            backend_config={
                # One CPU per client; Flower's default of two would leave half of a small machine idle.
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {
                    "include_dashboard": False,
                    "log_to_driver": False,
                    "logging_level": logging.ERROR,
                    **({} if ray_address is None else {"address": ray_address}),
                },
            },
        )
    if not results:
        raise SimulationError("Flower's simulation ended without a result; its log says why")
    return results[0]


def _require_cluster(address: str) -> None:
    """Raise ConfigError unless something listens at ``address``: Ray itself would look for it for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"ray_address={address!r} is not valid: expected HOST:PORT of the head, as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}: {error}; start one with 'ray start --head --port={port}' on {host}, "
            f"and join it with 'ray start --address={address}' on the other machines"
        ) from error


class _StoppableGrid(GridWrapper):
    """The simulation's grid, which refuses to go on once ``stop`` is set.

    Flower runs the server app in a thread. When the main thread is interrupted, the clients are gone but that thread
    would poll for their replies until the round's timeout, and for nodes without any limit, and keep the process alive.
    """

    def __init__(self, inner: Grid, stop: threading.Event) -> None:
        self._grid = inner
        self._stop = stop

    @property
    def inner(self) -> Grid:  # type: ignore[override]
        """The simulation's grid, unless the simulation is over.

        Raises
        ------
        SimulationError
            When it is.
        """
        if self._stop.is_set():
            raise SimulationError("the simulation was stopped while a round was under way")
        return self._grid


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Keep Ray from reporting usage, and undo what its start adds to this process's environment."""
    with optional("engine 'ray'"):
        import ray
    before = dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Says that today's handling of accelerators is meant; without it Ray warns about a default to come.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        yield
    finally:
        # An interrupt may leave the simulation before its own shutdown.
        ray.shutdown()
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _without_deprecation() -> Iterator[None]:
    """Hide Flower's advice to use ``flwr run`` instead of the entry point that this engine calls on purpose."""

    def keep(record: logging.LogRecord) -> bool:
        return "run_simulation" not in record.getMessage()

    logger = logging.getLogger("flwr")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
