"""GF(2^8) products: the field's vectors, every tier against galois, views and edges, and a choice that never aborts."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from galois_oracle import gf256
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp.coding import kernels
from fedcomp.coding.kernels import dispatch, isal, matmul, portable, reduce, tables
from fedcomp.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
HERE = [tier for tier in kernels.tiers() if tier != "isal"]
PRODUCTS_SHA256 = "003d1a609783d2740b9b3f00b0cd9e43e42c4f3eedc5ff54ec1709996d52e1e0"
LIBRARIES = isal.libraries()


def drawn(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def oracle(a: Any, b: Any) -> Any:
    """The product as galois computes it."""
    return np.asarray(gf256(a) @ gf256(b)).astype(np.uint8)


def test_the_product_table_is_that_of_polynomial_11d() -> None:
    assert hashlib.sha256(tables.products().tobytes()).hexdigest() == PRODUCTS_SHA256
    for x, y, z in ((2, 128, 29), (3, 7, 9), (0x53, 0xCA, 143), (255, 255, 226)):
        assert tables.products()[x, y] == z
    assert [tables.reciprocals()[x] for x in (1, 2, 3, 255)] == [1, 142, 244, 253]


def test_bit_matrices_and_nibbles_give_every_product() -> None:
    """Bit i of a product is the parity of byte 7 - i of the matrix, masked by the factor."""
    masks = tables.matrices().astype("<u8").view(np.uint8).reshape(256, 8)[:, ::-1]
    x = np.arange(256, dtype=np.uint8)
    parity = np.array([bin(value).count("1") & 1 for value in range(256)], np.uint8)
    bits = parity[masks[:, None, :] & x[None, :, None]]
    np.testing.assert_array_equal(np.packbits(bits, axis=2, bitorder="little")[..., 0], tables.products())
    low, high = tables.nibbles()[:, x & 15], tables.nibbles()[:, 16 + (x >> 4)]
    np.testing.assert_array_equal(low ^ high, tables.products())


@pytest.mark.slow
@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 9])
def test_every_length_from_0_to_300_equals_galois(tier: str, n: int) -> None:
    """Columns are independent: one product of galois is the oracle of all lengths. Starts are not aligned."""
    k = 2 * n - 1
    a, b = drawn(n, n, k), drawn(n + 100, k, 310)
    a.flat[: n // 2] = 0
    expected = oracle(a, b)
    room = np.full((n, 312), 0xA5, np.uint8)
    for size in range(301):
        start = size % 10
        out = room[:, 1 : 1 + size]
        assert matmul(a, b[:, start : start + size], out, tier=tier) is out
        np.testing.assert_array_equal(out, expected[:, start : start + size])
        assert (room[:, 0] == 0xA5).all(), "wrote before its output"
        assert (room[:, 1 + size :] == 0xA5).all(), "wrote behind its output"
        room[:] = 0xA5


@pytest.mark.slow
@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize(("n", "k"), [(16, 16), (64, 64), (5, 33), (130, 2), (1, 257)])
def test_many_rows_equal_galois(tier: str, n: int, k: int) -> None:
    a, b = drawn(1, n, k), drawn(2, k, 1000)
    np.testing.assert_array_equal(matmul(a, b, tier=tier), oracle(a, b))


@pytest.mark.slow
@pytest.mark.parametrize("tier", HERE)
def test_views_give_what_copies_give(tier: str) -> None:
    wide = drawn(3, 40, 900)
    fixed = drawn(4, 10, 11)
    fixed.flags.writeable = False
    views = {
        "reversed rows": wide[10::-1, :601],
        "reversed columns": wide[:11, 600::-1],
        "every third column": wide[:11, ::3],
        "every third row": wide[::3, :299][:11],
        "Fortran order": np.asfortranarray(wide[:11]),
        "one row eleven times": np.broadcast_to(wide[0], (11, 900)),
        "transposed": wide.T[:11],
    }
    for name, b in views.items():
        for a in (fixed, drawn(5, 22, 22)[:20:2, ::2], drawn(6, 11, 10).T):
            expected = oracle(a.copy(), b.copy())
            np.testing.assert_array_equal(matmul(a, b, tier=tier), expected, err_msg=name)
            for shape in ("rows apart", "columns apart", "reversed"):
                room = np.zeros((30, 2 * b.shape[1]), np.uint8)
                out = {
                    "rows apart": room[::3, : b.shape[1]],
                    "columns apart": room[:10, ::2],
                    "reversed": room[9::-1, b.shape[1] - 1 :: -1],
                }[shape]
                matmul(a, b, out, tier=tier)
                np.testing.assert_array_equal(out, expected, err_msg=f"{name}, {shape}")
                assert np.count_nonzero(room) == np.count_nonzero(expected)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 12), k=st.integers(0, 12), size=st.integers(0, 700), seed=st.integers(0, 2**32), add=st.booleans()
)
def test_all_tiers_agree_to_the_byte(n: int, k: int, size: int, seed: int, add: bool) -> None:
    a, b, before = drawn(seed, n, k), drawn(seed + 1, k, size), drawn(seed + 2, n, size)
    results = {tier: matmul(a, b, before.copy(), tier=tier, accumulate=add) for tier in HERE}
    expected = (before if add else 0) ^ (oracle(a, b) if n and k and size else np.zeros((n, size), np.uint8))
    for tier, result in results.items():
        np.testing.assert_array_equal(result, expected, err_msg=tier)


@pytest.mark.parametrize("tier", [*HERE, "auto"])
def test_empty_dimensions(tier: str) -> None:
    for n, k, size in ((0, 3, 5), (3, 0, 5), (3, 5, 0), (0, 0, 0)):
        out = np.full((n, size), 7, np.uint8)
        assert not matmul(np.ones((n, k), np.uint8), np.ones((k, size), np.uint8), out, tier=tier).any()
    kept = np.full((2, 5), 7, np.uint8)
    matmul(np.ones((2, 0), np.uint8), np.ones((0, 5), np.uint8), kept, tier=tier, accumulate=True)
    assert (kept == 7).all()


def test_an_overlapping_output_is_refused_and_untouched() -> None:
    buffer = drawn(7, 8, 64)
    before = buffer.copy()
    a = drawn(8, 4, 4)
    for out in (buffer[:4], buffer[2:6], buffer[3:7, ::-1]):
        with pytest.raises(ConfigError, match="overlaps"):
            matmul(a, buffer[:4], out)
    with pytest.raises(ConfigError, match="overlaps"):
        matmul(buffer[:4, :4], drawn(9, 4, 64), buffer[:4])
    np.testing.assert_array_equal(buffer, before)
    # Interleaved views share an extent of memory, but no byte.
    matmul(a, buffer[:4, 1::2], buffer[:4, ::2])
    np.testing.assert_array_equal(buffer[:4, ::2], oracle(a, before[:4, 1::2]))
    np.testing.assert_array_equal(buffer[:4, 1::2], before[:4, 1::2])


def test_arguments_are_checked() -> None:
    a, b = drawn(1, 3, 4), drawn(2, 4, 10)
    fixed = np.zeros((3, 10), np.uint8)
    fixed.flags.writeable = False
    for wrong, message in (
        (lambda: matmul(a, b[:3]), "as many columns"),
        (lambda: matmul(a.astype(np.int64), b), "uint8"),
        (lambda: matmul(a[0], b), "two dimensions"),
        (lambda: matmul(a.tolist(), b), "list"),
        (lambda: matmul(gf256(a), b), "plain"),
        (lambda: matmul(a, b, np.zeros((3, 11), np.uint8)), "has shape"),
        (lambda: matmul(a, b, fixed), "read-only"),
        (lambda: matmul(a, b, accumulate=True), "no out was given"),
        (lambda: matmul(a, b, tier="avx"), "unknown kernel tier"),
        (lambda: reduce(a, 5), "5 columns"),
        (lambda: reduce(fixed, 2), "writable"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (5, 5, 10), (16, 16, 32), (20, 7, 7), (7, 20, 20), (65, 65, 130), (30, 40, 90)]
)
@pytest.mark.parametrize("rank", [0, 1, 3, 200])
def test_reduction_is_the_same_in_every_tier(shape: tuple[int, int, int], rank: int) -> None:
    n, columns, width = shape
    matrix = drawn(n, n, width)
    if rank < min(n, columns):
        matrix[:, :columns] = oracle(drawn(1, n, rank), drawn(2, rank, columns)) if rank else 0
    expected = matrix.copy()
    found = reduce(expected, columns, tier="numpy")
    assert found == np.linalg.matrix_rank(gf256(matrix[:, :columns]))
    if width == columns:
        np.testing.assert_array_equal(expected, gf256(matrix).row_reduce())
    for tier in HERE:
        reduced = matrix.copy()
        assert reduce(reduced, columns, tier=tier) == found
        np.testing.assert_array_equal(reduced, expected, err_msg=tier)


without_isal = pytest.mark.skipif(  # optional, no dependency; galois is the oracle that always runs
    not LIBRARIES, reason="ISA-L is not installed: there is nothing to compare with"
)


@without_isal
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.version)
def test_parities_equal_those_of_isal(library: isal.Library) -> None:
    for k, parities in ((4, 3), (16, 8), (64, 64)):
        cauchy = tables.reciprocals()[(k + np.arange(parities))[:, None] ^ np.arange(k)[None, :]]
        for size in (1, 31, 64, 300, 4099):
            data, out = drawn(size, k, size), np.empty((parities, size), np.uint8)
            library.product(cauchy, data, out, False)
            np.testing.assert_array_equal(out, matmul(cauchy, data))
            library.product(cauchy, data, out, True)
            assert not out.any(), "adding the same parities again leaves zeros"


@without_isal
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.version)
def test_isal_prepared_once_serves_every_content_of_the_same_arrays(library: isal.Library) -> None:
    a, b, out = drawn(1, 5, 9), drawn(2, 9, 333), np.zeros((5, 333), np.uint8)
    call = library.prepare(a, b, out)
    for seed in (3, 4):
        b[:] = drawn(seed, 9, 333)
        call()
        np.testing.assert_array_equal(out, oracle(a, b))
    with pytest.raises(ConfigError, match="rows of at most 2147483647 bytes"):
        library.prepare(a[:1, :1], np.broadcast_to(np.uint8(0), (1, 2**31)), out)


@without_isal
def test_isal_is_a_tier_but_never_the_choice() -> None:
    a, b = drawn(1, 5, 9), drawn(2, 9, 333)[:, ::-1]
    np.testing.assert_array_equal(matmul(a, b, tier="isal"), oracle(a, b.copy()))
    assert kernels.best_tier() != "isal"


@pytest.mark.parametrize("tier", [tier for tier in HERE if tier != "numpy"])
def test_kernels_stay_within_their_working_memory(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute addresses themselves: nothing would tell, until something else breaks."""
    loaded = dispatch.load(tier)
    rooms = []

    def guarded(size: int, dtype: Any) -> Any:
        room = np.full(size + 128, 0xA5, dtype)
        rooms.append((room, size))
        return room[64 : 64 + size]

    monkeypatch.setattr(dispatch, "np", SimpleNamespace(empty=guarded, zeros=np.zeros, uint8=np.uint8))
    for n, k, size in ((1, 1, 1), (4, 3, 255), (5, 8, 257), (9, 17, 1100), (64, 64, 300), (3, 200, 65)):
        a, b, out = drawn(1, n, k), drawn(2, k, size), np.zeros((n, size), np.uint8)
        for add in (False, True):
            loaded.product(a, b, out, add)
        assert not out.any(), "the same product, added to itself"
        loaded.reduce(drawn(3, n, k), min(n, k))
    monkeypatch.undo()
    assert len(rooms) == 18
    for room, size in rooms:
        assert (room[:64] == 0xA5).all()
        assert (room[64 + size :] == 0xA5).all()


