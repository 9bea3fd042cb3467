"""What is measured: every function is one part of the table, with its rows and its claims."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedcomp.coding import kernels
from fedcomp.coding.bench.measuring import BenchClaim, Calls, CallTimes, Prepared, Size
from fedcomp.coding.decoder import Decoder
from fedcomp.coding.encoder import encoder
from fedcomp.coding.field import GF256
from fedcomp.coding.kernels import dispatch, isal, tables
from fedcomp.coding.packet import Packet, PacketLimits
from fedcomp.coding.prime import GF31, GF251, GF65521
from fedcomp.coding.relay import MOST_SYMBOLS
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import why_missing

Bytes = NDArray[np.uint8]

SYMBOLS: Final = (16, 64)
GOAL: Final = "our goal, set from measurements of a prototype"
LIKE: Final = "our goal: what a decoder that touches payload bytes once can reach"

Part = tuple[list[dict[str, Any]], list[BenchClaim]]


def _matrices(n: int, k: int, width: int) -> tuple[Bytes, Bytes, Bytes]:
    """Return coefficients, sources and room for the product; the same ones in every run."""
    stream = SplitMix64(n * 1_000_003 + k)
    return stream.bytes(n * k).reshape(n, k), stream.bytes(k * width).reshape(k, width), np.empty((n, width), np.uint8)


def _row(part: str, k: int, outputs: int, payload: int, method: str, seconds: float) -> dict[str, Any]:
    """Return one line of the table: payload bytes per second, and multiply-adds per second."""
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


def _product(tier: str, a: Bytes, b: Bytes, out: Bytes) -> Callable[[], object]:
    return lambda: kernels.matmul(a, b, out, tier=tier)


def _libraries(a: Bytes, b: Bytes, out: Bytes) -> dict[str, Callable[[], object]]:
    """Return calls of every copy of ISA-L there is: with tables and addresses made beforehand, and for every product.

    Goals are set against the first, ISA-L's best. Our own tables are made within the call, always.
    """
    calls: dict[str, Callable[[], object]] = {}
    for one in isal.libraries():
        calls[f"ISA-L {one.version}"] = one.prepare(a, b, out)
        calls[f"tables each time, ISA-L {one.version}"] = lambda one=one: one.product(a, b, out, False)  # type: ignore[misc]
    return calls


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


def _copy(b: Bytes) -> Callable[[], object]:
    room = np.empty_like(b)
    return lambda: np.copyto(room, b)


def encoding(size: Size) -> Part:
    """K coded symbols of a generation of K, dense coefficients: every tier, and what else there is."""
    rows: list[dict[str, Any]] = []
    claims: list[BenchClaim] = []
    for k in SYMBOLS:
        a, b, out = _matrices(k, k, size.generation // k)
        # ISA-L follows, once for every copy there is and with its tables made beforehand.
        calls = {tier: _product(tier, a, b, out) for tier in kernels.tiers() if tier != "isal"}
        calls |= _libraries(a, b, out)
        calls["numpy table, take and XOR"] = _table(a, b, out)
        calls["memcpy"] = _copy(b)
        peers = {"galois": _galois(256, a, b), "zfec": _zfec(k, b)}
        calls |= {name: call for name, call in peers.items() if call is not None}
        times = CallTimes(calls, size)
        rows += [_row("encode", k, k, b.size, name, times.time(name)) for name in calls]
        claims += _encoding_claims(times, k)
    return rows, claims


def _encoding_claims(times: CallTimes, k: int) -> list[BenchClaim]:
    libraries = [name for name in times.seconds if name.startswith("ISA-L")]
    goals = [
        ("swar", "numpy table, take and XOR", 12.0, True),
        ("swar", "zfec", 5.0, True),
        # Where there is no ISA-L its claims stay in the table, as skipped, with the reason.
        *[("shuffle256", library, 0.7, True) for library in libraries or ["ISA-L"]],
        *[("gfni512", library, 1.5, True) for library in libraries or ["ISA-L"]],
        *[("gfni512", library, 2.5, False) for library in libraries or ["ISA-L"]],
    ]
    found = []
    for tier, other, bound, gate in goals:
        # Where there is GFNI without 512-bit registers, the claim is the narrower tier's.
        if tier == "gfni512" and tier not in times.seconds and "gfni256" in times.seconds:
            tier = "gfni256"
        name = f"encode, K = {k}: {tier} times as fast as {other}{'' if gate else ' (stretch)'}"
        reason = _missing(times, tier, other)
        value = None if reason else times.faster(tier, other)
        found.append(BenchClaim(name, value, ">=", bound, GOAL, gate, reason))
    return found


def _missing(times: CallTimes, tier: str, other: str) -> str:
    if tier not in times.seconds:
        return kernels.why_not(tier)
    if other not in times.seconds:
        return kernels.why_not("isal") if other == "ISA-L" else why_missing(other)
    return ""


def few_rows(size: Size) -> Part:
    """A few coded symbols of a generation: what a sender of parities, or a decoder with few losses, computes."""
    rows: list[dict[str, Any]] = []
    for k in SYMBOLS:
        for outputs in (1, 4):
            a, b, out = _matrices(outputs, k, size.generation // k)
            calls = {kernels.best_tier(): _product("auto", a, b, out), **_libraries(a, b, out)}
            times = CallTimes(calls, size)
            rows += [_row("few rows", k, outputs, b.size, name, times.time(name)) for name in calls]
    return rows, []


def many_symbols(size: Size) -> Part:
    """Where products become slow: their time grows with K, beside that of a payload's bytes."""
    rows: list[dict[str, Any]] = []
    for k in (64, MOST_SYMBOLS, 2 * MOST_SYMBOLS, 4 * MOST_SYMBOLS):
        a, b, out = _matrices(k, k, max(1, 8 * size.generation // k))
        calls = {kernels.best_tier(): _product("auto", a, b, out)}
        times = CallTimes(calls, size)
        rows += [_row("many symbols", k, k, b.size, name, times.time(name)) for name in calls]
    return rows, []


def small_generations(size: Size) -> Part:
    """Where the call costs more than the product."""
    rows: list[dict[str, Any]] = []
    claims: list[BenchClaim] = []
    for payload in (4096, 65536):
        a, b, out = _matrices(16, 16, payload // 16)
        calls = {kernels.best_tier(): _product("auto", a, b, out), **_libraries(a, b, out)}
        times = CallTimes(calls, size)
        rows += [_row("small generation", 16, 16, payload, name, times.time(name)) for name in calls]
        reason = kernels.why_not("isal")
        for start in ("ISA-L", "tables each time"):
            other = next((name for name in calls if name.startswith(start)), start)
            name = f"generation of {payload} bytes, K = 16: {kernels.best_tier()} times as fast as {other}"
            value = None if reason else times.faster(kernels.best_tier(), other)
            claims.append(BenchClaim(name, value, ">=", 1.0, GOAL, False, reason))
    return rows, claims


def decoding(size: Size) -> Part:
    """The two-phase decoder, e of K symbols missing: coefficients on arrival, then one product.

    The second phase is compared with encoding e rows of the same bodies, where they arrived, and inverting a K x K
    matrix. With arrivals, i.e. all that a decoder does with packets that were parsed, it is compared with what makes e
    packets of a payload that was cut and hashed. Packets are in the buffers they came in, behind their headers. Nobody
    has its sources copied, and all allocate their output within the time that is measured.
    """
    rows: list[dict[str, Any]] = []
    claims: list[BenchClaim] = []
    field = GF256()
    for k in SYMBOLS:
        payload = SplitMix64(k).bytes(size.generation).tobytes()
        source = encoder("rlnc", payload, symbols=k, round=1, source=0, run=7, shards=2 * k)
        limits = PacketLimits()
        for missing in (1, 4, k):
            # The first symbols did not arrive; in their place came as many combinations.
            sent = source.packets([*range(missing, k), *range(k, k + missing)])
            received = [Packet.from_bytes(packet.to_bytes(), limits) for packet in sent]
            a, b, _ = _matrices(missing, k, size.generation // k)
            square = SplitMix64(missing).bytes(k * k).reshape(k, k)

            def arrive(received: Any = received, limits: Any = limits) -> Decoder:
                decoder = Decoder(limits=limits)
                for packet in received:
                    decoder.add(packet)
                return decoder

            calls: Calls = {
                "second phase": Prepared(arrive, Decoder.solve),
                "with arrivals": lambda arrive=arrive: arrive().solve(),  # type: ignore[misc]
                "e-row encode": Prepared(
                    # The decoder lives as long, so that what its arrivals leave in the caches is the same for both.
                    lambda received=received, arrive=arrive: [arrive(), [p.body for p in received]],  # type: ignore[misc]
                    lambda held, a=a: held.append(kernels.matmul(a, kernels.Rows(held[1]))),  # type: ignore[misc]
                ),
                "inversion": lambda square=square: field.inverse(square),  # type: ignore[misc]
                "packets of it": lambda k=k, e=missing, source=source: source.packets(range(k, k + e)),  # type: ignore[misc]
            }
            times = CallTimes(calls, size)
            rows += [_row("decode", k, missing, b.size, name, times.time(name)) for name in calls]
            at = f"decode {missing} missing of K = {k}"
            value = times.ratio(["second phase"], ["e-row encode", "inversion"])
            claims.append(BenchClaim(f"{at}: second phase to e-row encode + inversion", value, "<=", 1.3, LIKE))
            value = times.ratio(["with arrivals"], ["packets of it", "inversion"])
            claims.append(BenchClaim(f"{at}: with arrivals to making e packets + inversion", value, "<=", 1.3, LIKE))
            # Only where products outweigh all else: the larger K, and nothing there as itself.
            if missing == k == max(SYMBOLS):
                value = times.faster("second phase", "e-row encode")
                claims.append(BenchClaim(f"{at}: second phase's rate to encode rate", value, ">=", 0.5, LIKE))
                value = times.faster("with arrivals", "packets of it")
                claims.append(BenchClaim(f"{at}: rate with arrivals to packets' encode rate", value, ">=", 0.5, LIKE))
    return rows, claims


def primes(size: Size) -> Part:
    """Products over prime fields, against galois."""
    rows: list[dict[str, Any]] = []
    claims: list[BenchClaim] = []
    for field in (GF251, GF65521, GF31):
        width = size.generation // 16 // field.symbol_bytes
        stream = SplitMix64(field.order)
        a, b = field.random((16, 16), stream), field.random((16, width), stream)
        out = np.empty((16, width), field.dtype)
        calls: Calls = {
            field.name: lambda f=field, a=a, b=b, out=out: f.matmul(a, b, out=out),  # type: ignore[misc]
        }
        galois = _galois(field.order, a, b)
        if galois is not None:
            calls = {**calls, "galois": galois}
        times = CallTimes(calls, size)
        rows += [_row(f"product, {field.name}", 16, 16, b.nbytes, name, times.time(name)) for name in calls]
        name = f"product over {field.name}, K = 16: times as fast as galois"
        value = None if galois is None else times.faster(field.name, "galois")
        claims.append(BenchClaim(name, value, ">=", 1.0, GOAL, False, why_missing("galois")))
    return rows, claims


def scale(size: Size) -> Part:
    """What else is done to every payload byte: checksums, digests, a copy."""
    data = SplitMix64(3).bytes(size.generation)
    calls: Calls = {
        "crc32": lambda: zlib.crc32(data.data),
        "blake2b": lambda: hashlib.blake2b(data.data, digest_size=8),
        "memcpy": _copy(data),
    }
    times = CallTimes(calls, size)
    return [_row("for scale", 1, 1, data.size, name, times.time(name)) for name in calls], []


def end_to_end(size: Size) -> Part:
    """What a client does with an update of 1 MB, K = 16 for 24 relays: cut, code, make packets, digests and all."""
    payload = SplitMix64(4).bytes(size.generation if size.quick else 1_000_000).tobytes()

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

    times = CallTimes({"share": share, "collect, 8 missing": collect}, size)
    rows = [_row("end to end", 16, 24, len(payload), name, times.time(name)) for name in times.seconds]
    name = "client side of a 1 MB update, K = 16, N = 24: milliseconds"
    return rows, [BenchClaim(name, 1e3 * times.time("share"), "<", 5.0, "below 2 % of a local epoch on digits")]


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
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "galois": "not installed" if why_missing("galois") else importlib.metadata.version("galois"),
    }


def run(size: Size | None = None, say: Callable[[str], None] = lambda _line: None) -> dict[str, Any]:
    """Measure everything; return ``{"rows": [...], "claims": [...], "environment": {...}}``, ready for JSON."""
    size = size or Size()
    # Compilation is not what is measured.
    kernels.warm()
    rows: list[dict[str, Any]] = []
    claims: list[BenchClaim] = []
    for part in (encoding, few_rows, many_symbols, small_generations, decoding, primes, scale, end_to_end):
        say(f"{part.__name__.replace('_', ' ')}: {size.repetitions} interleaved repetitions")
        more, checks = part(size)
        rows += more
        claims += checks
    return {
        "rows": rows,
        # A quick run shows that everything runs; its figures mean nothing, and fail nothing. What was not measured
        # fails nothing either.
        "claims": [
            {**asdict(claim), "ok": claim.ok, "gate": claim.gate and not size.quick and claim.value is not None}
            for claim in claims
        ],
        "environment": environment(),
    }
