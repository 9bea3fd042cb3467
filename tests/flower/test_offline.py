"""Nothing here talks to the network, and importing it is cheap."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.common.logger import FLOWER_LOGGER

from fedcomp.flower import logs, offline
from fedcomp.logs import log

ROOT = Path(__file__).parents[2]

# Any attempt to connect or to resolve a name ends the process; so does a look at Ray.
GUARD = """
import sys
def guard(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request"):
        print("network:", event, args, flush=True)
        import os
        os._exit(9)
sys.addaudithook(guard)
"""


def python(code: str, tmp_path: Path, **environment: str) -> str:
    """Run ``code`` in a new interpreter without any of Flower's switches; return what it printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")}
    env = {**clean, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "FLWR_HOME": str(tmp_path), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*offline.OFFLINE_ENVIRONMENT, *os.environ]:
        if name in offline.OFFLINE_ENVIRONMENT or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("before", "added"),
    [
        ({}, {}),
        ({"no_proxy": "a"}, {}),
        ({"http_proxy": "http://p"}, {"no_proxy": "localhost,127.0.0.1,::1"}),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "a, 127.0.0.1"}, {"no_proxy": "a,127.0.0.1,localhost,::1"}),
        ({"http_proxy": "http://p", "no_proxy": "localhost,127.0.0.1,::1"}, {}),
        ({"grpc_proxy": "http://p", "no_proxy": "*"}, {}),
    ],
)
def test_connections_to_this_machine_go_past_a_proxy(before: dict[str, str], added: dict[str, str]) -> None:
    assert offline.without_proxy(before) == added


def test_it_sets_what_is_missing_and_keeps_what_the_user_set(clean_environment, monkeypatch) -> None:
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "0")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    assert offline.go_offline() == {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
    assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "0"
    assert offline.go_offline() == {}
    # go_offline() writes to the environment itself; monkeypatch knows only of the deletion and would leave it.
    monkeypatch.setenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")


@pytest.mark.slow
def test_it_imports_no_flower_and_works_when_called_first(tmp_path: Path) -> None:
    out = python(
        "import sys; from fedcomp.flower.offline import go_offline\n"
        "assert not any(m.split('.')[0] in ('flwr', 'torch', 'ray') for m in sys.modules)\n"
        "go_offline()\n"
        "import flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)",
        tmp_path,
    )
    assert out == "0"


@pytest.mark.slow
def test_it_warns_when_it_comes_too_late(tmp_path: Path) -> None:
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import flwr.supercore.telemetry\n"
        "from fedcomp.flower.offline import OfflineWarning, go_offline\n"
        "try:\n    go_offline(); print('silent')\n"
        "except OfflineWarning as w: print('warned' if 'before the first import' in str(w) else w)"
    )
    code = code.replace("import warnings; warnings.simplefilter('error')\nimport flwr", "import warnings\nimport flwr")
    code = code.replace("try:", "warnings.simplefilter('error', OfflineWarning)\ntry:")
    assert python(code, tmp_path) == "warned"
    assert python(code, tmp_path, FLWR_TELEMETRY_ENABLED="0") == "silent"
    # A user who asked for telemetry gets no lecture.
    assert python(code, tmp_path, FLWR_TELEMETRY_ENABLED="1") == "silent"


@pytest.mark.slow
@pytest.mark.parametrize("package", ["fedcomp.flower", "clients", "strategies"])
def test_importing_opens_no_connection_and_no_ray(package: str, tmp_path: Path) -> None:
    code = GUARD + (
        "from fedcomp.flower.offline import go_offline; go_offline()\n"
        "import importlib, pkgutil\n"
        f"package = importlib.import_module({package!r})\n"
        "names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + '.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names), 'ray' in sys.modules)"
    )
    count, ray = python(code, tmp_path).split()
    assert int(count) >= 2
    assert ray == "False"


@pytest.mark.slow
def test_a_whole_run_in_process_opens_no_connection(tmp_path: Path) -> None:
    code = GUARD + (
        "from fedcomp.flower.offline import go_offline; go_offline()\n"
        "from toy import client_app, fedavg, model\n"
        "from fedcomp.flower.grid import InProcessGrid\n"
        "from fedcomp.flower.metered import MeteredGrid\n"
        "with InProcessGrid(client_app(), 3) as engine:\n"
        "    result = fedavg().start(MeteredGrid(engine), model(), num_rounds=2)\n"
        "import time; time.sleep(0.2)\n"
        "print(len(result.train_metrics_clientapp))"
    )
    assert python(code, tmp_path).splitlines()[-1] == "2"


# What this project logs is seen where Flower's own lines are seen, without configuration.


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
