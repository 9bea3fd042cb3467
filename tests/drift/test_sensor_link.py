"""Between edge and sensor: bytes, steps, what is damaged, lost or of another model; a socket, and a folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcomp.clients import sensors
from fedcomp.clients.sensors import MAX_CONNECTIONS, SensorServer, StoredEdge, connect
from fedcomp.codecs import QSGD, TopK
from fedcomp.drift.distance import QuantileSketch
from fedcomp.drift.edge import Deployments, Edge, SensorEndpoint, local_link
from fedcomp.drift.messages import ModelMessage, Says, SensorError, SensorMessage
from fedcomp.drift.sensor import SensorSettings, Upload
from fedcomp.errors import ConfigError, FedcompError, LayoutError, NonFiniteUpdate
from fedcomp.flower import store
from fedcomp.rng import Key
from fedcomp.versions import Step

GOLDEN_UPLOAD = "070000000300000001464357310100000003000000"
GOLDEN_DEPLOYMENT = "0200000001000000cdcccc3e" + "ab" * 16


def model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = Key(seed, "link/test").generator()
    return {
        "w": rng.normal(size=(60, 40)).astype(np.float32),
        "b": rng.normal(size=40).astype(np.float32),
        "num_batches_tracked": np.array(seed, np.int64),
    }


def reference(deployed: Any = None) -> np.ndarray:
    return Key(1, "link/reference").generator().beta(8, 2, 300)


def pair(codec: Any = None, *, most: int = 64) -> tuple[Edge, SensorEndpoint, Any]:
    here, there = local_link()
    return Edge(Deployments(model(), codec, window=20), most=most), endpoint_of(there, codec), here


def endpoint_of(link: Any, codec: Any = None, number: int = 7) -> SensorEndpoint:
    settings = SensorSettings(window=20, consecutive=1)
    return SensorEndpoint(number, model(), link, codec=codec, settings=settings)


def running(codec: Any = None) -> tuple[Edge, SensorEndpoint, Any]:
    """Return a pair of which the sensor runs the first version."""
    edge, endpoint, here = pair(codec)
    edge.deploy(model(1), reference)
    endpoint.heartbeat()
    edge.serve(here)
    assert endpoint.update()
    return edge, endpoint, here


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return set(found) == set(wanted) and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def odd_tick(endpoint: SensorEndpoint, value: float = 1.0) -> bool:
    logits = np.zeros((20, 10))
    return endpoint.observe(logits, np.full((20, 3), value, np.float32), np.zeros(20, np.int64))


class Gone:
    def send(self, message: bytes) -> None:
        raise ConnectionResetError("gone")


def test_a_sign_of_life_has_nine_bytes_and_a_quiet_sensor_sends_none() -> None:
    edge, endpoint, here = pair()
    edge.deploy(model(), lambda deployed: np.full(300, 0.1))
    endpoint.heartbeat()
    assert endpoint.link.traffic.sent == 9
    edge.serve(here)
    endpoint.update()
    for _ in range(10):
        assert not odd_tick(endpoint)  # ten classes of equal logits: a confidence of a tenth, as in the reference
    assert endpoint.link.traffic.sent == 9
    assert here.traffic.received == 9


def test_messages_are_what_they_were_byte_for_byte() -> None:
    """Golden bytes: heads of both kinds, and that nothing but the frames follows."""
    sketch = QuantileSketch(np.linspace(0, 1, 65, dtype=np.float32))
    upload = Upload(3, np.ones((2, 3), np.float32), np.array([4, 5]), sketch, 0.5)
    data = SensorMessage.of(7, upload).to_bytes()
    assert data.hex().startswith(GOLDEN_UPLOAD)
    # Samples, labels and 65 quantiles, beside the tables of the frame.
    assert 9 + 24 + 16 + 260 < len(data) < 9 + 24 + 16 + 260 + 100
    deployment = ModelMessage(2, 1, 0.4, b"\xab" * 16, sketch, [Step(2, b"step", None)])
    data = deployment.to_bytes()
    assert data.hex().startswith(GOLDEN_DEPLOYMENT)
    assert data.endswith(b"\x04\x00\x00\x00step\x00\x00\x00\x00")
    read = ModelMessage.from_bytes(data)
    assert (read.version, read.base, read.digest, [s.frame for s in read.steps]) == (2, 1, b"\xab" * 16, [b"step"])


@pytest.mark.parametrize("codec", [None, TopK(density=0.1), QSGD(levels=16, bucket=64)], ids=["whole", "topk", "qsgd"])
def test_models_come_as_they_were_deployed_and_steps_are_shorter(codec: Any) -> None:
    edge, endpoint, here = pair(codec)
    endpoint.heartbeat()
    edge.serve(here)
    assert endpoint.update() == {}
    sizes = []
    for number in range(1, 5):
        seen: list[Any] = []

        def measure(deployed: Any, seen: list[Any] = seen) -> np.ndarray:
            seen.append(deployed)
            return reference()

        assert edge.deploy(model(number), measure) == number
        before = here.traffic.sent
        edge.push(7, here)
        sizes.append(here.traffic.sent - before)
        found = endpoint.update()
        # Calibrated on the very model that the sensor runs, which a lossy step makes another one.
        assert same(found, seen[0])
        assert codec is not None or same(found, model(number))
        assert endpoint.sensor.version == number
    if codec is not None:
        assert max(sizes[1:]) < sizes[0] / 2


def test_a_sensor_that_was_away_gets_all_steps_or_the_whole_when_that_is_shorter() -> None:
    edge, endpoint, here = running(TopK(density=0.1))
    for number in (2, 3):
        edge.deploy(model(number), reference)
    edge.push(7, here)
    assert endpoint.update()
    assert endpoint.sensor.version == 3
    for number in range(4, 30):
        edge.deploy(model(number), reference)
    assert edge.deployments.message(3).base == 0
    edge.push(7, here)
    endpoint.update()
    assert endpoint.sensor.version == 29


def test_a_former_model_with_a_new_reference_is_another_version() -> None:
    edge, endpoint, here = running(TopK(density=0.1))
    assert edge.deploy(model(1), lambda deployed: np.full(300, 0.25)) == 2
    edge.push(7, here)
    endpoint.update()
    assert endpoint.sensor.sketch is not None
    assert endpoint.sensor.sketch.constant


@pytest.mark.parametrize(
    ("arrays", "measure", "error"),
    [
        (model(2), lambda deployed: np.full(30, 0.5), ConfigError),
        (model(2), lambda deployed: np.full(300, np.nan), ConfigError),
        ({"w": model()["w"]}, reference, LayoutError),
        ({**model(2), "b": np.full(40, np.nan, np.float32)}, reference, NonFiniteUpdate),
    ],
)
def test_a_deployment_that_fails_leaves_the_former_one(arrays: Any, measure: Any, error: type[Exception]) -> None:
    edge, _, _ = pair(TopK(density=0.1))
    edge.deploy(model(1), reference)
    before = edge.deployments.message(0).to_bytes()
    with pytest.raises(error):
        edge.deploy(arrays, measure)
    assert edge.deployments.message(0).to_bytes() == before


def test_a_sensor_that_cannot_use_steps_asks_for_the_whole_model_once() -> None:
    edge, endpoint, here = pair(TopK(density=0.1))
    edge.deploy(model(1), reference)
    # The edge believes that the sensor has version 1.
    edge.versions[7] = 1
    edge.deploy(model(2), reference)
    edge.push(7, here)
    assert endpoint.update() == {}
    edge.serve(here)
    assert endpoint.update()
    assert endpoint.sensor.version == 2
    assert here.receive() is None


@pytest.mark.parametrize("codec", [None, TopK(density=0.1)], ids=["whole", "steps"])
def test_a_model_on_its_way_is_not_sent_again_for_every_sign_of_life(codec: Any) -> None:
    """A model takes minutes over a slow link, and the sensor goes on saying what it runs."""
    edge, endpoint, here = pair(codec)
    for number in (1, 2):
        edge.deploy(model(number), reference)
        for _ in range(3):
            endpoint.heartbeat()
            edge.serve(here)
        assert here.traffic.sent_messages == number
        assert endpoint.update()
        endpoint.heartbeat()
        edge.serve(here)
        assert edge.versions == {7: number}
    # Over another link it may be another process, which has nothing.
    again, there = local_link()
    fresh = SensorEndpoint(7, model(), there, codec=codec)
    fresh.heartbeat()
    edge.serve(again)
    assert fresh.update()
    assert fresh.sensor.version == 2


def test_a_late_window_of_a_former_model_brings_no_whole_one() -> None:
    edge, endpoint, here = running(TopK(density=0.1))
    link, endpoint.link = endpoint.link, Gone()  # type: ignore[assignment]
    assert not odd_tick(endpoint)
    endpoint.link = link
    edge.deploy(model(2), reference)
    edge.push(7, here)
    assert endpoint.update()
    endpoint.heartbeat()
    assert endpoint.observe(np.zeros((3, 10)), np.zeros((3, 3), np.float32), np.zeros(3, np.int64))
    edge.serve(here)
    assert [upload.version for upload in edge.windows().values()] == [1]
    assert endpoint.update() == {}
    assert here.receive() is None, "the sensor asked for the whole model"
    assert (endpoint.sensor.version, len(endpoint.sensor._figures)) == (2, 3)


def test_a_window_that_a_newer_one_replaces_is_named(caplog: pytest.LogCaptureFixture) -> None:
    edge, endpoint, here = pair()
    link, endpoint.link = endpoint.link, Gone()  # type: ignore[assignment]
    assert [odd_tick(endpoint, 1.0), odd_tick(endpoint, 2.0)] == [False, False]
    assert "is lost" in caplog.text
    caplog.clear()
    endpoint.link = link
    endpoint.observe(np.zeros((3, 10)), np.zeros((3, 3), np.float32), np.zeros(3, np.int64))
    edge.serve(here)
    assert [float(upload.samples.max()) for upload in edge.windows().values()] == [2.0]
    assert "is lost" not in caplog.text


def test_a_step_that_came_damaged_is_answered_with_the_whole_model() -> None:
    """Steps from the version that the sensor runs have just failed; the same ones would fail again."""
    edge, endpoint, here = running(TopK(density=0.1))
    edge.deploy(model(2), reference)
    data = bytearray(edge.deployments.message(1).to_bytes())
    data[-20] ^= 1
    here.send(bytes(data))
    assert endpoint.update() == {}
    edge.serve(here)
    sent = endpoint.link.receive()
    assert sent is not None
    assert ModelMessage.from_bytes(sent).base == 0


def test_a_whole_model_that_cannot_be_used_is_not_asked_for_again() -> None:
    """The two are set up for different models: asking again would never end."""
    edge, _, _ = pair()
    here, there = local_link()
    other = SensorEndpoint(7, {"w": np.zeros(5, np.float32)}, there)
    edge.deploy(model(1), reference)
    edge.push(7, here)
    assert other.update() == {}
    assert here.receive() is None
    assert other.sensor.version == 0


def test_a_model_that_cannot_be_read_is_asked_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """As of another release, whose every message is unreadable here: asking on would never end."""
    edge, endpoint, here = pair()

    def asked() -> int:
        count = 0
        while count < 5 and here.receive() is not None:
            count += 1
            here.send(b"of another release")
            assert endpoint.update() == {}
        return count

    for version in (1, 2):
        edge.deploy(model(version), reference)
        here.send(b"of another release")
        assert endpoint.update() == {}
        assert asked() == 1
        assert caplog.text.count("waits for the next one") == version
    # It goes on from the first that it can read.
    here.send(edge.deployments.message(0).to_bytes())
    assert same(endpoint.update(), model(2))


@pytest.mark.parametrize("damage", [b"", b"\x00" * 40, b"\xff" * 400])
def test_a_damaged_model_changes_nothing(damage: bytes) -> None:
    _, endpoint, here = running()
    before = endpoint.arrays
    here.send(damage)
    assert endpoint.update() == {}
    assert same(endpoint.arrays, before)


def test_one_wrong_bit_in_a_step_is_found_by_the_digest() -> None:
    edge, endpoint, here = pair()
    edge.deploy(model(1), reference)
    data = bytearray(edge.deployments.message(0).to_bytes())
    for place in (15, 300, len(data) - 40):
        wrong = bytearray(data)
        wrong[place] ^= 1
        here.send(bytes(wrong))
        assert endpoint.update() == {}
    here.send(bytes(data))
    assert same(endpoint.update(), model(1))


@pytest.mark.parametrize("seed", range(40))
def test_hostile_bytes_raise_nothing_but_link_errors(seed: int) -> None:
    rng = Key(seed, "link/fuzz").generator()
    sketch = QuantileSketch(np.linspace(0, 1, 65, dtype=np.float32))
    upload = Upload(3, np.ones((2, 3), np.float32), np.array([4, 5]), sketch, 0.5)
    edge, _, _ = pair(TopK(density=0.1))
    edge.deploy(model(1), reference)
    for data, read in (
        (SensorMessage.of(7, upload).to_bytes(), SensorMessage.from_bytes),
        (edge.deployments.message(0).to_bytes(), ModelMessage.from_bytes),
    ):
        for _ in range(20):
            wrong = bytearray(data)
            for place in rng.integers(0, min(len(wrong), 200), 3):
                wrong[place] = rng.integers(256)
            wrong = wrong[: rng.integers(len(wrong) + 1)]
            try:
                read(bytes(wrong))
            except SensorError:
                continue


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x00" * 8, "8 bytes"),
        (b"\x00" * 8 + b"\x09", "says 9"),
        (b"\x00" * 10, "follow a sign of life"),
        (b"\x00" * 8 + b"\x01", "cannot be read"),
        (SensorMessage(1, 1, Says.HEARTBEAT).to_bytes()[:8] + b"\x01" + b"FCW1", "cannot be read"),
    ],
)
def test_what_is_no_message_is_refused_in_words(data: bytes, match: str) -> None:
    with pytest.raises(SensorError, match=match):
        SensorMessage.from_bytes(data)


def test_windows_arrive_with_what_was_seen_and_the_oldest_goes_when_nobody_looks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    edge, endpoint, here = pair(most=2)
    for number in range(3):
        assert odd_tick(endpoint, float(number))  # no reference yet: every window is sent
    edge.serve(here)
    found = edge.windows()
    assert [upload.samples[0, 0] for upload in found.values()] == [1.0, 2.0]
    assert all(upload.labels.tolist() == [0] * 20 for upload in found.values())
    assert edge.dropped == 1
    assert "more than 2 windows" in caplog.text
    edge.forget([min(found)])
    assert [upload.samples[0, 0] for upload in edge.windows().values()] == [2.0]


def test_a_model_without_a_reference_makes_the_sensor_collect() -> None:
    edge, endpoint, here = pair()
    edge.deploy(model(1), lambda deployed: None)
    endpoint.heartbeat()
    edge.serve(here)
    assert same(endpoint.update(), model(1))
    assert [odd_tick(endpoint) for _ in range(3)] == [True] * 3
    edge.deploy(model(2), reference)
    edge.push(7, here)
    endpoint.update()
    odds = reference()[:20] / (1 - reference()[:20])
    assert not endpoint.observe(np.stack([np.log(odds), np.zeros(20)], axis=1), np.zeros((20, 3)))


def test_a_window_with_nan_figures_arrives_without_a_sketch() -> None:
    edge, endpoint, here = running()
    assert endpoint.observe(np.full((20, 10), np.nan), np.zeros((20, 3), np.float32))
    edge.serve(here)
    (upload,) = edge.windows().values()
    assert upload.sketch is None
    assert upload.version == 1


def test_a_window_that_could_not_be_sent_is_sent_with_the_next_tick() -> None:
    edge, endpoint, here = pair()
    link, endpoint.link = endpoint.link, Gone()  # type: ignore[assignment]
    assert not odd_tick(endpoint)
    # Through a restart, too.
    state = store.dumps(endpoint.state_dict(), "endpoint")
    again = endpoint_of(link)
    again.load_state_dict(store.loads(state, "endpoint"))
    assert again.observe(np.zeros((1, 10)), np.zeros((1, 3)), [0])
    edge.serve(here)
    assert len(edge.windows()) == 1


# The folder that processes share.


def test_a_folder_is_one_edge_for_two_processes(tmp_path: Path) -> None:
    app = StoredEdge(tmp_path, Deployments(model(), TopK(density=0.1), window=20))
    serving = StoredEdge(tmp_path)
    here, there = local_link()
    endpoint = endpoint_of(there, TopK(density=0.1))
    for number in range(1, 4):
        # A new process of the app for each: the folder is all it has.
        app = StoredEdge(tmp_path, Deployments(model(), TopK(density=0.1), window=20))
        assert app.deploy(model(number), reference) == number
        assert serving.refresh()
        assert not serving.refresh()
        endpoint.heartbeat()
        serving.serve(here)
        assert endpoint.update()
        assert endpoint.sensor.version == number
    odd = np.zeros((20, 10))
    assert endpoint.observe(odd, np.ones((20, 3)), np.zeros(20))
    serving.serve(here)
    found = app.windows()
    assert len(found) == 1
    app.forget(found)
    assert not serving.windows()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_numbers_of_forgotten_windows_do_not_come_back(tmp_path: Path) -> None:
    """A round that forgets what it used must not remove what came meanwhile."""
    edge = StoredEdge(tmp_path)
    data = SensorMessage.of(1, Upload(0, np.zeros((1, 1), np.float32), np.zeros(1, np.int64), None)).to_bytes()
    edge.keep(data)
    (first,) = edge.windows()
    edge.forget([first])
    edge.keep(data)
    assert first not in edge.windows()


def test_a_full_folder_drops_the_oldest_and_damage_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edge = StoredEdge(tmp_path, most=2)
    for number in range(4):
        window = Upload(0, np.full((1, 1), number, np.float32), np.zeros(1, np.int64), None)
        edge.keep(SensorMessage.of(1, window).to_bytes())
    assert [float(upload.samples[0, 0]) for upload in edge.windows().values()] == [2.0, 3.0]
    assert edge.dropped == 2
    sorted(tmp_path.glob("*.window"))[0].write_bytes(b"damage")
    assert len(edge.windows()) == 1
    assert "is damaged and removed" in caplog.text
    assert len(list(tmp_path.glob("*.window"))) == 1


def test_a_damaged_or_foreign_deployment_is_refused(tmp_path: Path) -> None:
    StoredEdge(tmp_path, Deployments(model(), window=20)).deploy(model(1), reference)
    with pytest.raises(FedcompError, match="same settings"):
        StoredEdge(tmp_path, Deployments(model(), window=30))
    with pytest.raises(ConfigError, match="pass deployments="):
        StoredEdge(tmp_path).deploy(model(1), reference)
    (tmp_path / "deployed").write_bytes(b"damage")
    with pytest.raises(FedcompError, match="damaged"):
        StoredEdge(tmp_path)


# The socket.


def until(condition: Any, seconds: float = 100.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def server(tmp_path: Path) -> Any:
    edge = StoredEdge(tmp_path / "folder", Deployments(model(), TopK(density=0.1), window=20), most=4)
    server = SensorServer(edge, f"unix:{tmp_path}/s")
    server.start()
    yield server, f"unix:{tmp_path}/s", tmp_path / "folder"
    server.close()
    assert not (tmp_path / "s").exists()


def endpoint_at(address: str, number: int = 7) -> SensorEndpoint:
    return endpoint_of(connect(address), TopK(density=0.1), number)


def test_sensors_on_a_socket_get_what_another_process_deploys(server: Any) -> None:
    _, address, folder = server
    endpoints = [endpoint_at(address, number) for number in (1, 2)]
    for endpoint in endpoints:
        endpoint.heartbeat()
    app = StoredEdge(folder, Deployments(model(), TopK(density=0.1), window=20))
    for number in (1, 2, 3):
        app.deploy(model(number), reference)
        for endpoint in endpoints:
            assert until(lambda endpoint=endpoint: endpoint.update())
            assert endpoint.sensor.version == number
    # Nine bytes and their length up; whole model, then steps, down.
    assert [endpoint.link.traffic.sent for endpoint in endpoints] == [13, 13]
    assert endpoints[0].link.traffic.received < 2 * sum(each.nbytes for each in model().values())
    assert odd_tick(endpoints[0])
    assert until(lambda: len(app.windows()) == 1)
    for endpoint in endpoints:
        endpoint.link.close()


def test_a_sensor_that_comes_back_goes_on_from_the_version_it_says(server: Any) -> None:
    running, address, folder = server
    endpoint = endpoint_at(address)
    StoredEdge(folder, Deployments(model(), TopK(density=0.1), window=20)).deploy(model(1), reference)
    endpoint.heartbeat()
    assert until(lambda: endpoint.update())
    endpoint.link.close()
    assert until(lambda: not running.links)
    StoredEdge(folder, Deployments(model(), TopK(density=0.1), window=20)).deploy(model(2), reference)
    endpoint.link = connect(address)
    endpoint.heartbeat()
    assert until(lambda: endpoint.update())
    assert endpoint.sensor.version == 2
    assert endpoint.link.traffic.received < 2000
    endpoint.link.close()


def test_what_cannot_be_read_is_said_once_and_leaves_the_former_model_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StoredEdge(tmp_path, Deployments(model(), window=20)).deploy(model(1), reference)
    serving = StoredEdge(tmp_path)
    running = SensorServer(serving, f"unix:{tmp_path}/s")
    good = (tmp_path / "deployed").read_bytes()
    held = store.loads(good, "deployments")
    held["state"]["broadcast"]["digest"] = 5
    (tmp_path / "deployed").write_bytes(store.dumps(held, "deployments"))
    for _ in range(3):
        running._push()
    assert serving.version == 1
    assert [record.message.count("cannot be read") for record in caplog.records] == [1]
    here, there = local_link()
    fresh = SensorEndpoint(7, model(), there)
    fresh.heartbeat()
    serving.serve(here)
    assert same(fresh.update(), model(1))
    # Another time it is said again.
    for data in (good, b"damage"):
        (tmp_path / "deployed").write_bytes(data)
        running._push()
    assert [record.message.count("cannot be read") for record in caplog.records] == [1, 1]
    running.start()
    running.close()


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00xx", b"\x09\x00\x00\x00" + b"\x00" * 8 + b"\x07", b"\x09\x00"]
)
def test_a_bad_connection_ends_with_itself(server: Any, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    _, address, _ = server
    monkeypatch.setattr(sensors, "_READ_SECONDS", 0.5)
    good = endpoint_at(address)
    good.heartbeat()
    bad = socket.socket(socket.AF_UNIX)
    bad.settimeout(100)
    bad.connect(address.removeprefix("unix:"))
    bad.sendall(data)
    assert bad.recv(1) == b""
    bad.close()
    assert odd_tick(good)
    good.link.close()


def test_after_half_a_message_nothing_more_is_sent() -> None:
    """A peer that takes nothing for a while would read the next message as the rest of this one."""
    near, far = socket.socketpair()
    near.settimeout(0.1)
    far.settimeout(100)
    link = sensors.SocketLink(near)
    with pytest.raises(OSError, match="timed out"):
        link.send(bytes(1 << 24))
    while far.recv(1 << 20):
        pass
    with pytest.raises(OSError, match="pipe"):
        link.send(b"whole")
    assert link.traffic.sent == 0
    link.close()
    far.close()


def test_too_many_connections_are_turned_away(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running, address, _ = server
    monkeypatch.setattr(sensors, "MAX_CONNECTIONS", 1)
    first = endpoint_at(address)
    first.heartbeat()
    assert until(lambda: running.links)
    second = connect(address)
    assert second.wait(100.0)
    with pytest.raises(OSError, match=r"closed|reset"):
        second.receive()
    second.close()
    first.link.close()


def test_as_many_sensors_as_are_served_may_come_at_once(tmp_path: Path) -> None:
    """As after a restart: nobody is turned away because the server has not got to it yet."""
    server = SensorServer(StoredEdge(tmp_path / "folder"), f"unix:{tmp_path}/s")
    links = [connect(f"unix:{tmp_path}/s") for _ in range(MAX_CONNECTIONS)]
    server.start()
    try:
        for number, link in enumerate(links):
            link.send(SensorMessage(number, 0, Says.HEARTBEAT).to_bytes())
        assert until(lambda: len(server.links) == MAX_CONNECTIONS)
    finally:
        for link in links:
            link.close()
        server.close()


def test_a_server_that_is_restarted_gets_its_port_again(tmp_path: Path) -> None:
    """Also where it closed the connections, which the system remembers for a while."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    for _ in range(2):
        running = SensorServer(StoredEdge(tmp_path), address)
        running.start()
        sensor = endpoint_at(address)
        sensor.heartbeat()
        assert until(lambda running=running: running.links)
        with pytest.raises(ConfigError, match="cannot listen"):
            SensorServer(StoredEdge(tmp_path), address)
        running.close()
        assert sensor.link.wait(100.0)
        with pytest.raises(OSError, match="closed"):
            sensor.link.receive()
        sensor.link.close()


@pytest.mark.parametrize("address", ["tcp://nowhere", "udp://127.0.0.1:1", "unix:/no/such/folder/s"])
def test_addresses_that_are_none_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        SensorServer(StoredEdge(tmp_path), address)


@pytest.mark.slow
def test_the_command_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    command = [sys.executable, "-m", "fedcomp.clients.sensors", "--listen", address, "--folder", str(tmp_path / "f")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    assert process.stdout is not None
    assert process.stdout.readline() == f"sensors connect to {address}\n"
    StoredEdge(tmp_path / "f", Deployments(model(), TopK(density=0.1), window=20)).deploy(model(1), reference)
    endpoint = endpoint_at(address)
    endpoint.heartbeat()
    assert until(lambda: endpoint.update())
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 0
    assert not (tmp_path / "s").exists()
    endpoint.link.close()
