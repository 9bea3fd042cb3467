"""Several systems in one run of one deployment: its start, and that of every run, costs more than their rounds."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcomp.clients.app import app as client
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import PRIVACY_FILE, RunSpec

__all__ = ["client", "server"]

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    for asked in json.loads(Path(str(context.run_config["specs"])).read_text(encoding="utf-8")):
        spec = RunSpec.from_run_config(asked)
        folder = Path(str(context.run_config["out"])) / spec.system
        folder.mkdir()
        serve(spec, grid, privacy=folder / PRIVACY_FILE).save(folder)
