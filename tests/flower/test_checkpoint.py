"""Interrupted and resumed equals uninterrupted, bit for bit; damage is noticed."""

from __future__ import annotations

import contextlib
import io
import json
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    Result,
)
from toy import client_app, fedavg, model

from fedcomp.clients.compressed import compression
from fedcomp.codecs import TopK
from fedcomp.errors import FedcompError
from fedcomp.flower import checkpoint, store
from fedcomp.flower.checkpoint import CheckpointError
from fedcomp.flower.faults import RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.nodes import GridError
from fedcomp.flower.payload import STYPE
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed

NODES, ROUNDS = 5, 6


class Interrupted(Exception):
    pass


def make_grid() -> MeteredGrid:
    plan = RandomFaults(
        Key(5, "faults"), dict.fromkeys(("lost_reply", "late", "offline", "duplicate"), 0.12), message_types=("train",)
    )
    return MeteredGrid(InProcessGrid(client_app(), NODES, seed=4, fault=plan, compute_seconds=0.5))


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"sum": float(sum(a.numpy().astype(np.float64).sum() for a in arrays.values()))})


def fingerprint(result: Result, grid: MeteredGrid) -> tuple:
    bits = b"".join(a.numpy().tobytes() for a in result.arrays.values())
    states = [grid.inner.context(p).state["toy.sum"]["sum"].numpy().tobytes() for p in range(NODES)]  # type: ignore[attr-defined]
    histories = [dict(getattr(result, name)) for name in checkpoint._HISTORY]
    return bits, states, histories, grid.ledger.to_json(), grid.inner.clock, grid.inner.exchange  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("make", [fedavg, FedAdam, FedYogi, FedAdagrad, FedAvgM], ids=lambda m: m.__name__)
@pytest.mark.parametrize("stop", [1, 4])
def test_an_interrupted_run_continues_exactly(make, stop: int, tmp_path: Path) -> None:
    options = {"server_momentum": 0.9} if make is FedAvgM else {}
    path = tmp_path / "deep" / "run.ckpt"

    grid = make_grid()
    expected = fingerprint(fit(make(**options), grid, model(), ROUNDS, timeout=9, evaluate_fn=evaluate), grid)

    strategy, grid, result = make(**options), make_grid(), Result()

    def keep(server_round, arrays, outcome) -> None:
        checkpoint.save(
            path, server_round=server_round, arrays=arrays, strategy=strategy, grid=grid, result=result, extra={"a": 1}
        )
        if server_round == stop:
            raise Interrupted

    with pytest.raises(Interrupted):
        fit(strategy, grid, model(), ROUNDS, timeout=9, evaluate_fn=evaluate, on_round=keep, result=result)
    grid.inner.close()  # type: ignore[attr-defined]

    stored = checkpoint.load(path)
    assert (stored.server_round, stored.extra) == (stop, {"a": 1})
    strategy, grid = make(**options), make_grid()
    stored.apply(strategy, grid)
    resumed = fit(
        strategy,
        grid,
        stored.arrays,
        ROUNDS,
        start_round=stored.server_round + 1,
        timeout=9,
        evaluate_fn=evaluate,
        result=stored.result,
    )
    assert fingerprint(resumed, grid) == expected


