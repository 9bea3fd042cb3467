"""Advice of coded rounds, graphs and codes."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from advice import INTEGERS, PROMISE, Row, coded_sum, ended, local, quiet, row, same, shares, system, trains
from flwr.serverapp.strategy import FedAdam, FedMedian
from peer_key_files import make_key, make_list
from toy import model

from fedcomp.clients.compressed import compression
from fedcomp.clients.edge.options import parse
from fedcomp.clients.private.mod import private
from fedcomp.codecs import QSGD, FixedPoint, ModularSum, RandomK, TopK, chain
from fedcomp.coding import sumcode
from fedcomp.coding.datacode import CodedStep, data_plan
from fedcomp.coding.decodability import decode_rate, loss_sets
from fedcomp.coding.gradcode import SCHEMES, Assignment, Cyclic, FractionalRepetition, assignment
from fedcomp.coding.gradvalues import values_of
from fedcomp.coding.kernels import isal
from fedcomp.coding.kernels.dispatch import TIERS, load, tiers
from fedcomp.coding.kernels.product import matmul, reduce
from fedcomp.coding.kernels.rows import Rows
from fedcomp.coding.listener import Listener, ListenerLimits
from fedcomp.coding.packet import Packet, PacketLimits
from fedcomp.coding.parcels import Parcel
from fedcomp.coding.peertls import PeerKeys, PeerTls
from fedcomp.coding.plan import shards
from fedcomp.coding.prime import FIELDS, GF31
from fedcomp.coding.relay import RelayPlan, check
from fedcomp.coding.sealkeys import require_signed, sign
from fedcomp.coding.spool import Spool, SpoolRoot
from fedcomp.coding.sumcode import SumPlan
from fedcomp.coding.transport import TcpSender, transport_of
from fedcomp.errors import FedcompError
from fedcomp.kernels.tiers import ops
from fedcomp.privacy.local import Privatise
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gcn.strategy import SkewedGCN
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

BYTES = np.arange(12, dtype=np.uint8).reshape(3, 4)


def read_only() -> Any:
    array = np.zeros((3, 4), np.uint8)
    array.flags.writeable = False
    return array


IDENTITY = np.eye(3, dtype=np.uint8)


def links_failed(**options: Any) -> bool:
    """Whether a link took nothing in the second round."""
    try:
        refused(**options)
    except FedcompError as error:
        return bool(str(error))
    return False


def refused(**options: Any) -> None:
    """Raise what the second round's report says of links that took nothing."""
    strategy = CodedFedAvg(quiet(), transport="peers", **options)
    ended(strategy)
    raise FedcompError("; ".join(strategy.reports[2].notes))


