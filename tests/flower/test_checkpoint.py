"""Interrupted and resumed equals uninterrupted, bit for bit; damage is noticed."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

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

from fedcomp.flower import checkpoint, store
from fedcomp.flower.checkpoint import CheckpointError
from fedcomp.flower.faults import RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import Ledger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import STYPE
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key

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


def test_without_the_strategys_state_the_resumed_run_would_differ(tmp_path: Path) -> None:
    # Guards the test above: FedAdam's moments matter here.
    path = tmp_path / "run.ckpt"
    grid, strategy = make_grid(), FedAdam()
    first = fit(strategy, grid, model(), 3, timeout=9)
    checkpoint.save(path, server_round=3, arrays=first.arrays, strategy=strategy, grid=grid)
    results = []
    for restored in (True, False):
        again, engine = FedAdam(), make_grid()
        stored = checkpoint.load(path)
        stored.apply(again if restored else None, engine)
        results.append(fit(again, engine, stored.arrays, 5, start_round=4, timeout=9).arrays)
    assert results[0]["weight"].data != results[1]["weight"].data


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


def test_every_damaged_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    arrays = ArrayRecord({"w": Array(np.arange(60, dtype=np.float32))})
    ledger = Ledger()
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
    ledger = Ledger()
    grid = MeteredGrid(object(), ledger)  # type: ignore[arg-type]
    ledger.record(1, 0, "up", "train", wire=3)
    checkpoint.save(path, server_round=1, arrays=model(), grid=grid)
    stored = checkpoint.load(path)
    other = MeteredGrid(object())  # type: ignore[arg-type]
    stored.apply(grid=other)
    assert other.ledger == ledger