@pytest.mark.parametrize("cut", [0, 11], ids=["whole", "crashed while it was written"])
def test_a_run_that_writes_what_changed_continues_exactly(cut: int, tmp_path: Path) -> None:
    """Under faults, from the last checkpoint, or from the one before where the last was cut short."""
    grid = make_grid()
    expected = fingerprint(fit(Compressed(fedavg(), TopK(0.2)), grid, model(), ROUNDS, timeout=9), grid)

    path, strategy, grid, result = tmp_path / "run.ckpt", Compressed(fedavg(), TopK(0.2)), make_grid(), Result()
    # The file of another run may be there.
    path.write_bytes(b"old")
    file = checkpoint.CheckpointFile(path)

    def keep(server_round, arrays, outcome) -> None:
        file.save(server_round=server_round, arrays=arrays, strategy=strategy, grid=grid, result=result)
        if server_round == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        fit(strategy, grid, model(), ROUNDS, timeout=9, on_round=keep, result=result)
    grid.inner.close()  # type: ignore[attr-defined]
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])

    stored = checkpoint.load(path)
    assert stored.server_round == (3 if cut else 4)
    strategy, grid, start = Compressed(fedavg(), TopK(0.2)), make_grid(), stored.server_round + 1
    stored.apply(strategy, grid)
    resumed = fit(strategy, grid, stored.arrays, ROUNDS, start_round=start, timeout=9, result=stored.result)
    assert fingerprint(resumed, grid) == expected


def test_clients_that_were_not_asked_are_not_written_again(tmp_path: Path) -> None:
    """Nor are reports of rounds that are over; the bytes of a round do not grow with the clients or the rounds."""
    path, app = tmp_path / "run.ckpt", client_app([compression()])
    file, sizes = checkpoint.CheckpointFile(path), []
    strategy = Compressed(fedavg(fraction_train=0.1, fraction_evaluate=0.0, min_train_nodes=2), TopK(0.2))
    with InProcessGrid(app, 20, seed=4) as inner:
        grid = MeteredGrid(inner)
        everybody = Compressed(fedavg(fraction_evaluate=0.0), TopK(0.2))
        fit(everybody, grid, model(), 1)

        def keep(server_round, arrays, outcome) -> None:
            file.save(server_round=server_round, arrays=arrays, strategy=strategy, grid=grid)
            sizes.append(path.stat().st_size)

        fit(strategy, grid, model(), 8, on_round=keep)
        state = len(inner.node(0).stored())
    grown = np.diff(sizes)
    # Two states, the model and what else there is of a round; of twenty clients' states it would be far more.
    assert sizes[0] > 20 * state
    assert (grown > 2 * state).all()
    assert (grown < 6 * state).all()
    found = checkpoint.load(path)
    assert found.server_round == 8
    fresh = Compressed(fedavg(fraction_train=0.1, fraction_evaluate=0.0, min_train_nodes=2), TopK(0.2))
    found.apply(fresh)
    assert fresh.reports == strategy.reports


def test_wrapped_strategies_are_stored_with_what_they_wrap() -> None:
    def make() -> DifferentialPrivacyServerSideAdaptiveClipping:
        return DifferentialPrivacyServerSideAdaptiveClipping(FedAdam(), noise_multiplier=0.1, num_sampled_clients=5)

    used, fresh = make(), make()
    used.clipping_norm = 0.123
    used.strategy.m_t = {"w": np.arange(3, dtype=np.float32)}
    checkpoint.restore_strategy(fresh, store.loads(store.dumps(checkpoint.capture_strategy(used), "s"), "s"))
    assert fresh.clipping_norm == 0.123
    assert np.array_equal(fresh.strategy.m_t["w"], used.strategy.m_t["w"])


def test_a_strategys_own_state_dict_has_precedence() -> None:
    class Own(type(fedavg())):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.handle = io.BytesIO()
            self.memory = np.zeros(2)

        def state_dict(self) -> dict:
            return {"memory": self.memory}

        def load_state_dict(self, state: dict) -> None:
            self.memory = state["memory"]

    used, fresh = Own(), Own()
    used.memory += 5
    checkpoint.restore_strategy(fresh, checkpoint.capture_strategy(used))
    assert fresh.memory.tolist() == [5, 5]
    del Own.state_dict
    with pytest.raises(CheckpointError, match=r"Own\.handle.*state_dict"):
        checkpoint.capture_strategy(used)


