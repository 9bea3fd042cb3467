"""What this project logs is seen where Flower's own lines are seen, without configuration."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.common.logger import FLOWER_LOGGER

from fedcomp.flower import logs
from fedcomp.logs import log

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_b1_an_info_line_appears_beside_flowers_own_without_configuration() -> None:
    """Python's default hides INFO lines of a logger that has no handler, as a library's own has none."""
    code = (
        "from flwr.serverapp.strategy import FedAvg\n"
        "from fedcomp.flower.logs import log\n"
        "FedAvg().summary()\n"
        "log.info('a line of ours')\n"
        "log.debug('a line nobody asked for')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stderr.splitlines()
    ours = [line for line in lines if "a line of ours" in line]
    flowers = [line for line in lines if "Sampling:" in line]
    assert len(ours) == len(flowers) == 1
    assert ours[0].split(":")[0] == flowers[0].split(":")[0], "the same level, in the same form"
    assert "nobody asked" not in done.stderr


@pytest.mark.slow
def test_b1_no_layer_that_runs_inside_flower_logs_under_a_name_that_is_not_shown() -> None:
    """A logger called after the package has no handler: its INFO lines are lost, and its warnings come bare."""
    makers = {
        str(path.relative_to(ROOT))
        for package in ("strategies", "clients", "fedcomp")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "getLogger"
    }
    assert makers == {"fedcomp/logs.py", "fedcomp/flower/logs.py"}, "use fedcomp.logs.log"


def test_b1_there_is_one_logger_and_it_is_a_child_of_flowers() -> None:
    assert logs.log is log
    assert log.parent is logs.flowers is FLOWER_LOGGER
