"""``fedcomp advise``: it predicts what runs send, recommends what the page says, and executes nothing of a file."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian
from page_reading import ROOT

import fedcomp as fc
from fedcomp.experiments import advise as advising
from fedcomp.experiments import program
from fedcomp.experiments.advise import advise, load
from fedcomp.experiments.advised_app import first_model
from fedcomp.experiments.advised_lines import ACCURACY, LINES, Line, Situation, amounts
from fedcomp.experiments.bench import round as bench
from fedcomp.gossip.choco import CHOCO
from fedcomp.gossip.sparse_push import SparsePush
from fedcomp.rng import Key
from fedcomp.tasks import get_task
from fedcomp.tasks.local import LocalObjective
from fedcomp.timing import parse_link

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("breast-cancer", {}, {"epochs": 1}),
    "mlp": ("digits", {"hidden": "64"}, {"epochs": 1}),
    "cnn": ("digits", {"model": "cnn"}, {"epochs": 1}),
    "lstm": ("tiny-shakespeare", {"model": "lstm"}, {"epochs": None, "max_steps": 5}),
    "transformer": ("tiny-shakespeare", {"model": "transformer"}, {"epochs": None, "max_steps": 5}),
}
LONG = pytest.mark.long
BY_NAME = {line.name: line for line in LINES}


def arrays_of(task: Any) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in task.model(0).state_dict().items()}


def traffic(task: Any, strategy: Any, clients: int, rounds: int, **limits: Any) -> tuple[int, int]:
    """Return the bytes up and down of a run that trains, messages between clients in both."""

    def problem(msg: Message, context: Any, setup: Any) -> LocalObjective:
        return LocalObjective(task, int(context.node_config["partition-id"]), clients, dtype=setup.dtype)

    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Any) -> Message:
        model, number = task.blank(), int(msg.content["config"]["server-round"])
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        partition = int(context.node_config["partition-id"])
        data = task.client(partition, clients)
        key = Key(0, "batches", round=number, partition=partition)
        found = task.train(model, data, lr=0.1, batch_size=16, key=key, **limits)
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(found)}
        return Message(RecordDict(content), reply_to=msg)

    with fc.InProcessGrid(fc.client(app, fc.gossip_node(problem)), clients) as inner:
        grid = fc.MeteredGrid(inner)
        strategy.start(grid, ArrayRecord(task.model(0).state_dict()), num_rounds=rounds)
    peer = grid.ledger.total(link="peer")
    up, down = (grid.ledger.total(direction=direction, link="hub") for direction in ("up", "down"))
    return up + peer, down + peer


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=LONG if n in ("cnn", "lstm", "transformer") else ()) for n in MODELS]
)
def test_bytes_are_those_of_a_real_run(name: str) -> None:
    task_name, options, limits = MODELS[name]
    task = get_task(task_name, **options)
    found = {c.name: c for c in advise(arrays_of(task), clients=4, rounds=6).candidates}
    assert set(found) == {line.name for line in LINES if line.purpose == "bytes"}
    for line in ("FedAvg", "A", "B", "C", "D", "E", "H", "I"):
        strategy = BY_NAME[line].make(FedAvg(fraction_evaluate=0.0), None)
        predicted = found[line].up_run, found[line].down_run
        near = 0.15 if name == "transformer" else 0.1
        assert predicted == pytest.approx(traffic(task, strategy, 4, 6, **limits), rel=near), line


@pytest.mark.slow
def test_bytes_of_sampled_clients_are_those_of_a_real_run() -> None:
    task = get_task("digits", hidden="64")
    found = {c.name: c for c in advise(arrays_of(task), clients=6, fraction=0.5, rounds=20).candidates}
    for line in ("A", "B"):
        strategy = BY_NAME[line].make(FedAvg(fraction_train=0.5, fraction_evaluate=0.0), None)
        predicted = found[line].up_run, found[line].down_run
        assert predicted == pytest.approx(traffic(task, strategy, 6, 20, epochs=1), rel=0.1), line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked", "clients"),
    [
        ("coded sum", {"privacy": "hide"}, 6),
        ("coded relay", {"vanish": True}, 4),
        ("DpFedAvg", {"privacy": "client"}, 4),
        ("G", {"median": True}, 4),
        ("CHOCO", {"server": False}, 6),
        ("SparsePush", {"server": False}, 6),
    ],
)
def test_bytes_of_other_systems_are_those_of_a_real_run(name: str, asked: dict[str, Any], clients: int) -> None:
    task = get_task("digits", hidden="16")
    advice = advise(arrays_of(task), clients=clients, rounds=4, **asked)
    (found,) = (c for c in advice.candidates if c.name == name)
    inner = (FedMedian if name == "G" else FedAvg)(fraction_evaluate=0.0)
    strategy = BY_NAME[name].make(inner, amounts(Situation(clients, 1.0, 4, **asked)))
    assert (found.up_run, found.down_run) == pytest.approx(traffic(task, strategy, clients, 4, epochs=1), rel=0.1)


def memory(line: Line, size: int, clients: int = 2, tensors: int = 50, **asked: Any) -> tuple[float, float]:
    """Return what a client and the server need at their peaks for a model of equal tensors, in models."""
    model = {f"w{i}": np.zeros(size // tensors, np.float32) for i in range(tensors)}
    figures = advising._trial(line, Situation(clients, 1.0, 4, **asked), model, parse_link("1mbit"))
    return tuple(figures[-2:] / (4 * size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "measured", "state", "dropped"),
    [
        ("FedAvg", "FedAvg, plain", 0, 0),
        ("D", "pair", 1, 0),
        pytest.param("H", "pair, Identity", 0, 1, marks=LONG),
        pytest.param("A", "pair, EDEN 1 bit", 0, 1, marks=LONG),
        pytest.param("B", "pair, EDEN 1 bit both ways", 1, 1, marks=LONG),
        pytest.param("I", "pair, Auto 0.1 bit", 1, 1, marks=LONG),
    ],
)
def test_memory_is_what_the_bench_measures_without_a_grid(line: str, measured: str, state: int, dropped: int) -> None:
    """The bench's app keeps its trained model; here the pair may have dropped it at the peak."""
    size = 200_000
    (row,) = bench.rounds(measured, size, 2, 6, None)
    down, up = (1000 * row[name] / (4 * size) for name in ("kB down", "kB up"))
    client = row["client, models"] + down + state + 1 - dropped
    server = row["server, models"] + 1 + 2 * up
    assert memory(BY_NAME[line], size) == pytest.approx((client, server), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["A", "H"])