def test_threads_do_not_disturb_each_other() -> None:
    kernels.warm()
    a, b = drawn(1, 16, 16), drawn(2, 16, 5000)
    expected = matmul(a, b, tier="numpy")
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            if not np.array_equal(matmul(a, b), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_auto_computes_in_numpy_until_a_compiled_tier_is_worth_loading() -> None:
    auto = dispatch.AutoTier()
    assert auto.choose(1).name == "numpy"
    assert auto.choose(dispatch.PATIENCE - 2).name == "numpy"
    assert auto.choose(1).name == kernels.best_tier()
    assert auto.choose(1).name == kernels.best_tier()


def test_a_tier_that_computes_wrong_products_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction that does something else must not corrupt data silently."""
    first = kernels.tiers()[0]
    assert first != "numpy"
    good = dispatch.load

    def off_by_one(a: Any, b: Any, out: Any, accumulate: bool) -> None:
        portable.product(a, b, out, accumulate)
        out[-1, -1] ^= 1

    def load(tier: str) -> dispatch.Loaded:
        return dispatch.Loaded(tier, off_by_one, portable.reduce) if tier == first else good(tier)

    monkeypatch.setattr(dispatch, "load", load)
    with pytest.warns(RuntimeWarning, match=f"{first!r} computes wrong products"):
        assert dispatch.best.__wrapped__().name == kernels.tiers()[1]


def test_a_tier_the_cpu_lacks_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "cpu_features", lambda: frozenset({"ssse3"}))
    assert dispatch.tiers()[:2] == ("shuffle128", "swar")
    with pytest.raises(ConfigError, match="'gfni512' cannot run here: this CPU lacks gfni, avx512f, avx512bw"):
        dispatch.load.__wrapped__("gfni512")


def test_settling_does_not_load_a_library_that_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise AssertionError("ISA-L was looked for")

    monkeypatch.setattr(isal, "libraries", load)
    assert dispatch.best.__wrapped__().name == kernels.best_tier()


def test_without_numba_numpy_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else found(name, *rest)
    )
    assert [tier for tier in dispatch.tiers() if tier != "isal"] == ["numpy"]
    assert dispatch.why_not("swar") == "numba is not installed"
    assert dispatch.best.__wrapped__().name == "numpy"


PROGRAM = """
import numpy as np
from fedcomp.coding import kernels
rng = np.random.default_rng(5)
a, b = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((9, 20), (20, 1003)))
tier, _ = kernels.warm()
matrix = a[:, :9].copy()
out = kernels.matmul(a, b)
assert (out == kernels.matmul(a, b, tier="numpy")).all()
print(tier, out.tobytes().hex()[:64], kernels.reduce(matrix, 9))
"""


def child(**variables: str) -> list[str]:
    """Run the program in a process of its own; return the tier it chose, the first bytes and the rank."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "tiers"),
    [
        # Tuples: the workers of a parallel run must give a test the same name, and sets have no order.
        ({"NUMBA_CPU_FEATURES": ""}, ("swar",)),
        ({"NUMBA_DISABLE_JIT": "1"}, ("numpy",)),
        ({"NUMBA_ENABLE_AVX": "0"}, ("shuffle128", "neon", "swar")),
    ],
    ids=str,
)
def test_a_changed_target_gives_the_right_bytes_and_does_not_abort(
    variables: dict[str, str], tiers: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((9, 20), (20, 1003)))
    tier, start, rank = child(**variables)
    assert tier in tiers
    assert start == oracle(a, b).tobytes().hex()[:64]
    assert rank == "9"


