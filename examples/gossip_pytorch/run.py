"""Run the app in this process, on a grid that really serialises every message.

python examples/gossip_pytorch/run.py --rounds 300 --nodes 4
"""

from __future__ import annotations

import argparse
import logging
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run it and print what the server app prints."""
    parser = argparse.ArgumentParser(description="Decentralised learning of handwritten digits in this process.")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--topology", default="exponential")
    args = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    from fedcomp.flower.offline import go_offline

    go_offline()
    from flwr.app import Context, RecordDict
    from gossip_digits.client_app import app as client_app
    from gossip_digits.server_app import app as server_app

    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.metered import MeteredGrid

    logging.getLogger("flwr").setLevel(logging.WARNING)
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    asked = {"num-server-rounds": args.rounds, "topology": args.topology}
    config = {**project["tool"]["flwr"]["app"]["config"], **asked}
    with InProcessGrid(client_app, args.nodes, run_config=config) as grid:
        server_app(MeteredGrid(grid), Context(grid.run.run_id, 0, {}, RecordDict(), config))


if __name__ == "__main__":
    main()
