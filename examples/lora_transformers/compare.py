"""Tune the same adapters with the plain and with the compressed app, and print the bytes beside the tracker's.

Both apps run on a grid that serialises every message and counts its bytes, each in a process of its own, because both
call their package ``tuning``.

    python examples/lora_transformers/compare.py --rounds 10 --clients 4
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
APPS = ("plain", "compressed")


def measure(name: str, rounds: int, clients: int) -> None:
    """Run the app in folder ``name`` in this process; what it prints is followed by the grid's count."""
    from fedcomp.flower.offline import go_offline

    go_offline()
    sys.path.insert(0, str(HERE / name))
    from flwr.app import Context, RecordDict
    from tuning.client_app import app as client_app
    from tuning.server_app import app as server_app

    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.metered import MeteredGrid

    logging.getLogger("flwr").setLevel(logging.ERROR)
    # transformers' own, of its next release.
    warnings.simplefilter("ignore", FutureWarning)
    project = tomllib.loads((HERE / name / "pyproject.toml").read_text(encoding="utf-8"))
    config = {**project["tool"]["flwr"]["app"]["config"], "num-server-rounds": rounds}
    print(f"{name}: ", end="", flush=True)
    with InProcessGrid(client_app, clients, run_config=config) as inner:
        grid = MeteredGrid(inner)
        server_app(grid, Context(inner.run.run_id, 0, {}, RecordDict(), config))
    found = grid.ledger.summary()
    print(f"{name}: serialised messages: bytes up {found['wire_up']:,}, down {found['wire_down']:,}")


def main() -> None:
    """Run both apps."""
    parser = argparse.ArgumentParser(description="Bytes sent by the plain and the compressed tuning app.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--app", choices=APPS, help="run one app alone")
    args = parser.parse_args()
    if args.rounds < 1 or args.clients < 2:
        parser.error("at least 1 round and 2 clients: Flower's FedAvg waits for two nodes by default")
    if args.app:
        measure(args.app, args.rounds, args.clients)
        return
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]))
    for name in APPS:
        command = [sys.executable, __file__, "--app", name, "--rounds", str(args.rounds)]
        subprocess.run(
            [*command, "--clients", str(args.clients)],
            check=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )


if __name__ == "__main__":
    main()