@pytest.mark.long
def test_the_disk_cache_keeps_targets_apart(tmp_path: Path) -> None:
    """A cache directory that another CPU has filled is not read: its code could stop this process."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}

    def compiled() -> int:
        return len(list(tmp_path.rglob("*.nbc")))

    foreign = {**cache, "NUMBA_CPU_NAME": "generic"}
    child(**foreign)
    first = compiled()
    assert first > 0
    child(**cache, NUMBA_CPU_FEATURES="")
    second = compiled()
    assert second > first
    child(**foreign)
    assert compiled() == second, "the same target finds its own code again"


@pytest.mark.slow
def test_importing_is_cheap() -> None:
    code = "import sys, fedcomp.coding.kernels, fedcomp.coding.field, coding.bench; " + (
        "print([m for m in ('numba', 'llvmlite', 'galois', 'scipy') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("tier", kernels.tiers())
@pytest.mark.parametrize("size", [1, 63, 64, 127, 300, 1030])
def test_rows_at_any_address_give_what_a_matrix_gives(tier: str, size: int) -> None:
    """Rows start at every offset from a cache line, in any order, some of them the same."""
    for n, k in [(1, 1), (1, 7), (3, 64), (4, 5), (5, 16), (9, 9)]:
        a, b = drawn(n, n, k), drawn(k, k, size)
        rows = []
        for number, row in enumerate(b):
            room = np.full(size + 130, 0xA5, np.uint8)
            start = 7 * number % 65
            room[start : start + size] = row
            room.flags.writeable = False
            rows.append(room[start : start + size].reshape((1, size) if number % 2 else (size, 1)))
        order = drawn(size, k) % k
        scattered, packed = kernels.Rows([rows[j] for j in order]), b[order]
        expected = matmul(a, packed, tier="numpy")
        np.testing.assert_array_equal(matmul(a, scattered, tier=tier), expected)
        base = drawn(n + 1, n, size)
        added = matmul(a, scattered, base.copy(), tier=tier, accumulate=True)
        np.testing.assert_array_equal(added, expected ^ base)


def test_places_are_the_addresses_of_the_rows() -> None:
    arrays = [np.zeros(shape, np.uint8) for shape in [(24,), (1, 24), (24, 1), (2, 3, 4)]]
    arrays.append(np.zeros((9, 24), np.uint8)[4:5])
    assert kernels.Rows(arrays).places().tolist() == [array.ctypes.data for array in arrays]


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(23, np.uint8),
        np.zeros(25, np.uint8),
        np.zeros(24, np.uint16),
        np.zeros(48, np.uint8)[::2],
        np.zeros((4, 6), np.uint8).T,
        np.zeros((6, 8), np.uint8)[:, :4],
        np.ma.zeros(24, np.uint8),
        bytes(24),
    ],
    ids=["short", "long", "wide elements", "every second", "transposed", "columns", "masked", "bytes"],
)
def test_rows_that_are_not_contiguous_bytes_of_one_length_are_refused(wrong: Any) -> None:
    tier = next(tier for tier in kernels.tiers() if tier != "numpy")
    with pytest.raises(ConfigError, match="rows are"):
        matmul(np.ones((1, 2), np.uint8), kernels.Rows([np.zeros(24, np.uint8), wrong]), tier=tier)


def test_an_output_that_overlaps_one_of_the_rows_is_refused() -> None:
    first, second = np.zeros((2, 24), np.uint8)
    with pytest.raises(ConfigError, match="overlaps"):
        matmul(np.ones((1, 2), np.uint8), kernels.Rows([first, second]), second.reshape(1, 24))
    with pytest.raises(ConfigError, match="at least one"):
        kernels.Rows([])
