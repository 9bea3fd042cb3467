"""The one ServerApp of every engine: reads the run configuration, serves the run, delivers the result.

Flower loads :data:`app`. Engines that live in this process call :func:`build` to get the same app with their own hooks
for progress, checkpoints and delivery.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcomp.errors import ConfigError
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import PRIVACY_FILE, ROUNDS_FILE, RoundRecord, RunResult, RunSpec
from fedcomp.privacy.statement import Statement

log = logging.getLogger("flwr")

CHECKPOINT_KEY = "checkpoint"
"""Run-configuration key: absolute path of the file from which the run continues, and in which it leaves its state;
empty for none."""

CHECKPOINT_EVERY_KEY = "checkpoint_every"
"""Run-configuration key: rounds between two checkpoints."""

OUT_KEY = "out"
"""Run-configuration key: absolute path of the folder that receives the result; empty prints it instead."""

PRIVACY_KEY = "privacy"
"""Run-configuration key: absolute path of the file in which a private system keeps what it released; empty puts it into
the folder that receives the result, if there is one."""


def build(
    spec: RunSpec | None = None,
    *,
    on_round: Callable[[RoundRecord], object] | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    privacy: Path | None = None,
    deliver: Callable[[RunResult], object] | None = None,
) -> ServerApp:
    """Return the server app.

    Parameters
    ----------
    spec : RunSpec, optional
        What to run; default: what the run configuration says.
    on_round : callable, optional
        Called with each round's record as soon as it is complete.
    checkpoint : Path, optional
        File from which the run continues and in which it leaves its state; default: what the run configuration says.
    checkpoint_every : int, optional
        Rounds between two checkpoints; likewise.
    privacy : Path, optional
        File in which a private system keeps what it released; default: what the run configuration says.
    deliver : callable, optional
        Receives the result; default: write it into the folder ``out`` of the run configuration, or log a table.
    """
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        config = dict(context.run_config)
        folder, kept, state = _path(config, OUT_KEY), _path(config, PRIVACY_KEY), _path(config, CHECKPOINT_KEY)
        every: Any = config.pop(CHECKPOINT_EVERY_KEY, None)
        asked = RunSpec.from_run_config(config) if spec is None else spec
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        ledger = privacy or kept or (None if folder is None else folder / PRIVACY_FILE)
        records = on_round if folder is None else _recorder(folder, on_round)
        result = serve(
            asked,
            grid,
            on_round=records,
            checkpoint=checkpoint or state,
            checkpoint_every=every if checkpoint_every is None else checkpoint_every,
            privacy=ledger,
        )
        if deliver is not None:
            deliver(result)
        elif folder is not None:
            result.save(folder)
        else:
            _print(result)

    return server


def _path(config: dict[str, Any], key: str) -> Path | None:
    """Take ``key`` out of the run configuration, None where it is empty."""
    text = config.pop(key, "")
    if text == "":
        return None
    if not isinstance(text, str) or not Path(text).is_absolute():
        raise ConfigError(
            f"{key} is {text!r}; expected an absolute path: the server app's working directory is the SuperLink's"
        )
    return Path(text)


def _recorder(folder: Path, on_round: Callable[[RoundRecord], object] | None) -> Callable[[RoundRecord], None]:
    """Return a hook that appends each round to ``rounds.jsonl``, for whoever follows the run from outside."""

    def record(done: RoundRecord) -> None:
        # Opened for each line: whoever follows the file sees a finished round at once.
        with (folder / ROUNDS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(done.to_json()) + "\n")
        if on_round is not None:
            on_round(done)

    return record


def _print(result: RunResult) -> None:
    log.info("%-6s %9s %9s %14s %14s", "round", "accuracy", "loss", "uplink bytes", "downlink bytes")
    for r in result.rounds:
        log.info("%-6d %9.4f %9.4f %14d %14d", r.round, r.accuracy, r.loss, r.uplink_wire_bytes, r.downlink_wire_bytes)
    log.info(
        "%s: accuracy %.4f, uplink %d payload bytes in %d wire bytes, downlink %d wire bytes, %.1f s",
        result.spec.name,
        result.accuracy,
        result.uplink_payload_bytes,
        result.uplink_wire_bytes,
        result.downlink_wire_bytes,
        result.seconds,
    )
    if "privacy" in result.notes:
        log.info("%s", Statement.from_json(result.notes["privacy"]).prose())
        if result.notes["ended"]:
            log.info("ended after round %d of %d: %s", result.final.round, result.spec.rounds, result.notes["ended"])


app = build()