CODING = (
    row(
        "{}): lower symbols or threshold, or ask more clients (fraction_train, min_available_nodes)",
        lambda: ended(CodedFedAvg(quiet(), symbols=4, threshold=2, code="mds")),
        lambda: (
            same(CodedFedAvg(quiet(), symbols=2, threshold=2, code="mds"), quiet())
            and same(CodedFedAvg(quiet(), symbols=4, threshold=2, code="mds"), quiet(), nodes=6)
        ),
    ),
    row(
        "one for each shard: lower shards or symbols, or ask more clients (fraction_train, min_available_nodes)",
        lambda: ended(CodedFedAvg(quiet(), symbols=2, shards=5, code="mds")),
        lambda: (
            same(CodedFedAvg(quiet(), symbols=2, shards=4, code="mds"), quiet())
            and same(CodedFedAvg(quiet(), symbols=2, shards=5, code="mds"), quiet(), nodes=5)
        ),
    ),
    row(
        "min_contributors {}): lower these options, or ask more clients (fraction_train, min_available_nodes)",
        lambda: ended(coded_sum(symbols=4, threshold=2)),
        lambda: trains(coded_sum(symbols=3, threshold=1)) and trains(coded_sum(symbols=4, threshold=2), nodes=6),
    ),
    row(
        "connect more clients before the run starts, or set a smaller population",
        lambda: ended(shares(), nodes=2),
        lambda: trains(shares(), nodes=3) and trains(shares(population=3), nodes=2),
    ),
    row(
        "of at most {} bytes; raise max_store_bytes, or send smaller or fewer shards",
        lambda: refused(symbols=2, max_store_bytes=12000),
        lambda: all(
            not links_failed(code="mds", **options)
            for options in (
                {"symbols": 2, "max_store_bytes": 24000},
                {"symbols": 4, "max_store_bytes": 12000},
                {"symbols": 2, "shards": 2, "max_store_bytes": 12000},
            )
        ),
    ),
    row(
        "a coded sum adds integers, {} sends floating-point models; wrap it",
        lambda: coded_sum(quiet()),
        lambda: same(coded_sum(Compressed(quiet(), FixedPoint(RandomK(1.0), clip=1024.0, levels=1024))), quiet()),
    ),
    row(
        "set threshold >= 1, so that T relays together learn nothing, or symbols >= 2",
        lambda: coded_sum(symbols=1, threshold=0),
        lambda: trains(coded_sum(symbols=1, threshold=1)) and trains(coded_sum(symbols=2, threshold=0)),
    ),
    row(
        "mode='mask' hides updates behind masks that T relays must not know: set threshold",
        lambda: coded_sum(mode="mask", threshold=0),
        lambda: trains(coded_sum(mode="mask", threshold=1)),
    ),
    row(
        "set weighted=False, or use FixedPoint, which has none",
        lambda: coded_sum(Compressed(quiet(), ModularSum(RandomK(1.0), clip=1024.0, levels=1024))),
        lambda: (
            trains(coded_sum(Compressed(quiet(), ModularSum(RandomK(1.0), clip=1024.0, levels=1024)), weighted=False))
            and trains(coded_sum())
        ),
    ),
    row(
        "Use a model without running statistics and counters",
        lambda: ended(coded_sum(), start=model(counter=True)),
        lambda: (
            trains(coded_sum())
            and trains(
                CodedFedAvg(Compressed(quiet(), INTEGERS), construction="relay", symbols=2), start=model(counter=True)
            )
        ),
    ),
    row(
        "has no effect in a gradient code: leave it out, and use losses= for the number of clients that may be lost",
        lambda: CodedFedAvg(quiet(), construction="gradcode", symbols=3),
        lambda: CodedFedAvg(quiet(), construction="gradcode", losses=1),
    ),
    row(
        "put {} itself into CodedFedAvg, without Compressed",
        lambda: CodedFedAvg(Compressed(quiet(), TopK(0.1)), construction="gradcode", losses=1),
        lambda: CodedFedAvg(quiet(), construction="gradcode", losses=1),
    ),
    row(
        "which a gradient code does not show; use one of {}",
        lambda: CodedFedAvg(quiet(FedMedian), construction="gradcode", losses=1),
        lambda: CodedFedAvg(quiet(FedAdam), construction="gradcode", losses=1),
    ),
    row(
        "use arithmetic='float64', or scheme='fractional'",
        lambda: CodedFedAvg(
            quiet(), construction="gradcode", losses=1, approximate=True, arithmetic="gf31", scheme="cyclic"
        ),
        lambda: (
            CodedFedAvg(
                quiet(), construction="gradcode", losses=1, approximate=True, arithmetic="float64", scheme="cyclic"
            )
            and CodedFedAvg(
                quiet(), construction="gradcode", losses=1, approximate=True, arithmetic="gf31", scheme="fractional"
            )
        ),
    ),
    row(
        "are; use distributed_dp() or local_dp()",
        lambda: CodedFedAvg(Compressed(DpFedAvg(quiet(), clip=1.0, **PROMISE), TopK(0.1)), construction="gradcode"),
        lambda: trains(shares()) and trains(local(), (compression, private)),
    ),
    row(
        "are; use distributed_dp() or local_dp()",
        lambda: CodedFedAvg(DpFedAvg(quiet(), clip=1.0, **PROMISE), symbols=2),
        lambda: trains(shares()) and trains(CodedFedAvg(local(), symbols=2), (compression, private)),
    ),
)


