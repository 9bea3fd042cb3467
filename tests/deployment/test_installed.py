"""The wheel in an environment of its own: what it installs, its commands, and an app whose folders have our names."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from page_reading import ROOT

from fedcomp.experiments.engines.processes import free_ports, processes_with

pytestmark = pytest.mark.engines

APP = Path(__file__).parent / "clashing_app"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the files that git knows: a build leaves its own folders beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(folder / "source")], check=True, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel; return the folder of programs. The dependencies are those of this environment, without what
    is installed editable here: such hooks work in the folder they were put into alone."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    site, scripts = Path(paths["purelib"]), Path(paths["scripts"])
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    install = [
        sys.executable,
        "-m",
        "pip",
        f"--python={scripts / 'python'}",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, str(wheel)], check=True, cwd=folder)
    for name in ("flwr", "ray"):
        for entry in distribution(name).entry_points.select(group="console_scripts"):
            program = scripts / entry.name
            start = f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
            program.write_text(f"#!{scripts / 'python'}\n{start}", encoding="utf-8")
            program.chmod(0o755)
    return scripts


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
def test_the_wheel_holds_one_package_and_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"fedcomp"}
    folders = ("strategies", "clients", "coding", "experiments")
    expected = {f"fedcomp/{p.relative_to(ROOT)}" for folder in folders for p in (ROOT / folder).rglob("*.py")}
    expected |= {str(p.relative_to(ROOT)) for p in (ROOT / "fedcomp").rglob("*.py")}
    assert expected <= names
    assert {"fedcomp/py.typed", "fedcomp/experiments/app/pyproject.toml"} <= names


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
        "error: no command 'walk'; fedcomp has run, bench, node, certificates, link and status\n",
    )


@pytest.mark.long
def test_an_app_with_folders_of_our_names_is_compressed(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flower_home: Path
) -> None:
    for name, port in zip(("SUPERLINK_HTTP_API", "CONTROL_API"), free_ports(2), strict=True):
        monkeypatch.setenv(f"FLWR_LOCAL_{name}_PORT", str(port))
    try:
        done = fresh(programs, "flwr", "run", str(APP), "--stream", cwd=tmp_path)
    finally:
        for pid in processes_with("FLWR_HOME", str(flower_home)):
            os.kill(pid, signal.SIGTERM)
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
