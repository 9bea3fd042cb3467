"""The files for operators say what the programs take: units and compose file are parsed, commands by our parsers."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from page_reading import ROOT

from fedcomp.experiments.program import main as fedcomp
from fedcomp.experiments.security import link
from fedcomp.experiments.security.certificates import create

EDGE = ROOT / "examples" / "edge"
UNITS = ("fedcomp-node.service", "fedcomp-link.service")


class Unit(configparser.ConfigParser):
    """A unit file; keys keep their case, and values their signs."""

    optionxform = staticmethod(str)  # type: ignore[assignment]


def unit(name: str) -> Unit:
    found = Unit(interpolation=None)
    found.read_string((EDGE / name).read_text())
    return found


def environment() -> dict[str, str]:
    lines = [line for line in (EDGE / "node.env").read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong(name, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    # Where the programs are is the only thing that is not so on this machine.
    text = re.sub(r"/opt/fedcomp/bin/fedcomp", "/bin/true", (EDGE / name).read_text())
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True, timeout=60
    )
    assert name not in done.stderr, done.stderr


@pytest.mark.parametrize("name", UNITS)
def test_units_restart_whatever_happens_but_a_wrong_configuration(name):
    found = unit(name)
    # "on-failure" would leave a node stopped that Flower ended with status 0.
    assert found["Service"]["Restart"] == "always"
    assert found["Service"]["RestartPreventExitStatus"] == str(link.CONFIGURATION)
    assert found["Service"]["KillMode"] == "control-group"
    assert found["Unit"]["StartLimitIntervalSec"] == "0"
    assert "time-sync.target" in found["Unit"]["After"]


def test_the_link_of_the_unit_starts():
    words = shlex.split(unit("fedcomp-link.service")["Service"]["ExecStart"])
    assert words[:2] == ["/opt/fedcomp/bin/fedcomp", "link"]
    args = link._parser("fedcomp link").parse_args(words[2:])
    assert link._address(args.listen) == ("0.0.0.0", 9092)
    assert not args.insecure


def test_the_environment_file_has_what_the_unit_names():
    command = unit("fedcomp-node.service")["Service"]["ExecStart"]
    assert set(re.findall(r"\$\{(\w+)\}", command)) == set(environment())
    # systemd hands quotes of an EnvironmentFile on only in some positions: there are none.
    assert not re.search(r"[\"' ]", "".join(environment().values()))


def test_compose_gives_every_node_its_own_key_and_nothing_else():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((EDGE / "compose.yaml").read_text())["services"]
    nodes = {name: service for name, service in services.items() if name.startswith("node-")}
    assert len(nodes) == 2
    for number, (name, service) in enumerate(sorted(nodes.items())):
        assert f"--partition={number}" in service["command"]
        assert f"--of={len(nodes)}" in service["command"]
        sources = [volume.split(":")[0] for volume in service["volumes"]]
        assert sources == ["./keys/ca.crt", f"./keys/nodes/{name}", f"state-{number}"]
        assert "ports" not in service
    assert not any("healthcheck" in service for service in services.values())
    assert services["link"]["ports"] == ["9092:9092"]
    words = shlex.split(services["link"]["command"])
    args = link._parser("fedcomp link").parse_args(words[2:])
    assert args.database == Path("/database/state.db")
    assert not args.insecure


def test_the_image_has_what_the_default_task_of_a_run_needs():
    assert "scikit-learn" in (EDGE / "Dockerfile").read_text()
    assert "scikit-learn" in (ROOT / "docs" / "how-to" / "raspberry-pi.md").read_text()


def test_docker_compose_reads_the_file():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("no docker compose here")
    done = subprocess.run(
        [docker, "compose", "-f", str(EDGE / "compose.yaml"), "config", "-q"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


COMMANDS = [
    line.split("#")[0].strip()
    for page in ("how-to/raspberry-pi.md", "how-to/deploy.md")
    for line in re.findall(
        r"(?:^|bin/|`)(fedcomp (?:certificates|link) [^`\n]*)",
        re.sub(r"\\\n +", "", (ROOT / "docs" / page).read_text()),
        re.M,
    )
]


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_commands_of_the_pages_are_understood(command, tmp_path, monkeypatch):
    words = shlex.split(command)[1:]
    monkeypatch.chdir(tmp_path)
    # The folders of the pages, here.
    words = [str(tmp_path / word.lstrip("/")) if "keys" in word else word for word in words]
    if words[0] == "link":
        link._parser("fedcomp link").parse_args(words[1:])
        return
    if "--nodes" not in words:
        fedcomp(["certificates", words[1], "--host", "localhost", "--nodes", "1"])
    if "100" in words:
        words[words.index("100")] = "2"
    assert fedcomp(words) == 0


def test_the_pages_have_such_commands():
    assert len(COMMANDS) >= 5


def in_the_image(path: str) -> bool:
    """Whether Docker copies a file: the last pattern counts that fits it or a folder above it."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{pattern}(?:/.*)?", path):
            kept = line.startswith("!")
    return kept


@pytest.mark.parametrize("place", ["examples/edge/keys", "site", "my.keys/deep", "experiments/site", "clients/edge/a"])
def test_no_file_of_a_deployment_gets_into_the_image_wherever_it_is(place, tmp_path):
    """Keys are made below the folder of the image, and the Dockerfile copies all that is not ignored."""
    assert "COPY . ." in (EDGE / "Dockerfile").read_text()
    folder = create(tmp_path / place, ["localhost"], 2)
    folder.kept.mkdir()
    for path in (folder.secret, folder.kept / "state.db", folder.registered):
        path.write_text("x")
    files = [path.relative_to(tmp_path) for path in (tmp_path / place).rglob("*") if path.is_file()]
    assert len(files) == 11
    assert [str(path) for path in files if in_the_image(str(path))] == []


def test_the_image_has_what_the_package_is_made_of_and_no_more():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    parts = (
        "clients",
        "coding",
        "experiments",
        "fedcomp",
        "strategies",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "setup.py",
    )
    needed = {path for path in tracked if path.split("/")[0] in parts}
    assert {path for path in tracked if in_the_image(path)} == needed
    assert not in_the_image(".venv/bin/python")
    assert not in_the_image(".git/config")
    assert not [path for path in tracked if "keys" in path.split("/")[:-1] or path.endswith(".key")]
