"""The ServerApp that Flower loads: reads the run configuration, serves the run, and stores the result.

Engines that live in this process call :func:`~fedcomp.experiments.serve.serve` themselves.
"""

from __future__ import annotations

import json
import logging
from functools import partial
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


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run configuration says; write the result into its folder ``out``, or log a table."""
    config = dict(context.run_config)
    folder, kept, state = (_path(config, key) for key in (OUT_KEY, PRIVACY_KEY, CHECKPOINT_KEY))
    every: Any = config.pop(CHECKPOINT_EVERY_KEY, None)
    record = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        kept, record = kept or folder / PRIVACY_FILE, partial(_record, folder / ROUNDS_FILE)
    spec = RunSpec.from_run_config(config)
    result = serve(spec, grid, on_round=record, checkpoint=state, checkpoint_every=every, privacy=kept)
    if folder is None:
        _print(result)
    else:
        result.save(folder)


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


def _record(file: Path, done: RoundRecord) -> None:
    # Opened for each line: whoever follows the file sees a finished round at once.
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(done.to_json()) + "\n")


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