GRAPHS = (
    row(
        "checks replies by itself: give it the guard, not SkewedGCN",
        lambda: SkewedGCN(Compressed(quiet(), TopK(0.1)), guard=Norms()),
        lambda: SkewedGCN(Compressed(quiet(), TopK(0.1), guard=Norms())),
    ),
    row("strategy without one", lambda: SkewedGCN(DpFedAvg(quiet(), clip=1.0, **PROMISE)), lambda: SkewedGCN(quiet())),
    row(
        "promise would not hold. Use a codec that does not privatise",
        lambda: SkewedGCN(Compressed(quiet(), chain(Privatise(1.0, 0.5, insecure_deterministic=True), QSGD(7)))),
        lambda: SkewedGCN(Compressed(quiet(), QSGD(7))),
    ),
    row("{} has none; set momentum=0", lambda: system("beer", momentum=0.5), lambda: system("beer", momentum=0.0)),
)


DEVICES = np.random.default_rng(5).standard_normal((4, 3))


def margins(devices: int, answered: Sequence[int], density: float = 0.1, step: bool = False) -> Any:
    """Return the margins, or the gradient, of four partitions of a row each, by a code of a given density."""
    plan = data_plan("binary", devices, 4, density=density, seed=3)
    coded, model = plan.matrix @ DEVICES, np.ones(3)
    if not step:
        return plan.subset(answered).margins((coded @ model)[list(answered), None])[:, 0]
    descent = CodedStep(plan, [np.ones(1)] * 4, "squares")
    descent.decode({i: coded[i : i + 1] @ model for i in range(devices)})
    assigned = descent.assign(answered)
    descent.take({i: coded[i] * vector[0] for i, vector in assigned.items()})
    return descent.gradient


def decodes(step: bool) -> bool:
    """Whether more devices, more parities and a denser code give what the partitions themselves do."""
    right = DEVICES.T @ (DEVICES.sum(axis=1) - 1) if step else DEVICES.sum(axis=1)
    others = margins(5, range(5), step=step)
    more = margins(12, (0, 1, 2, *range(4, 12)), step=step)
    denser = margins(5, (0, 1, 2, 4), density=1.0, step=step)
    return all(np.allclose(found, right) for found in (others, more, denser))


def gradients(code: Assignment, answered: Sequence[int], *, approximate: bool = False) -> Any:
    """Return what a gradient code makes of partitions whose gradients are 1, 2, 3, ..."""
    parts = np.arange(1, code.n + 1).astype(code.dtype)[:, None]
    answers = {i: code.combine(i, [parts[j] for j in code.partitions(i)]) for i in answered}
    return code.decode(answers, approximate=approximate)[0]


def least_squares(code: Assignment, answered: Sequence[int]) -> bool:
    """Whether an approximate decoding is the best there is: what it lacks is at right angles to every answer."""
    found = code.decoding(answered, approximate=True)
    lacking = code.matrix.T @ found.coefficients - 1
    return np.allclose(code.matrix[list(answered)] @ lacking, 0) and 0 < found.residual < np.sqrt(code.n)


def packed(arithmetic: str) -> bool:
    values, weights = values_of(arithmetic, 2, 1.0), np.array([0.5, 1e13])
    return np.array_equal(np.concatenate(values.unpack(values.pack(weights[:1], weights[1:]), 1)), weights)


def a_packet(**changes: Any) -> Packet:
    (made,) = RelayPlan("mds", symbols=2, shards=3, round=1).encode(0, b"an update").packets([2])
    return replace(made, **changes)


def short_rows() -> Any:
    with patch.object(isal, "_LONGEST", 3):
        return isal.Library("none", None).prepare(IDENTITY, BYTES, np.zeros_like(BYTES))