def test_misuse_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, server_round=1, arrays=model(), strategy=fedavg())
    stored = checkpoint.load(path)
    assert stored.ledger is None
    with pytest.raises(CheckpointError, match="FedAvg"):
        stored.apply(FedAdam())
    with pytest.raises(CheckpointError, match="grid"):
        stored.apply(grid=make_grid())
    checkpoint.save(path, server_round=1, arrays=model())
    with pytest.raises(CheckpointError, match="strategy"):
        checkpoint.load(path).apply(fedavg())
    with pytest.raises(CheckpointError, match="extra"):
        checkpoint.save(path, server_round=1, arrays=model(), extra={"x": object()})
    with pytest.raises(CheckpointError, match="nothing"):
        checkpoint.load(tmp_path / "nothing")
    # The failed save has left the former file and no litter.
    assert checkpoint.load(path).server_round == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run.ckpt"]


@pytest.mark.slow
def test_every_damaged_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    arrays = ArrayRecord({"w": Array(np.arange(60, dtype=np.float32))})
    ledger = TrafficLedger()
    ledger.record(1, 2, "up", "train", wire=5)
    checkpoint.save(path, server_round=3, arrays=arrays, strategy=fedavg(), ledger=ledger)
    whole = path.read_bytes()
    noticed = 0
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            stored = checkpoint.load(path)
        except CheckpointError:
            noticed += 1
            continue
        # Time stamps and the like of the zip archive carry nothing of ours.
        assert stored.server_round == 3
        assert stored.arrays == arrays
        assert stored.ledger == ledger
    assert noticed > len(whole) / 7 * 0.5
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            checkpoint.load(path)


def test_pickled_content_is_refused_and_never_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    buffer = io.BytesIO()
    np.savez(buffer, manifest=np.array([Bomb()], dtype=object))
    path = tmp_path / "run.ckpt"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
    assert not (tmp_path / "exploded").exists()
    with pytest.raises(store.StoreError, match="objects"):
        store.dumps(np.array([Bomb()], dtype=object), "x")


def test_a_newer_version_is_refused_by_name() -> None:
    data = store.dumps({"a": 1}, "x")
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(store.StoreError, match="version 9"):
        store.loads(buffer.getvalue(), "x")


def test_plain_data_survives_exactly() -> None:
    value = {
        "none": None,
        "numbers": [True, -(2**70), 0.1, float("inf"), -0.0],
        "text": "ü",
        "bytes": [b"", b"\x00\xff"],
        7: ("tuple", ["list"], {}),
        "scalar": np.float32(0.1),
        "arrays": {
            "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "0d": np.array(3, np.int8),
            "nan": np.array([np.nan]),
        },
        "records": RecordDict(
            {
                "a": ArrayRecord({"packed": Array("uint8", (3,), STYPE, b"abc")}),
                "m": MetricRecord({"x": [1, 2], "y": 0.5}),
                "c": ConfigRecord({"b": b"bytes", "s": ["a", "b"], "t": True}),
            }
        ),
    }
    back = store.loads(store.dumps(value, "x"), "x")
    assert list(back) == list(value)
    for key in ("none", "numbers", "text", "bytes", 7, "records"):
        assert back[key] == value[key]
    assert str(back["numbers"][-1]) == "-0.0"
    assert type(back["scalar"]) is np.float32
    assert back["scalar"] == value["scalar"]
    for name, array in value["arrays"].items():
        assert back["arrays"][name].dtype == array.dtype
        assert back["arrays"][name].flags.f_contiguous == array.flags.f_contiguous
        assert back["arrays"][name].tobytes() == array.tobytes()


def test_an_unknown_engine_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    ledger = TrafficLedger()
    unknown = SimpleNamespace(push_messages=None)
    grid = MeteredGrid(unknown, ledger)  # type: ignore[arg-type]
    ledger.record(1, 0, "up", "train", wire=3)
    checkpoint.save(path, server_round=1, arrays=model(), grid=grid)
    stored = checkpoint.load(path)
    other = MeteredGrid(unknown)  # type: ignore[arg-type]
    stored.apply(grid=other)
    assert other.ledger == ledger