def test_the_server_of_the_pair_needs_a_reply_more_for_a_client_more(line: str) -> None:
    """Two of eight participants are tried, and all eight in the other trial."""
    each = (BY_NAME[line], replace(BY_NAME[line], purpose="client"))
    two, eight = (memory(tried, 100_000, clients=8)[1] for tried in each)
    assert two == pytest.approx(eight, rel=0.1)


@pytest.mark.slow
def test_a_server_needs_as_much_for_two_of_eight_clients_as_for_two_of_two() -> None:
    """What the clients that sit out keep is no memory of the server, and takes nothing off it."""
    model = {"w": np.zeros((100, 100), np.float32)}
    link = parse_link("1mbit")
    two, eight = (advising._trial(BY_NAME["C"], Situation(n, 2 / n, 4), model, link)[-1] for n in (2, 8))
    assert eight == pytest.approx(two, rel=0.1)
    assert eight > model["w"].nbytes


@pytest.mark.slow
def test_the_server_of_a_median_needs_a_model_more_for_a_client_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six participants are tried at most; what more of them need follows from three and six."""
    monkeypatch.setattr(advising, "NODES", 6)
    four, six, twelve = (memory(BY_NAME["F"], 20_000, n, tensors=10, median=True)[1] for n in (4, 6, 12))
    assert six - four > 2.0
    assert twelve - six == pytest.approx(3 * (six - four), rel=0.2)


@pytest.mark.long
@pytest.mark.slow
def test_a_large_model_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    model = {f"w{i}": rng.standard_normal((200, 150)).astype(np.float32) for i in range(2)}
    model["bias"] = rng.standard_normal(200).astype(np.float32)
    direct = {c.name: c for c in advise(model, rounds=4).candidates}
    monkeypatch.setattr(advising, "DIRECT", 30_000)
    for found in advise(model, rounds=4).candidates:
        whole = direct[found.name]
        assert (found.up, found.down) == pytest.approx((whole.up, whole.down), rel=0.1)
        assert found.client_memory >= 0.95 * whole.client_memory
        assert found.server_memory >= 0.95 * whole.server_memory


@pytest.mark.long
@pytest.mark.slow
def test_a_model_of_a_trillion_values_needs_no_memory() -> None:
    advice = advise(parameters=10**12, rounds=4)
    plain = next(c for c in advice.candidates if c.name == "FedAvg")
    assert 3.6e12 < plain.up < 4.4e12
    assert "extrapolated" in str(advice)


def test_what_lines_lose_is_what_the_page_says() -> None:
    page = (ROOT / "docs" / "choose" / "use-this-when.md").read_text("utf-8")
    for sampled, rows in ACCURACY.items():
        part = page.partition("The same with 10 of 30 clients")[2 if sampled else 0]
        for name, by_task in rows.items():
            (cells,) = re.findall(rf"^\| {re.escape(name)}[^|\n]*\| \d+ \| \d+ \|(.* / .*)\|$", part, re.MULTILINE)
            assert [tuple(map(float, cell.split(" / "))) for cell in cells.split("|")] == list(by_task)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_every_line_can_be_pasted(line: Any) -> None:
    names = {"fc": fc, "FedAvg": FedAvg, "FedMedian": FedMedian, "CHOCO": CHOCO, "SparsePush": SparsePush}
    for at in (Situation(20, 1.0, 30), Situation(100, 0.2, 30)):
        pasted, tried = eval(line.code(at), names), line.make(FedAvg(fraction_evaluate=0.0), amounts(at))
        assert type(pasted) is type(tried)
        if line.name not in ("FedAvg", "DpFedAvg", "RecordDp"):
            # A trial of the others has no budget and draws nobody, so that it does not end early.
            assert pasted.identity() == tried.identity()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ({"link": "1mbit"}, "B"),
        ({"link": "1mbit", "rounds": 5}, "A"),
        ({"link": "1mbit", "may_lose": 0.0}, "FedAvg"),
        ({"link": "1mbit", "fraction": 0.5, "clients": 4, "rounds": 5}, "A"),
        ({"privacy": "record"}, "RecordDp"),
        ({"server": False, "clients": 4}, "CHOCO"),
    ],
)
def test_the_first_row_is_the_recommendation(asked: dict[str, Any], first: str) -> None:
    advice = advise(parameters=5000, **asked)
    assert advice.candidates[0].name == first
    assert not advice.candidates[0].fits
    text = str(advice)
    assert text.startswith("Take ")
    assert advice.candidates[0].code in text


@pytest.mark.slow
def test_a_tiny_model_is_sent_as_it_is() -> None:
    assert advise(parameters=30).candidates[0].name == "FedAvg"


@pytest.mark.slow
def test_lines_with_memory_come_with_the_sentence_about_the_server_step() -> None:
    assert "a longer server step is worth a try" in str(advise(parameters=5000, rounds=100, may_lose=5.0))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "needs a model or a number of parameters"),
        ({"parameters": 10, "model": {"w": np.ones(3, np.float32)}}, "give one of the two"),
        ({"parameters": 0}, "parameters=0 is not valid"),
        ({"parameters": 10**13}, "is not valid"),
        ({"parameters": 10, "privacy": "all"}, "privacy='all' is not valid"),
        ({"parameters": 10, "fraction": 0.0}, "fraction"),
        ({"parameters": 10, "link": "fast"}, "not a bandwidth"),
        ({"parameters": 10, "privacy": "client", "server": False}, "no line is for"),
        ({"parameters": 10, "privacy": "hide", "clients": 4}, "needs more than 4 clients"),
        ({"model": {"n": np.arange(3)}}, "no floating-point values"),
        ({"model": {"n": np.array(["a"])}}, "is an array of"),
    ],
)
def test_what_cannot_be_answered_is_a_config_error(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(fc.ConfigError, match=re.escape(text)):
        advise(**asked)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Payload(tmp_path / "ran")}, tmp_path / "model.pt")
    np.savez(tmp_path / "model.npz", w=np.array([Payload(tmp_path / "ran")], dtype=object))
    for name in ("model.pt", "model.npz"):
        with pytest.raises(fc.ConfigError):
            load(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def safetensors(path: Path, header: Any, body: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def test_three_kinds_of_files_are_read(tmp_path: Path) -> None:
    weight, bias = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
    torch.save({"state_dict": {"w": torch.tensor(weight), "b": torch.tensor(bias).bfloat16()}}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", w=weight, b=bias)
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]},
    }
    safetensors(tmp_path / "a.safetensors", header, weight.tobytes() + bytes.fromhex("803f803f"))
    for name in ("a.pt", "a.npz", "a.safetensors"):
        found, _ = load(tmp_path / name)
        assert list(found) == ["w", "b"]
        np.testing.assert_array_equal(found["w"], weight)
        np.testing.assert_array_equal(found["b"], bias)


@pytest.mark.slow
def test_bfloat16_is_said_to_be_counted_as_float32(tmp_path: Path) -> None:
    weight = torch.zeros(40, 30)
    for name, state in {"a.pt": {"w": weight.bfloat16(), "b": torch.ones(3)}, "b.pt": {"w": weight}}.items():
        torch.save(state, tmp_path / name)
    found = [str(advise(tmp_path / name, rounds=4, privacy="record")) for name in ("a.pt", "b.pt")]
    assert ["1 tensors of bfloat16 are counted as float32" in text for text in found] == [True, False]


@pytest.mark.slow
def test_gossip_of_a_model_of_vectors_is_compressed() -> None:
    """Tensors of one dimension travel whole by default: the line that is given says otherwise."""
    flat = {"w": np.zeros(6000, np.float32)}
    vector, matrix = (
        advise(each, rounds=4, clients=4, server=False) for each in (flat, {"w": flat["w"].reshape(60, 100)})
    )
    for one, other in zip(vector.candidates, matrix.candidates, strict=True):
        assert one.name == other.name
        assert one.up == pytest.approx(other.up, rel=0.1)
        assert ("dense_below=0" in one.code, "dense_below" in other.code) == (one.name != "FedAvg", False)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pt", b"not a file of torch"),
        ("a.npz", b"PK\x03\x04broken"),
        ("a.npz", b""),
        ("a.safetensors", b""),
        ("a.safetensors", b"\xff" * 40),
        ("a.safetensors", struct.pack("<Q", 2) + b"[]"),
        ("a.safetensors", struct.pack("<Q", 2) + b"{}"),
        ("a.bin", b"x"),
    ],
)
def test_a_damaged_file_is_a_config_error(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(fc.ConfigError):
        load(tmp_path / name)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]},
        {"dtype": "F32", "shape": [9], "data_offsets": [0, 8]},
        {"dtype": "F8", "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2]},
    ],
)
def test_a_wrong_header_is_a_config_error(entry: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(fc.ConfigError):
        load(safetensors(tmp_path / "a.safetensors", {"w": entry}, bytes(8)))


def app(folder: Path, server: str) -> Path:
    """Write a Flower app whose ServerApp's module is ``server``."""
    (folder / "pyproject.toml").write_text(
        '[tool.flwr.app.components]\nserverapp = "server:made.app"\n[tool.flwr.app.config]\nwidth = 7\nsgd.lr = 0.5\n'
    )
    begin = "import types, numpy as np, fedcomp as fc\nfrom flwr.app import *\nfrom flwr.serverapp import ServerApp\n"
    begin += (
        "from flwr.serverapp.strategy import FedAvg\nmade = types.SimpleNamespace(app=ServerApp())\n@made.app.main()\n"
    )
    lines = [f"    {line}\n" for line in ("config = context.run_config", *server.split("\n"))]
    (folder / "server.py").write_text(f"{begin}def main(grid, context):\n{''.join(lines)}")
    return folder


