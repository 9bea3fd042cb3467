"""Where a run takes place: on a Ray cluster started as the page says, with states in files. Slow: two raylets."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import TINY, FakeEngine
from page_reading import ROOT, blocks

from fedcomp.clients.edge.processes import below
from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.engines.processes import Child, free_ports
from fedcomp.experiments.run import RunnerSetup, main
from fedcomp.experiments.spec import RoundRecord, RunSpec
from fedcomp.flower.offline import OFFLINE_ENVIRONMENT

pytestmark = pytest.mark.engines

PAGE = ROOT / "docs" / "reference" / "engines.md"


def written(start: str) -> list[str]:
    """Return the words of the only command of the page that begins like this."""
    (found,) = [line for b in blocks(PAGE) for line in b.text.splitlines() if line.startswith(start) and "6379" in line]
    return shlex.split(found, comments=True)


def test_an_address_is_for_ray_alone_and_has_to_be_one() -> None:
    with pytest.raises(ConfigError, match="engine=ray; this run is on engine=inprocess"):
        engines.run(RunSpec("topk"), ray_address="127.0.0.1:6379")
    for wrong in ("auto", "127.0.0.1", ":6379", "127.0.0.1:ray"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            engines.run(RunSpec("topk", engine="ray"), ray_address=wrong)


def test_the_command_line_hands_the_address_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Noting(FakeEngine):
        asked: str | None = None

        def __call__(self, spec, *, ray_address=None, **options):
            self.asked = ray_address
            return super().__call__(spec, **options)

    engine = Noting({("sparse", 1): KeyboardInterrupt()})
    setup = RunnerSetup({"tiny": TINY}, engine, check=lambda spec: None)
    words = ["tiny", "--engine", "ray", "--ray-address", "10.0.0.1:6379", "--out", str(tmp_path)]
    assert main(words, setup=setup) == 130
    assert engine.asked == "10.0.0.1:6379"
    # Whoever goes on needs it again: it is no part of what the folder keeps.
    assert "--ray-address=10.0.0.1:6379" in capsys.readouterr().err


@pytest.fixture
def cluster() -> Iterator[tuple[str, list[Child]]]:
    """The address of two raylets with a processor each, and the processes."""
    (port,) = free_ports(1)
    env = {**os.environ, **OFFLINE_ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0"}
    own = ["--block", "--num-cpus=1"]
    head = [*(word.replace("6379", str(port)) for word in written("ray start --head")), *own]
    node = [*(word.replace("10.0.0.1:6379", f"127.0.0.1:{port}") for word in written("ray start --address")), *own]
    children: list[Child] = []
    # Not pytest's own folder: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="fcray-") as scratch:
        head += [f"--temp-dir={scratch}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        try:
            for name, words in (("head", head), ("node", node)):
                command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
                child = Child(name, command, env=env, log=Path(scratch, f"{name}.log"), cwd=Path(scratch))
                children.append(child)
                child.wait_until(lambda child=child: "Ray runtime started" in child.log.read_text(), "waits", 120.0)
            yield f"127.0.0.1:{port}", children
        finally:
            for child in reversed(children):
                child.stop()


def test_with_states_in_files_no_checkpoint_is_made(tmp_path: Path) -> None:
    class Noting(FakeEngine):
        asked: tuple[Path | None, Path | None] = (None, None)

        def __call__(self, spec, *, checkpoint, client_states=None, **options):
            self.asked = (checkpoint, client_states)
            return super().__call__(spec, checkpoint=checkpoint, **options)

    engine = Noting()
    setup = RunnerSetup({"tiny": TINY}, engine, check=lambda spec: None)
    assert main(["tiny", "--client-states", "scratch", "--out", str(tmp_path)], setup=setup) in (0, 1)
    assert engine.asked == (None, Path("scratch"))
    assert main(["tiny", "--out", str(tmp_path)], setup=setup) in (0, 1)
    assert engine.asked[0] is not None
    assert engine.asked[1] is None
    # Where the nodes keep their states there is one; Ray's clients forget theirs.
    for name, made in (("superlink", True), ("ray", False)):
        assert main(["tiny", "--engine", name, "--out", str(tmp_path)], setup=setup) in (0, 1)
        assert (engine.asked[0] is not None) is made


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.mark.long
def test_two_raylets_share_the_clients_of_a_run(cluster: tuple[str, list[Child]]) -> None:
    address, children = cluster
    actors: list[int] = []

    def look(record: RoundRecord) -> None:
        if record.round == 1:
            actors.extend(sum("ClientAppActor" in command(pid) for pid in below(child.pid)) for child in children)

    settings = {"task.hidden": "32", "feedback": True, "codec.density": 0.05}
    spec = RunSpec("topk", engine="ray", rounds=2, clients=4, settings=settings)
    result = engines.run(spec, ray_address=address, on_round=look)
    assert actors == [1, 1]
    alone = engines.run(RunSpec("topk", rounds=2, clients=4, settings=settings))
    assert {k: a.tobytes() for k, a in result.arrays.items()} == {k: a.tobytes() for k, a in alone.arrays.items()}
    assert result.uplink_payload_bytes == alone.uplink_payload_bytes
    for child in children:
        child.require_running()
