"""The parts of the coding benchmark: one function per part of the table, each yielding its cases."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding import kernels
from fedcomp.coding.decoder import Decoder
from fedcomp.coding.encoder import encoder
from fedcomp.coding.field import GF256
from fedcomp.coding.kernels import dispatch, isal, tables
from fedcomp.coding.packet import Packet, PacketLimits
from fedcomp.coding.prime import GF31, GF251, GF65521
from fedcomp.coding.relay import MOST_SYMBOLS
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import why_missing
from fedcomp.measuring import Bound, Calls, Case, Prepared, Row, Times, timed

Bytes = NDArray[np.uint8]

SYMBOLS: Final = (16, 64)
GOAL: Final = "our goal, set from measurements of a prototype"
LIKE: Final = "our goal: what a decoder that touches payload bytes once can reach"


class Size(NamedTuple):
    """How much is measured: bytes of a generation, repetitions, and the seconds that a sample lasts at least."""

    generation: int = 1 << 20
    repetitions: int = 15
    sample: float = 1e-3


QUICK: Final = Size(4096, 3, 0.0)


def cases(quick: bool) -> Iterator[Case]:
    """Yield everything."""
    # Compilation is not what is measured.
    kernels.warm()
    for part in (encoding, many_symbols, small_generations, decoding, primes, end_to_end):
        yield from part(QUICK if quick else Size())


def _matrices(n: int, k: int, width: int) -> tuple[Bytes, Bytes, Bytes]:
    """Return coefficients, sources and room for the product; the same ones in every run."""
    stream = SplitMix64(n * 1_000_003 + k)
    return stream.bytes(n * k).reshape(n, k), stream.bytes(k * width).reshape(k, width), np.empty((n, width), np.uint8)


def _case(
    part: str, k: int, outputs: int, payload: int, calls: Calls, size: Size, bounds: Sequence[Bound] = ()
) -> Case:
    """Return the case of these calls; a row has payload bytes per second, and multiply-adds per second."""

    def row(times: Times, method: str) -> Row:
        seconds = times.median(method)
        return {
            "part": part,
            "K": k,
            "outputs": outputs,
            "bytes": payload,
            "method": method,
            "microseconds": round(1e6 * seconds, 2),
            "MB/s": round(payload / seconds / 1e6, 1),
            "GB/s multiply-add": round(payload * outputs / seconds / 1e9, 3),
        }

    text = f"{part}, K = {k}, {outputs} outputs, {payload} bytes"
    return timed(text, calls, size.repetitions, row, bounds, sample=size.sample)


def _libraries(a: Bytes, b: Bytes, out: Bytes) -> dict[str, Callable[[], object]]:
    """Return calls of every copy of ISA-L there is: with tables and addresses made beforehand, and for every product.

    Goals are set against the first, ISA-L's best. Our own tables are made within the call, always.
    """
    calls: dict[str, Callable[[], object]] = {}
    for one in isal.libraries():
        calls[f"ISA-L {one.version}"] = one.prepare(a, b, out)
        calls[f"tables each time, ISA-L {one.version}"] = partial(one.product, a, b, out, False)
    return calls


def _best(a: Bytes, b: Bytes, out: Bytes) -> dict[str, Callable[[], object]]:
    return {kernels.best_tier(): partial(kernels.matmul, a, b, out), **_libraries(a, b, out)}


def _table(a: Bytes, b: Bytes, out: Bytes) -> Callable[[], object]:
    """The usual way in numpy: a row of the product table per coefficient, taken and XORed."""
    products = tables.products()

    def call() -> None:
        out[:] = 0
        for target, coefficients in zip(out, a, strict=True):
            for source, coefficient in zip(b, coefficients, strict=True):
                target ^= np.take(products[coefficient], source)

    return call


def _zfec(n: int, b: Bytes) -> Callable[[], object] | None:
    """Encode ``n`` parity blocks with zfec; it chooses its own matrix. Not a dependency: GPL."""
    if why_missing("zfec"):
        return None
    import zfec  # type: ignore[import-not-found]

    k = b.shape[0]
    code, blocks, numbers = zfec.Encoder(k, k + n), [row.tobytes() for row in b], list(range(k, k + n))
    return lambda: code.encode(blocks, numbers)


def _galois(order: int, a: NDArray[Any], b: NDArray[Any]) -> Callable[[], object] | None:
    if why_missing("galois"):
        return None
    import galois

    field = galois.GF(order)
    dtype = field.dtypes[0]
    left, right = a.astype(dtype).view(field), b.astype(dtype).view(field)
    return lambda: left @ right


def encoding(size: Size) -> Iterator[Case]:
    """K coded symbols of a generation of K, dense coefficients: every tier, and what else there is."""
    for k in SYMBOLS:
        a, b, out = _matrices(k, k, size.generation // k)
        # ISA-L follows, once for every copy there is and with its tables made beforehand.
        calls: dict[str, Callable[[], object]] = {
            tier: partial(kernels.matmul, a, b, out, tier=tier) for tier in kernels.tiers() if tier != "isal"
        }
        calls |= _libraries(a, b, out)
        calls |= {"numpy table, take and XOR": _table(a, b, out), "memcpy": partial(np.copyto, np.empty_like(b), b)}
        peers = {"galois": _galois(256, a, b), "zfec": _zfec(k, b)}
        calls |= {name: call for name, call in peers.items() if call is not None}
        yield _case("encode", k, k, b.size, calls, size, _encoding_bounds(calls, k))


def _encoding_bounds(calls: Calls, k: int) -> list[Bound]:
    # Where there is no ISA-L its claims stay in the table, as skipped, with the reason.
    libraries = [name for name in calls if name.startswith("ISA-L")] or ["ISA-L"]
    # Where there is GFNI without 512-bit registers, the claim is the narrower tier's.
    gfni = "gfni256" if "gfni512" not in calls and "gfni256" in calls else "gfni512"
    goals = [
        ("swar", "numpy table, take and XOR", 12.0, True),
        ("swar", "zfec", 5.0, True),
        *[("shuffle256", library, 0.7, True) for library in libraries],
        *[(gfni, library, 1.5, True) for library in libraries],
        *[(gfni, library, 2.5, False) for library in libraries],
    ]
    bounds = []
    for tier, other, bound, gate in goals:
        name = f"encode, K = {k}: {tier} times as fast as {other}{'' if gate else ' (stretch)'}"
        skipped = "" if tier in calls else kernels.why_not(tier)
        if not skipped and other not in calls:
            skipped = kernels.why_not("isal") if other == "ISA-L" else why_missing(other)
        bounds.append(Bound(name, f"{other} / {tier}", f">= {bound}", GOAL, gate, skipped=skipped))
    return bounds


def many_symbols(size: Size) -> Iterator[Case]:
    """Where products become slow: their time grows with K, beside that of a payload's bytes."""
    for k in (64, MOST_SYMBOLS, 2 * MOST_SYMBOLS, 4 * MOST_SYMBOLS):
        a, b, out = _matrices(k, k, max(1, 8 * size.generation // k))
        yield _case("many symbols", k, k, b.size, {kernels.best_tier(): partial(kernels.matmul, a, b, out)}, size)


def small_generations(size: Size) -> Iterator[Case]:
    """Where the call costs more than the product."""
    skipped = kernels.why_not("isal")
    for payload in (4096, 65536):
        calls, tier = _best(*_matrices(16, 16, payload // 16)), kernels.best_tier()
        bounds = []
        for start in ("ISA-L", "tables each time"):
            other = next((name for name in calls if name.startswith(start)), start)
            name = f"generation of {payload} bytes, K = 16: {tier} times as fast as {other}"
            bounds.append(Bound(name, f"{other} / {tier}", ">= 1", GOAL, False, skipped=skipped))
        yield _case("small generation", 16, 16, payload, calls, size, bounds)


def decoding(size: Size) -> Iterator[Case]:
    """The two-phase decoder, e of K symbols missing: coefficients on arrival, then one product.

    The second phase is compared with encoding e rows of the same bodies, where they arrived, and inverting a K x K
    matrix. With arrivals, i.e. all that a decoder does with packets that were parsed, it is compared with what makes e
    packets of a payload that was cut and hashed. Packets are in the buffers they came in, behind their headers. Nobody
    has its sources copied, and all allocate their output within the time that is measured.
    """
    for k in SYMBOLS:
        payload = SplitMix64(k).bytes(size.generation).tobytes()
        source = encoder("rlnc", payload, symbols=k, round=1, source=0, run=7, shards=2 * k)
        limits = PacketLimits()
        for missing in (1, 4, k):
            # The first symbols did not arrive; in their place came as many combinations.
            sent = source.packets([*range(missing, k), *range(k, k + missing)])
            received = [Packet.from_bytes(packet.to_bytes(), limits) for packet in sent]
            yield _decode(k, missing, source, received, limits, size)


def _decode(k: int, missing: int, source: Any, received: list[Packet], limits: PacketLimits, size: Size) -> Case:
    a, b, _ = _matrices(missing, k, size.generation // k)
    square = SplitMix64(missing).bytes(k * k).reshape(k, k)

    def arrive() -> Decoder:
        decoder = Decoder(limits=limits)
        for packet in received:
            decoder.add(packet)
        return decoder

    calls: Calls = {
        "second phase": Prepared(arrive, Decoder.solve),
        "with arrivals": lambda: arrive().solve(),
        "e-row encode": Prepared(
            # The decoder lives as long, so that what its arrivals leave in the caches is the same for both.
            lambda: [arrive(), [packet.body for packet in received]],
            lambda held: held.append(kernels.matmul(a, kernels.Rows(held[1]))),
        ),
        "inversion": lambda: GF256().inverse(square),
        "packets of it": lambda: source.packets(range(k, k + missing)),
    }
    at = f"decode {missing} missing of K = {k}"
    bounds = [
        Bound(
            f"{at}: {text} + inversion",
            lambda found, of=of, to=to: found.times.ratio(of, [to, "inversion"]),  # type: ignore[misc]
            "<= 1.3",
            LIKE,
        )
        for text, of, to in (
            ("second phase to e-row encode", "second phase", "e-row encode"),
            ("with arrivals to making e packets", "with arrivals", "packets of it"),
        )
    ]
    # Only where products outweigh all else: the larger K, and nothing there as itself.
    if missing == k == max(SYMBOLS):
        bounds += [
            Bound(f"{at}: second phase's rate to encode rate", "e-row encode / second phase", ">= 0.5", LIKE),
            Bound(f"{at}: rate with arrivals to packets' encode rate", "packets of it / with arrivals", ">= 0.5", LIKE),
        ]
    return _case("decode", k, missing, b.size, calls, size, bounds)


def primes(size: Size) -> Iterator[Case]:
    """Products over prime fields, against galois."""
    for field in (GF251, GF65521, GF31):
        width = size.generation // 16 // field.symbol_bytes
        stream = SplitMix64(field.order)
        a, b = field.random((16, 16), stream), field.random((16, width), stream)
        calls: dict[str, Callable[[], object]] = {field.name: partial(field.matmul, a, b, out=np.empty_like(b))}
        galois = _galois(field.order, a, b)
        if galois is not None:
            calls["galois"] = galois
        name = f"product over {field.name}, K = 16: times as fast as galois"
        bound = Bound(name, f"galois / {field.name}", ">= 1", GOAL, False, skipped=why_missing("galois"))
        yield _case(f"product, {field.name}", 16, 16, b.nbytes, calls, size, [bound])


def end_to_end(size: Size) -> Iterator[Case]:
    """What a client does with an update of 1 MB, K = 16 for 24 relays: cut, code, make packets, digests and all."""
    payload = SplitMix64(4).bytes(size.generation if size is QUICK else 1_000_000).tobytes()

    def share() -> list[bytes]:
        source = encoder("rlnc", payload, symbols=16, round=1, source=0, run=7, shards=24)
        return [packet.to_bytes() for packet in source.packets(range(24))]

    packets, limits = share(), PacketLimits()

    def collect() -> bytes:
        decoder = Decoder(limits=limits)
        # The first 8 of 24 are symbols as themselves: 16 packets are just enough, and 8 symbols have to be solved for.
        for data in packets[8:]:
            decoder.add(Packet.from_bytes(data, limits))
        return decoder.payload()

    name, source = "client side of a 1 MB update, K = 16, N = 24: milliseconds", "below 2 % of a local epoch on digits"
    bound = Bound(name, lambda found: 1e3 * found.times.median("share"), "< 5", source)
    yield _case("end to end", 16, 24, len(payload), {"share": share, "collect, 8 missing": collect}, size, [bound])


def environment() -> dict[str, Any]:
    """Return what the figures depend on."""
    import llvmlite.binding  # type: ignore[import-untyped]
    import numba

    features = sorted(dispatch.cpu_features() & {name for needs in dispatch.NEEDS.values() for name in needs})
    return {
        "tier": kernels.best_tier(),
        "tiers": list(kernels.tiers()),
        "not here": {tier: why for tier in kernels.TIERS if (why := kernels.why_not(tier))},
        "cpu": llvmlite.binding.get_host_cpu_name(),
        "features": features,
        "isal": [one.version for one in isal.libraries()],
        # The book of results says of every benchmark on what it was measured.
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "galois": "not installed" if why_missing("galois") else importlib.metadata.version("galois"),
    }
