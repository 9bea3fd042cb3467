"""Flower's simulation engine: the same apps, clients in Ray actors.

Uses the Python entry point because it takes the very app objects that the other engines run; ``flwr run`` would load
its own from a bundle. Client state lives in the simulation's process and cannot be stored, so a run cannot be resumed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from flwr.simulation import run_simulation

from clients.app import app as client_app
from experiments import server_app
from experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.errors import ConfigError, FedcompError


class SimulationError(FedcompError, RuntimeError):
    """The simulation ended without a result."""


def run(
    spec: RunSpec,
    *,
    on_round: Callable[[RoundRecord], object] | None = None,
    checkpoint: Path | None = None,
) -> RunResult:
    """Run ``spec`` under Ray. See :func:`experiments.engines.run`."""
    if checkpoint is not None:
        raise ConfigError(
            "the ray engine cannot be resumed: the simulation keeps the clients' state to itself; use engine=inprocess"
        )
    results: list[RunResult] = []
    server = server_app.build(spec, on_round=on_round, deliver=results.append)
    with _environment(), _without_deprecation():
        run_simulation(
            server_app=server,
            client_app=client_app,
            num_supernodes=spec.clients,
            backend_config={
                # One CPU per client; Flower's default of two would leave half of a small machine idle.
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {
                    "include_dashboard": False,
                    "log_to_driver": False,
                    "logging_level": logging.ERROR,
                },
            },
        )
    if not results:
        raise SimulationError("Flower's simulation ended without a result; its log says why")
    return results[0]


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Keep Ray from reporting usage, and undo what its start adds to this process's environment."""
    before = dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Says that today's handling of accelerators is meant; without it Ray warns about a default to come.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        yield
    finally:
        import ray

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