# Files that are forged, or of another run.


def forged(document: Any = None, **members: bytes) -> bytes:
    """Return a container with this JSON document and these raw members; deflated ones are named ``z_...``."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        if document is not None:
            text = document if isinstance(document, bytes) else json.dumps(document).encode()
            archive.writestr("manifest.npy", npy(np.frombuffer(text, np.uint8)))
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data, zipfile.ZIP_DEFLATED if name[0] == "z" else zipfile.ZIP_STORED)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue()


def holding(value: Any) -> dict[str, Any]:
    return {"format": "fedcomp.store", "version": 1, "kind": "checkpoint", "value": value}


def claims(shape: list[int], data: bytes) -> bytes:
    """Return a checkpoint whose model is one Array of ``data`` and ``shape``."""
    array = {"$": "Array", "dtype": "float32", "shape": shape, "stype": "numpy.ndarray", "at": "m0"}
    arrays = {"$": "ArrayRecord", "items": [["w", array]]}
    names = ("result", "ledger", "extra", "strategy", "grid")
    items = [["server_round", 1], ["arrays", arrays], *([name, None] for name in names)]
    return forged(holding({"$": "dict", "items": items}), m0=npy(np.frombuffer(data, np.uint8)))


FORGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nested a hundred thousand times": (lambda: forged(b"[" * 10**5 + b"]" * 10**5), "nested deeper"),
    "nested in a value": (
        lambda: forged(
            b'{"format":"fedcomp.store","version":1,"kind":"checkpoint","value":' + b"[" * 900 + b"]" * 900 + b"}"
        ),
        "RecursionError|TypeError",
    ),
    "an array of 2**40 numbers": (lambda: forged(holding({"$": "array", "at": "m0"}), m0=header((2**40,))), "2|claims"),
    "an array of 2**124 numbers": (lambda: forged(holding(0), m0=header((2**62, 2**62))), "claims to be"),
    "an array of 2**40 nothings": (lambda: forged(holding(0), m0=header((2**40,), "|V0")), "claims to be"),
    "an array whose header never ends": (
        lambda: forged(holding(0), m0=header((3,)).replace(b"{", b"((((")),
        "header|read",
    ),
    "a tensor of 2**40 numbers": (lambda: claims([2**40], header((2**40,))), "tensor 'w'"),
    "a tensor of another shape than its data": (lambda: claims([2**40], npy(np.zeros(3, np.float32))), "tensor 'w'"),
    "64 MB in 64 kB": (lambda: forged(holding(0), z0=bytes(2**26)), "never compressed"),
    "one member a thousand times": (
        lambda: forged(holding([{"$": "bytes", "at": "m0"}] * 1000), m0=npy(np.zeros(10**6, np.uint8))),
        "KeyError",
    ),
    "a member that is no array": (lambda: forged(holding({"$": "array", "at": "m0"}), m0=b"text"), "damaged|magic"),
    "no manifest": (lambda: forged(m0=npy(np.zeros(3))), "manifest"),
    "a tag that is a list": (lambda: forged(holding({"$": []})), "KeyError"),
    "no value": (lambda: forged({"format": "fedcomp.store", "version": 1, "kind": "checkpoint"}), "value"),
    "a list for everything": (lambda: forged(holding([])), "TypeError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGED)
def test_d5_a_forged_checkpoint_is_refused_for_the_price_of_its_bytes(name: str, tmp_path: Path) -> None:
    make, said = FORGED[name]
    path = tmp_path / "run.ckpt"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * path.stat().st_size + 2**22
    finally:
        tracemalloc.stop()


def saved(**changes: Any) -> bytes:
    """Return a checkpoint's bytes with some fields exchanged."""
    value = {
        "server_round": 1,
        "arrays": model(),
        "result": {name: {} for name in checkpoint._HISTORY},
        "ledger": None,
        "extra": {},
        "strategy": None,
        "grid": None,
    }
    return store.dumps({k: v for k, v in {**value, **changes}.items() if v is not Ellipsis}, "checkpoint")


