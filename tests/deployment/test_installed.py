"""Both archives of a release; the wheel in environments of its own: the pair, its commands, apps that Flower starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from page_reading import ROOT

import fedcomp
from fedcomp.experiments.engines.processes import free_ports, processes_with

pytestmark = pytest.mark.engines

APP = Path(__file__).parent / "clashing_app"
TEMPLATE = ROOT / "examples" / "template"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of both archives: that of ``make dist``, which is about to show them, or a new one."""
    if given := os.environ.get("FEDCOMP_DIST"):
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([ROOT / ".ci" / "dist", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    (found,) = archives.glob("*.whl")
    return found


def link(requirements: list[str], site: Path) -> None:
    """Link what pip would install for these requirements from this environment to that of ``site``.

    What is installed in an editable way is left out: such hooks work in the folder they were put into alone.
    """
    done, waiting = defaultdict(set), [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        found = next(iter(Distribution.discover(name=wanted.name, path=[str(site), *sys.path])))
        # Read once: each look at it reads and parses the file again.
        metadata = found.metadata
        if metadata["Name"] not in done:
            for name in {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (site / name).exists():
                    (site / name).symlink_to(found.locate_file(name))
        for extra in {"", *wanted.extras} - done[metadata["Name"]]:
            done[metadata["Name"]].add(extra)
            inner = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
            waiting += [each for each in inner if each.marker is None or each.marker.evaluate({"extra": extra})]


def install(wheel: Path, extras: str, folder: Path) -> Path:
    """Install the wheel with nothing but what it and ``extras`` ask for; return the folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    site, scripts = Path(paths["purelib"]), Path(paths["scripts"])
    pip = [sys.executable, "-m", "pip", f"--python={scripts / 'python'}"]
    options = ["install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, *options, str(wheel)], check=True, cwd=folder)
    link([f"fedcomp{extras}"], site)
    for name in ("flwr", "ray"):
        for entry in distribution(name).entry_points.select(group="console_scripts"):
            program = scripts / entry.name
            start = f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
            program.write_text(f"#!{scripts / 'python'}\n{start}", encoding="utf-8")
            program.chmod(0o755)
    return scripts


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pip install fedcomp``."""
    return install(wheel, "", tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pip install 'fedcomp[experiments]'``."""
    return install(wheel, "[experiments]", tmp_path_factory.mktemp("experiments"))


def fresh(programs: Path, *command: str, cwd: Path, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, which knows nothing of this checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["PATH"] = os.pathsep.join([str(programs), env.get("PATH", os.defpath)])
    return subprocess.run(
        [str(programs / command[0]), *command[1:]],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@pytest.mark.slow
def test_the_source_archive_holds_what_git_knows(archives: Path) -> None:
    (found,) = archives.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or name.startswith("fedcomp.egg-info/")}
    assert names - made == {name for name in listed.split("\0") if (ROOT / name).is_file()}


@pytest.mark.slow
def test_the_page_on_an_index_has_no_link_into_a_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = archive.read(name).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) > 10
    assert [link for link in links if "://" not in link and not link.startswith("#")] == []


@pytest.mark.slow
def test_the_wheel_holds_one_package_and_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {"fedcomp"}
    folders = ("strategies", "clients", "coding", "experiments")
    expected = {f"fedcomp/{p.relative_to(ROOT)}" for folder in folders for p in (ROOT / folder).rglob("*.py")}
    expected |= {str(p.relative_to(ROOT)) for p in (ROOT / "fedcomp").rglob("*.py")}
    assert expected <= names
    templates = {f"fedcomp/{p.relative_to(ROOT)}" for p in (ROOT / "experiments" / "templates").iterdir()}
    assert {"fedcomp/py.typed", "fedcomp/experiments/app/pyproject.toml", *templates} <= names
    # The one extension: with a compiler it is there.
    assert {name.partition(".")[0] for name in names if name.endswith((".so", ".pyd"))} <= {"fedcomp/kernels/_contexts"}


PAIR = """
import sys, tomllib
from pathlib import Path
import fedcomp as fc
from flwr.app import Context, RecordDict

template = Path(sys.argv[1])
sys.path.insert(0, str(template))
from template import client_app, server_app

config = tomllib.loads((template / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]["config"]
with fc.InProcessGrid(client_app.app, 3, run_config=config) as inner:
    grid = fc.MeteredGrid(inner)
    server_app.app(grid, Context(inner.run.run_id, 0, {}, RecordDict(), {**config, "num-server-rounds": 2}))
print(fc.__file__, fc.__version__, grid.ledger.summary()["messages"])
"""


@pytest.mark.slow
def test_the_pair_works_with_nothing_but_what_the_wheel_asks_for(core: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    template = shutil.copytree(TEMPLATE, tmp_path / "template")
    done = fresh(core, "python", "-c", PAIR, str(template), cwd=tmp_path / "empty")
    assert done.returncode == 0, done.stderr
    file, version, messages = done.stdout.split("\n")[-2].split()
    assert Path(file).is_relative_to(core.parent)
    # Two rounds, each with three messages and three replies for training and for evaluation.
    assert (version, int(messages)) == (fedcomp.__version__, 24)
    assert fresh(core, "fedcomp", "--help", cwd=tmp_path).returncode == 0
    lacking = fresh(core, "fedcomp", "run", cwd=tmp_path)
    assert lacking.returncode == 2
    assert re.search(
        r"needs torch, which is not installed: install fedcomp with its extra \[torch\]", lacking.stderr
    ), lacking.stderr


@pytest.mark.long
def test_an_experiment_runs_without_a_checkout(programs: Path, tmp_path: Path) -> None:
    done = fresh(programs, "fedcomp", "run", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    (report,) = (tmp_path / "runs").glob("*/report.html")
    assert "<svg" in report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_commands_of_an_installation(programs: Path, tmp_path: Path) -> None:
    usage = fresh(programs, "fedcomp", "--help", cwd=tmp_path)
    assert usage.returncode == 0
    for words in (("run", "--list"), ("bench", "coding", "--help"), ("link", "--help")):
        done = fresh(programs, "fedcomp", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert words[0] in usage.stdout
    wrong = fresh(programs, "fedcomp", "walk", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: no command 'walk'; fedcomp has run, advise, bench, node, certificates, link and status\n",
    )


@pytest.fixture
def flwr_run(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flower_home: Path
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Return ``flwr run APP OPTIONS --stream`` of the environment; the SuperLink that it starts ends with the test."""
    for name, port in zip(("SUPERLINK_HTTP_API", "CONTROL_API"), free_ports(2), strict=True):
        monkeypatch.setenv(f"FLWR_LOCAL_{name}_PORT", str(port))
    yield lambda app, *options: fresh(programs, "flwr", "run", str(app), *options, "--stream", cwd=tmp_path)
    for pid in processes_with("FLWR_HOME", str(flower_home)):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.long
def test_the_template_runs_as_its_readme_says(
    flwr_run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    template = shutil.copytree(TEMPLATE, tmp_path / "template")
    readme = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    nodes, sent = "num-supernodes=10", "training replies 12,920 bytes, 24.3x fewer than models"
    assert f'flwr run . --stream --federation-config "{nodes}"' in readme
    assert sent in readme
    done = flwr_run(template, "--federation-config", nodes, "--run-config", "num-server-rounds=2")
    assert f"round 2: 10 asked, 10 used, {sent}" in done.stdout, done.stdout + done.stderr
    assert "'eval_acc': 0." in done.stdout, done.stdout


@pytest.mark.long
def test_an_app_with_folders_of_our_names_is_compressed(
    programs: Path, flwr_run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = flwr_run(APP)
    shown = done.stdout + done.stderr
    own = re.search(r"own (\S+) (\S+) (\S+)", done.stdout)
    assert own is not None, shown
    assert [Path(path).parent.name for path in own.groups()] == ["strategies", "clients", "coding"]
    library = re.search(r"library (\S+)", done.stdout)
    assert library is not None, shown
    assert Path(library[1]).is_relative_to(programs.parent)
    assert not any(Path(path).is_relative_to(programs.parent) for path in own.groups())
    # Two rounds of a hundred coordinates by ten thousand each.
    assert "sum 2000000.0" in done.stdout, shown
    traffic = re.search(r"bytes (\d+) (\d+)", done.stdout)
    assert traffic is not None, shown
    assert int(traffic[1]) < int(traffic[2]) / 50