STARTS = "strategy.start(grid, ArrayRecord({'file': Array(np.ones((config['width'], 3), np.float32))}))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "FedAvg()",
        pytest.param("fc.Compressed(FedAvg(), fc.TopK(0.1), fc.TopK(0.1))", marks=LONG),
        pytest.param(
            "fc.CodedFedAvg(FedAvg(fraction_evaluate=0.0), code='mds', symbols=2, transport='peers')", marks=LONG
        ),
    ],
)
def test_the_model_of_an_app_is_the_first_that_it_sends(strategy: str, tmp_path: Path) -> None:
    """Also where the first messages introduce clients. What the app does afterwards is not run."""
    asks = f"strategy = {strategy}\ntry:\n    {STARTS}\nexcept Exception:\n    pass\nopen(__file__ + '.ran', 'w')"
    found = first_model(app(tmp_path, asks), clients=4)
    assert {name: array.shape for name, array in found.items()} == {"file": (7, 3)}
    assert not (tmp_path / "server.py.ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "why"),
    [
        ("print(config['sgd.lr'])", "it ended before it sent a model. Give a state dict"),
        pytest.param("raise OSError('no data\\nhere')", "it raised OSError: no data here", marks=LONG),
        pytest.param(
            f"strategy = FedAvg(min_available_nodes=5)\n{STARTS}", "waits for more than 4 clients", marks=LONG
        ),
    ],
)
def test_an_app_that_sends_no_model_is_an_error_that_says_why(server: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(fc.ConfigError, match=why):
        advise(app(tmp_path, server), clients=4)


@pytest.mark.slow
def test_a_folder_without_an_app_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(fc.ConfigError, match=r"it holds no pyproject\.toml"):
        advise(tmp_path)
    for text, why in (("[project]\nname = 'x'\n", r"names no .*serverapp"), ("x = [", r"cannot be read: .*Invalid")):
        (tmp_path / "pyproject.toml").write_text(text)
        with pytest.raises(fc.ConfigError, match=why):
            advise(tmp_path)


@pytest.mark.slow
def test_the_advice_for_an_app_is_that_for_its_model() -> None:
    zeros = {"weights": np.zeros((784, 10), np.float32), "biases": np.zeros(10, np.float32)}
    models = (ROOT / "examples" / "template", zeros)
    found, expected = (advise(model, rounds=3, privacy="record") for model in models)
    # Memory is traced in each, and Python's own is not the same twice.
    same = [[replace(each, client_memory=0, server_memory=0) for each in one.candidates] for one in (found, expected)]
    assert same[0] == same[1]
    assert found.notes == (*expected.notes, found.notes[-1])
    assert "The model of 7,850 values is the first that the app sent" in found.notes[-1]


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "--parameters", "2000", "--rounds", "4", "--link", "1mbit", "--privacy", "record"]
    assert program.main(words) == 0
    assert capsys.readouterr().out.startswith("Take ")
    assert program.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"][0]["up"] > 0


def test_the_command_says_in_a_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["advise", "--parameters", "0"]) == 2
    assert program.main(["advise", str(tmp_path / "none.npz")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("error: ") for line in errors)