@pytest.mark.parametrize(
    "changes",
    [
        {"server_round": "abc"},
        {"server_round": True},
        {"server_round": -1},
        {"server_round": None},
        {"arrays": {"w": 1}},
        {"arrays": ...},
        {"result": []},
        {"result": {name: {1: "x"} for name in checkpoint._HISTORY}},
        {"result": {name: {"1": MetricRecord({"a": 1})} for name in checkpoint._HISTORY}},
        {"ledger": {"columns": 3}},
        {"ledger": {"columns": {}, "tables": {"nodes": ["x"], "kinds": []}}},
        {"extra": None},
        {"strategy": "FedAvg"},
        {"grid": "text"},
    ],
    ids=repr,
)
def test_d5_fields_of_another_type_are_refused_when_a_checkpoint_is_read(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    path.write_bytes(saved())
    assert checkpoint.load(path).server_round == 1
    path.write_bytes(saved(**changes))
    with pytest.raises(CheckpointError, match=r"run\.ckpt"):
        checkpoint.load(path)


def compressed_strategy() -> Compressed:
    return Compressed(fedavg(), TopK(0.5), downlink=TopK(0.5))


WRONG_STATES: list[Any] = [
    {},
    {"state_dict": 3},
    {"state_dict": {}},
    {"state_dict": {"codecs": {}}},
    {"attributes": 3, "nested": {}},
    {"attributes": {}, "nested": {"nobody": {"type": "FedAvg", "attributes": {}, "nested": {}}}},
    {"attributes": {"configure_train": 3}, "nested": {}},
    {"attributes": {3: 3}, "nested": {}},
]


@pytest.mark.parametrize("make", [fedavg, compressed_strategy], ids=["FedAvg", "Compressed"])
@pytest.mark.parametrize("state", WRONG_STATES, ids=repr)
def test_d5_a_strategys_state_of_another_structure_is_refused(
    make: Callable[[], Any], state: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    path.write_bytes(saved(strategy={"type": type(make()).__qualname__, **state}))
    strategy = make()
    with pytest.raises(FedcompError):
        checkpoint.load(path).apply(strategy)
    assert callable(strategy.configure_train)


FUNCTION = {"type": "function", "attributes": {}, "nested": {}}


@pytest.mark.parametrize(
    ("attributes", "nested", "said"),
    [
        ({"__dict__": {}}, {}, "'__dict__'"),
        ({"__doc__": "x"}, {}, "'__doc__'"),
        ({"fraction_train": "x"}, {}, "'fraction_train', float.* a str"),
        ({"train_metrics_aggr_fn": 3}, {}, "'train_metrics_aggr_fn'"),
        ({}, {"train_metrics_aggr_fn": FUNCTION}, "'train_metrics_aggr_fn'"),
        ({}, {"fraction_train": FUNCTION}, "'fraction_train'"),
        ({"nobodys": 3}, {}, "'nobodys'"),
        ({"_abc_impl": 3}, {}, "'_abc_impl'"),
        ({"fraction_train": True}, {}, "bool"),
        ({"fraction_train": None}, {}, "NoneType"),
        ({"min_train_nodes": [2]}, {}, "list"),
        ({"weighted_by_key": b"num-examples"}, {}, "bytes"),
        ({"weighted_by_key": 3}, {}, "int"),
        ({"accept": 1}, {}, "bool"),
        ({"accept": "yes"}, {}, "bool"),
        ({"seen": {}}, {}, "list"),
    ],
    ids=str,
)
def test_d5_a_plain_strategys_forged_attributes_are_refused(
    attributes: dict[str, Any], nested: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.ckpt"
    path.write_bytes(saved(strategy={"type": "Counting", "attributes": attributes, "nested": nested}))
    strategy = Counting(**ONE)
    before = dict(vars(strategy))
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(path).apply(strategy)
    assert vars(strategy) == before


ONE = {"min_train_nodes": 1, "min_available_nodes": 1}


class Counting(FedAvgM):
    """A user's strategy: a flag, a list, what is None at first, and what only the class has at first."""

    best: float = 0.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.accept = True
        self.seen: list[int] = []
        self.momentum: Any = 0
        self.worst: float | None = None


def test_d5_what_a_strategy_of_its_kind_may_hold_is_restored(tmp_path: Path) -> None:
    """Numbers of either kind, what the constructor left None, and what the class gives the default of."""
    used, fresh = Counting(**ONE), Counting(**ONE)
    used.seen, used.momentum, used.worst, used.best = [1, 2], np.float32(0.5), 3, 2
    used.fraction_train = 1
    used.accept = np.bool_(False)  # a comparison of numpy numbers
    used.current_arrays, used.momentum_vector = model(), [np.ones(3)]
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, server_round=1, arrays=model(), strategy=used)
    checkpoint.load(path).apply(fresh)
    assert (fresh.accept, fresh.seen, fresh.momentum, fresh.worst, fresh.best) == (np.False_, [1, 2], 0.5, 3, 2)
    assert fresh.fraction_train == 1
    assert fresh.current_arrays == model()
    assert np.array_equal(fresh.momentum_vector[0], np.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["codecs", "session", "sequence", "peers", "reports", "inner", "holders", "usual", "broadcast/version"]
)
@pytest.mark.parametrize("value", [None, 3, "x", [1], {"1": 2}, ...], ids=repr)
def test_d5_each_field_of_the_drop_in_strategys_state_is_checked(name: str, value: Any, tmp_path: Path) -> None:
    """A wrong field is a FedcompError, or a value that field may have; nothing else comes out."""
    state = compressed_strategy().state_dict()
    state = {k: v for k, v in {**state, name: value}.items() if v is not Ellipsis}
    path = tmp_path / "run.ckpt"
    path.write_bytes(saved(strategy={"type": "Compressed", "state_dict": state}))
    with contextlib.suppress(FedcompError):
        checkpoint.load(path).apply(compressed_strategy())


def test_d5_a_checkpoint_of_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    with InProcessGrid(client_app(), 3) as three:
        checkpoint.save(path, server_round=1, arrays=model(), grid=three)
    with InProcessGrid(client_app(), 5) as five:
        with pytest.raises(GridError, match=r"began with 3 nodes, this one with 5"):
            checkpoint.load(path).apply(grid=five)
        assert len(five.get_node_ids()) == 5
    path.write_bytes(saved(grid=store.dumps({"seed": 0, "nodes": []}, "grid snapshot")))
    with InProcessGrid(client_app(), 5) as five, pytest.raises(CheckpointError, match="damaged structure"):
        checkpoint.load(path).apply(grid=five)


def test_a_checkpoint_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """The ledger's columns as a whole, and the grid as a snapshot in a snapshot."""
    path, grid = tmp_path / "run.ckpt", make_grid()
    arrays = fit(fedavg(), grid, model(), 2, timeout=9).arrays
    columns = {"columns": grid.ledger.columns(), "tables": grid.ledger.tables()}
    inner = store.dumps(grid.inner.dump(), "grid snapshot")  # type: ignore[attr-defined]
    whole = store.dumps({"inner": inner, "meter": grid.meter.state_dict()}, "meter snapshot")
    path.write_bytes(saved(server_round=2, arrays=arrays, ledger=columns, grid=whole))
    again = make_grid()
    checkpoint.load(path).apply(grid=again)
    assert fingerprint(Result(arrays=arrays), again) == fingerprint(Result(arrays=arrays), grid)