CODES = (
    row(
        "partitions need rank {}; wait for others, or use more parities or a denser code",
        lambda: margins(5, (0, 1, 2, 4)),
        lambda: decodes(step=False),
    ),
    row(
        "cannot give this gradient of {} partitions; wait for others, or use more parities or a denser code",
        lambda: margins(5, (0, 1, 2, 4), step=True),
        lambda: decodes(step=True),
    ),
    row(
        "give either lost (how many devices) or loss (the probability of each)",
        lambda: decode_rate(data_plan("gaussian", 6, 4), lost=2, loss=0.1, trials=20),
        lambda: (
            decode_rate(data_plan("gaussian", 6, 4), lost=0, trials=20).value
            == decode_rate(data_plan("gaussian", 6, 4), loss=0.0, trials=20).value
            == 1.0
        ),
    ),
    row(
        "cannot be decoded approximately; use float64 (field=None), or fractional repetition",
        lambda: gradients(Cyclic(6, 1, field=GF31), (0, 2), approximate=True),
        lambda: (
            least_squares(Cyclic(6, 1), (0, 2))
            and gradients(FractionalRepetition(6, 1, GF31), (0, 2), approximate=True) == 1 + 2 + 3 + 4
        ),
        long=True,
    ),
    row(
        "repetition, code over a prime field, or allow a larger max_amplification",
        lambda: Cyclic(5, 2, max_amplification=1.0),
        lambda: (
            gradients(FractionalRepetition(6, 2), (0, 4)) == 21
            and gradients(Cyclic(5, 2, field=GF31), (0, 2, 3)) == 15
            and np.isclose(gradients(Cyclic(5, 2, max_amplification=1e3), (0, 2, 3)), 15)
        ),
        long=True,
    ),
    row("a field has room for {}. Use arithmetic='float64'", lambda: packed("gf31"), lambda: packed("float64")),
    row(
        "ISA-L takes rows of at most {} bytes, not {}; use another tier",
        short_rows,
        lambda: all((matmul(IDENTITY, BYTES, tier=tier) == BYTES).all() for tier in tiers() if tier != "isal"),
    ),
    row(
        "a matrix in separate rows has at least one; pass an array of shape (0, s)",
        lambda: matmul(np.zeros((2, 0), np.uint8), Rows([])),
        lambda: np.array_equal(matmul(np.zeros((2, 0), np.uint8), BYTES[:0]), np.zeros((2, 4))),
    ),
    row(
        "is not valid: give a whole number",
        lambda: a_packet(round=1.5),
        lambda: Packet.from_bytes(a_packet(round=2).to_bytes(), PacketLimits()).round == 2,
    ),
    row("and {} is not a multiple of it; use a ", lambda: FractionalRepetition(5, 1), lambda: Cyclic(5, 1)),
    row(
        "unknown scheme {}; choose one of {}",
        lambda: assignment(6, 1, scheme="none"),
        lambda: [assignment(6, 1, scheme=scheme) for scheme in SCHEMES],
    ),
    row(
        "but no out was given; pass it",
        lambda: matmul(IDENTITY, BYTES, accumulate=True),
        lambda: (matmul(IDENTITY, BYTES, out=np.zeros((3, 4), np.uint8), accumulate=True) == BYTES).all(),
    ),
    row(
        "out is read-only; pass a writable array",
        lambda: matmul(IDENTITY, BYTES, out=read_only()),
        lambda: (matmul(IDENTITY, BYTES, out=np.zeros((3, 4), np.uint8)) == BYTES).all(),
    ),
    row(
        "would overwrite it while it is read; pass another array",
        lambda: matmul(IDENTITY, BYTES, out=BYTES),
        lambda: (matmul(IDENTITY, BYTES, out=np.zeros((3, 4), np.uint8)) == BYTES).all(),
    ),
    row("has to be writable; pass a copy", lambda: reduce(read_only(), 3), lambda: reduce(read_only().copy(), 3) == 0),
    row(
        "cannot run here: {}; use 'auto' or one of {}",
        lambda: load(next(tier for tier in TIERS if tier not in tiers())),
        lambda: all((matmul(IDENTITY, BYTES, tier=tier) == BYTES).all() for tier in ("auto", *tiers())),
    ),
    row(
        "take fewer symbols, more relays or a lower target",
        lambda: shards(8, 0.5, most=9),
        lambda: shards(2, 0.5, most=20) and shards(8, 0.5, most=60) and shards(8, 0.5, most=20, target=0.5),
    ),
    row(
        "grows with K, and codes at most {}: set fewer symbols",
        lambda: check(code="rlnc", symbols=129, shards=0, threshold=0),
        lambda: check(code="rlnc", symbols=128, shards=0, threshold=0) is None,
    ),
    row(
        "ways to lose {} of {} devices; use decode_rate() instead",
        lambda: loss_sets(60, 20),
        lambda: decode_rate(partial(data_plan, "gaussian", 60, 40), lost=20, trials=20),
    ),
    row(
        "unknown kernel tier {}; use 'auto', 'numba' or 'numpy'",
        lambda: ops("none", 9),
        lambda: ops("auto", 9) and ops("numba", 9) and ops("numpy", 9),
    ),
)


