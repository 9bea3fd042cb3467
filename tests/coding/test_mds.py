"""Systematic Cauchy Reed-Solomon: any K packets decode, always; with random symbols any T packets say nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from galois_oracle import gf256
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcomp.coding.code import payload_digest
from fedcomp.coding.elimination import rank
from fedcomp.coding.encoder import encoder
from fedcomp.coding.errors import NotDecodable
from fedcomp.coding.packet import Mode, Packet, PacketLimits, cauchy_rows
from fedcomp.coding.rlnc import Decoder, Recoder
from fedcomp.coding.stream import SplitMix64, derive
from fedcomp.errors import ConfigError

WHERE = {"round": 1, "source": 2, "run": 3}


def data(length: int) -> bytes:
    return SplitMix64(derive("payload", length)).bytes(length).tobytes()


def decode(packets: list[Packet], threshold: int = 0) -> bytes:
    receiver = Decoder(threshold=threshold)
    for packet in packets:
        receiver.add(Packet.from_bytes(packet.to_bytes(), PacketLimits()))
    return receiver.payload()


def test_parity_vectors() -> None:
    assert cauchy_rows(range(3), 4).tolist() == [[71, 167, 122, 186], [167, 71, 186, 122], [122, 186, 71, 167]]
    source = encoder("mds", bytes(range(16)), symbols=4, shards=7, align=4, **WHERE)
    bodies = [packet.body.tobytes().hex() for packet in source.packets(range(7))]
    assert bodies == ["00010203", "04050607", "08090a0b", "0c0d0e0f", "3a1a7a5a", "ba9afada", "27076747"]
    assert [packet.mode for packet in source.packets(range(7))] == [Mode.SYSTEMATIC] * 4 + [Mode.CAUCHY] * 3
    assert [packet.number for packet in source.packets(range(7))] == [0, 1, 2, 3, 0, 1, 2]


def generator(symbols: int, shards: int) -> np.ndarray:
    """Return all coefficient rows, shape (shards, symbols)."""
    source = encoder("mds", bytes(64 * symbols), symbols=symbols, shards=shards, **WHERE)
    return np.stack([source.coefficients(index) for index in range(shards)])


@pytest.mark.parametrize(("symbols", "shards"), [(1, 8), (2, 9), (3, 9), (4, 10), (7, 10), (5, 11)])
def test_every_choice_of_k_rows_is_invertible(symbols: int, shards: int) -> None:
    rows = generator(symbols, shards)
    for chosen in itertools.combinations(range(shards), symbols):
        assert rank(rows[list(chosen)]) == symbols, chosen


@pytest.mark.parametrize(
    ("symbols", "shards", "choices"), [(16, 256, 300), (64, 128, 60), (128, 256, 20), (200, 256, 8)]
)
def test_sampled_choices_of_k_rows_are_invertible_up_to_the_last_row(symbols: int, shards: int, choices: int) -> None:
    rows = generator(symbols, shards)
    stream = SplitMix64(derive(symbols, shards))
    for number in range(choices):
        chosen = stream.shuffle(shards)[:symbols]
        if number == 0:
            chosen = np.arange(shards - symbols, shards)  # parities alone where there are enough of them
        assert rank(rows[chosen]) == symbols


@pytest.mark.slow
def test_powers_under_an_identity_are_no_mds_code() -> None:
    """The usual wrong construction: rows 2^(ij) below the identity have singular choices already for small codes."""
    symbols, parities = 10, 5
    powers = gf256(2) ** np.array([[i * j for j in range(symbols)] for i in range(parities)])
    rows = np.concatenate([np.eye(symbols, dtype=np.uint8), np.asarray(powers, np.uint8)])
    sound = generator(symbols, symbols + parities)

    def singular(matrix: np.ndarray) -> int:
        choices = itertools.combinations(range(symbols + parities), symbols)
        return sum(rank(matrix[list(chosen)]) < symbols for chosen in choices)

    assert singular(rows) > 0
    assert singular(sound) == 0


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(1, 64), st.sampled_from([0, 1, 63, 64, 65, 2**20 + 7]), st.integers(0, 2**32), st.booleans())
def test_any_k_packets_decode(symbols: int, length: int, seed: int, cauchy: bool) -> None:
    payload = data(length)
    mode: Any = "cauchy" if cauchy else "systematic"
    source = encoder("mds", payload, symbols=symbols, shards=2 * symbols, mode=mode, **WHERE)
    chosen = SplitMix64(seed).shuffle(2 * symbols)[: source.symbols]
    assert decode(source.packets(chosen.tolist())) == payload


@pytest.mark.slow
def test_a_relay_may_recode_mds_packets() -> None:
    payload = data(5000)
    packets = encoder("mds", payload, symbols=7, shards=10, **WHERE).packets(range(10))
    relay = Recoder()
    for packet in packets[3:]:
        relay.add(packet)
    assert decode([relay.recode(derive(count)) for count in range(9)]) == payload


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symbols": 257}, "at most 256 shards for 257 symbols"),
        ({"shards": 257}, "at most 256"),
        ({"shards": 7}, "shards = 7 of 8"),
        ({"mode": "random"}, "mode = 'random'"),
        ({"mode": "cauchy", "symbols": 129}, "at most 127 shards for 129 symbols"),
        ({"mode": "cauchy", "shards": 249}, "at most 248"),
        ({"threshold": 121}, "at most 127 shards for 129"),
        ({"threshold": 3, "shards": 10}, "shards = 10 of 11"),
    ],
)
def test_what_the_field_has_no_rows_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder("mds", data(20_000), **{"symbols": 8, **WHERE, **changes})


def test_all_256_packets_of_the_field_exist() -> None:
    source = encoder("mds", data(2000), symbols=8, **WHERE)
    assert source.shards == 256
    assert decode(source.packets(range(248, 256))) == data(2000)
    with pytest.raises(ConfigError, match="packets 0 to 255"):
        source.packet(256)


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1, 100, 5000, 2**20 + 7])
def test_private_payloads_decode_from_k_plus_t_and_from_no_less(length: int) -> None:
    payload = data(length)
    source = encoder("mds", payload, symbols=5, shards=12, threshold=3, **WHERE)
    packets = source.packets(range(12))
    assert {packet.mode for packet in packets} == {Mode.CAUCHY}
    needed = source.symbols
    assert needed == source.shape.symbols + 3
    stream = SplitMix64(length)
    for _ in range(6):
        chosen = stream.shuffle(12).tolist()
        assert decode([packets[index] for index in chosen[:needed]], threshold=3) == payload
        with pytest.raises(NotDecodable, match="1 more"):
            decode([packets[index] for index in chosen[: needed - 1]], threshold=3)


def test_partial_results_of_a_private_payload_are_data_only() -> None:
    payload = data(5000)
    source = encoder("mds", payload, symbols=5, shards=12, threshold=3, **WHERE)
    receiver = Decoder(threshold=3)
    for packet in source.packets(range(8)):
        assert receiver.partial() == {}
        receiver.add(packet)
    found = receiver.partial()
    assert sorted(found) == list(range(5))
    assert b"".join(found.values()) == payload == receiver.payload()
    with pytest.raises(ConfigError, match="symbol 5"):
        receiver.symbol(5)


@pytest.mark.parametrize(("symbols", "threshold", "shards"), [(4, 1, 9), (3, 2, 10), (5, 3, 11)])
def test_the_random_part_of_any_t_packets_is_invertible(symbols: int, threshold: int, shards: int) -> None:
    """Why T packets say nothing: their T by T part over the random symbols is a bijection, whatever the payload is."""
    rows = cauchy_rows(range(shards), symbols + threshold)[:, symbols:]
    for chosen in itertools.combinations(range(shards), threshold):
        assert rank(rows[list(chosen)]) == threshold


def pair_table(payload: bytes, chosen: tuple[int, int], trials: int) -> np.ndarray:
    """Return counts of the upper four bits of the first byte of two shards, over many encodings; shape (16, 16)."""
    counts = np.zeros((16, 16), np.int64)
    for seed in range(trials):
        made = encoder("mds", payload, symbols=1, shards=6, threshold=2, insecure_seed=derive(seed, payload), **WHERE)
        one, two = (packet.body[0, 0] >> 4 for packet in made.packets(chosen))
        counts[one, two] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(0, 1), (2, 5)])
def test_any_t_shards_are_uniform_whatever_the_payload(chosen: tuple[int, int]) -> None:
    trials, cells = 2560, 256
    for payload in (bytes(64), bytes([255]) * 64):
        counts = pair_table(payload, chosen, trials)
        chi_square = float(((counts - trials / cells) ** 2 / (trials / cells)).sum())
        assert abs(chi_square - (cells - 1)) < 5 * np.sqrt(2 * (cells - 1))


def test_one_shard_more_than_t_is_not_uniform() -> None:
    """K = 1, T = 1: with two shards the payload is determined, so that pairs of them fall on 256 of 65536 places."""
    pairs = set()
    for seed in range(600):
        made = encoder("mds", bytes(64), symbols=1, shards=4, threshold=1, insecure_seed=seed, **WHERE)
        one, two = (int(packet.body[0, 0]) for packet in made.packets([0, 1]))
        pairs.add((one, two))
    assert len(pairs) <= 256


def test_random_symbols_come_from_the_operating_system() -> None:
    common = {"symbols": 2, "shards": 6, "threshold": 1, **WHERE}
    one, two = (encoder("mds", data(200), **common) for _ in range(2))
    assert not np.array_equal(one.packet(0).body, two.packet(0).body)
    fixed = [encoder("mds", data(200), insecure_seed=5, **common).packet(0).to_bytes() for _ in range(2)]
    assert fixed[0] == fixed[1]
    assert one.packet(0).to_bytes() == one.packet(0).to_bytes(), "but one encoder's packets stay what they are"


def test_the_digest_of_a_private_payload_tells_nothing_about_it() -> None:
    """Every relay reads the header: a digest of the payload alone would confirm a guess."""
    payload = data(200)
    common = {"symbols": 2, "shards": 6, **WHERE}
    assert encoder("mds", payload, **common).digest == payload_digest(payload)
    digests = {encoder("mds", payload, threshold=1, **common).digest for _ in range(5)}
    assert len(digests) == 5
    assert payload_digest(payload) not in digests
