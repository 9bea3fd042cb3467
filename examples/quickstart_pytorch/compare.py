"""Run the plain and the compressed app on the same clients and print what each sent.

Both apps run in this process, on a grid that really serialises every message and counts its bytes; neither app knows.
Each one gets a Python process of its own, because both call their package ``quickstart``.

    python examples/quickstart_pytorch/compare.py --rounds 30 --clients 10
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
APPS = ("plain", "compressed")


def measure(name: str, rounds: int, clients: int) -> dict[str, Any]:
    """Run the app in folder ``name`` in this process; return its accuracy and its bytes."""
    from fedcomp.flower.offline import go_offline

    go_offline()
    sys.path.insert(0, str(HERE / name))
    from flwr.app import Context, RecordDict
    from quickstart.client_app import app as client_app
    from quickstart.server_app import app as server_app

    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.metered import MeteredGrid

    logging.getLogger("flwr").setLevel(logging.WARNING)
    project = tomllib.loads((HERE / name / "pyproject.toml").read_text(encoding="utf-8"))
    config = {**project["tool"]["flwr"]["app"]["config"], "num-server-rounds": rounds}
    printed = io.StringIO()
    with InProcessGrid(client_app, clients, run_config=config) as inner, contextlib.redirect_stdout(printed):
        grid = MeteredGrid(inner)
        server_app(grid, Context(inner.run.run_id, 0, {}, RecordDict(), config))
    final = [line for line in printed.getvalue().splitlines() if "accuracy" in line][-1]
    return {"app": name, "final": final, **grid.ledger.summary()}


def main() -> None:
    """Run both apps and print the comparison."""
    parser = argparse.ArgumentParser(description="Bytes sent by the plain and the compressed quickstart app.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--app", choices=APPS, help="run one app and print its figures as JSON")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    if args.rounds < 1 or args.clients < 2:
        parser.error("at least 1 round and 2 clients: Flower's FedAvg waits for two nodes by default")
    if args.app:
        print(json.dumps(measure(args.app, args.rounds, args.clients)))
        return
    rows = [_in_own_process(name, args.rounds, args.clients) for name in APPS]
    print(json.dumps(rows) if args.json else _table(rows))


def _in_own_process(name: str, rounds: int, clients: int) -> dict[str, Any]:
    root = HERE.parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    # A model this small only loses time to torch's thread pool.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--app", name, "--rounds", str(rounds), "--clients", str(clients)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        sys.exit(f"the {name} app failed:\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _table(rows: list[dict[str, Any]]) -> str:
    plain, compressed = rows
    lines = [f"{'app':<12}{'uplink payload':>16}{'uplink wire':>14}{'downlink wire':>16}   final evaluation"]
    lines += [
        f"{r['app']:<12}{r['payload_up']:>16,}{r['wire_up']:>14,}{r['wire_down']:>16,}   {r['final']}" for r in rows
    ]
    saved = 1 - compressed["wire_up"] / plain["wire_up"]
    ratio = plain["payload_up"] / compressed["payload_up"]
    lines.append(f"uplink: {ratio:.1f} times fewer payload bytes; {saved:.1%} of all uplink bytes saved")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