def summed(plan: SumPlan, weights: Sequence[int], vectors: Any = ((1, -2, 3), (10, 20, -30))) -> bool:
    """Whether the last relays that are needed give the sum of two weighed vectors."""
    given = [np.array(vector) for vector in vectors]
    extras = [most // 2 for most in plan.extras]
    made = [sumcode.shares(plan, sumcode.contribution(plan, *one, extras)) for one in zip(given, weights, strict=True)]
    relays = range(plan.relays)[-plan.needed :]
    found = sumcode.decode(plan, {relay: plan.field.sum([rows[relay] for rows in made]) for relay in relays})
    right = sum(weight * vector for weight, vector in zip(weights, given, strict=True))
    return np.array_equal(found.integers, right) and found.extras == tuple(2 * number for number in extras)


def sum_plan(prime: int = 1, **changes: Any) -> SumPlan:
    given = {"size": 3, "bound": 30, "contributors": 2, "relays": 5, "symbols": 2, "threshold": 1}
    return SumPlan(FIELDS[prime], **{**given, **changes})


SUMS = (
    row(
        "is not within 0 to {}, for which the plan has room; raise max_weight",
        lambda: summed(sum_plan(max_weight=4), (1, 5)),
        lambda: summed(sum_plan(max_weight=5), (1, 5)),
    ),
    row(
        "different rows for relays, the plan has {}; use a larger prime",
        lambda: sum_plan(prime=0, relays=251),
        lambda: summed(sum_plan(prime=1, relays=251), (1, 1)),
    ),
    row(
        "beyond {} = (p-1)/2 of {}; use a larger prime",
        lambda: sum_plan(prime=0, extras=(100,)),
        lambda: summed(sum_plan(prime=1, extras=(100,)), (1, 1)),
    ),
    row(
        "the plan has {}; lower symbols or threshold, or have more relays",
        lambda: sum_plan(symbols=4, threshold=2),
        lambda: all(
            summed(sum_plan(symbols=symbols, threshold=threshold, relays=relays), (1, 1))
            for symbols, threshold, relays in ((3, 2, 5), (4, 1, 5), (4, 2, 6))
        ),
    ),
)


RUN, SHARD = b"run-0001", b"a shard"


def parcel(source: int = 0, round: int = 1) -> Parcel:
    return Parcel(RUN, round, 1, source, 2, SHARD)


def other_release(data: bytes) -> bytes:
    return data[:4] + bytes([data[4] + 1]) + data[5:]


def keeps(store: Spool, sent: Sequence[Parcel]) -> bool:
    """Whether a store takes parcels and gives them back."""
    return all(store.put(one) for one in sent) and store.list(RUN, sent[0].round) == list(sent)


def spool(folder: Path, **options: Any) -> Spool:
    return Spool(folder / "store", **options)


def below_a_file(folder: Path) -> Spool:
    (folder / "file").touch()
    return spool(folder / "file")


def after_a_round(folder: Path) -> bool:
    store = spool(folder / "dropped", max_parcels=2)
    store.put(parcel(0))
    store.put(parcel(1))
    return store.drop_before(RUN, 2) > 0 and keeps(store, [parcel(0, 2), parcel(1, 2)])


def without_locks(call: Any) -> Any:
    with patch.dict(sys.modules, {"fcntl": None}):
        return call()


def heard(folder: Path, port: int = 0) -> bool:
    """Whether a parcel that is sent to a listener at a port, 0 for any that is free, is in its store."""
    store, sender = spool(folder), TcpSender()
    listener = Listener(store, ListenerLimits())

    def ready(address: str) -> None:
        sent = asyncio.get_running_loop().run_in_executor(None, sender.send, f"tcp://{address}", parcel())
        sent.add_done_callback(lambda _: listener.stop())

    asyncio.run(listener.run("127.0.0.1", port, ready))
    return store.list(RUN, 1) == [parcel()]


def at_a_taken_port(folder: Path) -> bool:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return heard(folder, taken.getsockname()[1])


def signed(folder: Path, listed: Sequence[int], *, with_key: bool = True) -> bool:
    """Whether the seal key of partition 2, which its node signs where it has a key, is taken, and a false one not."""
    keys = {i: make_key(folder / f"node-{i}") for i in (1, 2)}
    known = PeerKeys.read(make_list(folder / "peers", {i: keys[i] for i in listed}))
    own = PeerTls(keys[2], PeerKeys.read(make_list(folder / "all", keys)))
    require_signed(known, 2, RUN, bytes(32), sign(own, RUN, bytes(32)) if with_key else b"")
    return not known.signed(2, bytes(32), sign(own, RUN, bytes(32)))


def over_a_spool(folder: Path, store: Path | None) -> bool:
    address = SpoolRoot.create(folder).address(2)
    transport = transport_of(address, store)
    transport.send(address, parcel())
    return transport.store.list(RUN, 1) == [parcel()]


def between_nodes() -> bool:
    """Whether a node's command line takes an address for parcels."""
    node = parse(["--superlink", "a:1", "--insecure", "--partition", "0", "--of", "2", "--peer", "192.168.1.7:9100"])
    return node.peer == "192.168.1.7:9100"


PEERS = (
    Row("choose an address of this machine and a free port", at_a_taken_port, heard),
    row(
        "this receiver reads version {} with 0: run the same release on all nodes",
        lambda: Parcel.from_bytes(other_release(parcel().to_bytes())),
        lambda: Parcel.from_bytes(parcel().to_bytes()) == parcel(),
    ),
    Row("nothing is sealed for it; add its line", lambda path: signed(path, (1,)), lambda path: signed(path, (1, 2))),
    Row(
        "is not signed, so nothing is sealed for it; start its node with --key and --peer-keys",
        lambda path: signed(path, (1, 2), with_key=False),
        lambda path: signed(path, (1, 2)),
    ),
    Row(
        "parcels in a directory need POSIX file locks; use transport='hub' here",
        lambda path: without_locks(lambda: spool(path)),
        lambda _: without_locks(lambda: same(CodedFedAvg(quiet(), symbols=2, transport="hub"), quiet())),
    ),
    Row("cannot be made: {}; choose another folder", below_a_file, lambda path: keeps(spool(path), [parcel()])),
    Row(
        "send fewer shards, or drop those of rounds that are over with drop_before()",
        lambda path: keeps(spool(path, max_parcels=2), [parcel(0), parcel(1), parcel(2)]),
        lambda path: keeps(spool(path, max_parcels=2), [parcel(0), parcel(1)]) and after_a_round(path),
    ),
    Row(
        "of a deployment need 'python -m fedcomp.clients.edge --peer HOST:PORT', or use transport='hub'",
        SpoolRoot,
        lambda _: between_nodes() and same(CodedFedAvg(quiet(), transport="hub"), quiet()),
    ),
    Row(
        "{} is its own store; leave out {}",
        lambda path: over_a_spool(path, path / "store"),
        lambda path: over_a_spool(path, None),
    ),
)


ROWS: tuple[Row, ...] = (*CODING, *GRAPHS, *CODES, *SUMS, *PEERS)
