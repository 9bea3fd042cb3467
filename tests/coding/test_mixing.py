"""Multi-source mixing without a network: everybody or nobody, and a wrong combination is never taken for a payload."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedcomp.coding.errors import NotDecodable, PacketError
from fedcomp.coding.mixing import FRAMING, MixPlan, Mixture
from fedcomp.coding.stream import SplitMix64
from fedcomp.errors import ConfigError

PLAN = MixPlan(5, 1024, 3, seed=7)


def payload(client: int) -> bytes:
    return SplitMix64(client).bytes(200 + 150 * client).tobytes()


SYMBOLS = [PLAN.packet(client, payload(client)) for client in range(5)]


def decoded(mixture: Mixture) -> list[int]:
    found = []
    for client in range(5):
        try:
            assert mixture.payload(client) == payload(client)
            found.append(client)
        except NotDecodable:
            continue
    return found


def test_as_many_combinations_as_clients_give_everybody_and_one_fewer_nobody() -> None:
    mixture = Mixture(PLAN)
    for number, relay in enumerate(range(5), start=1):
        for data in PLAN.combine(SYMBOLS, relay, 0, 1):
            assert mixture.add(relay, data)
        assert decoded(mixture) == (list(range(5)) if number == 5 else [])
    assert (mixture.received, mixture.innovative, mixture.dependent) == (5, 5, 0)


def test_relays_that_hold_some_of_the_symbols_add_up() -> None:
    mixture = Mixture(PLAN)
    for relay in range(5):
        held = [SYMBOLS[relay], SYMBOLS[(relay + 1) % 5]]
        for data in PLAN.combine(held, relay, 0, 1):
            mixture.add(relay, data)
    assert decoded(mixture) == list(range(5))
    assert PLAN.combine([], 0, 0, 3) == []
    assert PLAN.combine(SYMBOLS[:1], 0, 0, 1) == SYMBOLS[:1], "a single one is forwarded as it is"


def test_a_client_that_sent_nothing_is_missing_and_the_others_are_not() -> None:
    mixture = Mixture(PLAN)
    held = [symbol for client, symbol in enumerate(SYMBOLS) if client != 2]
    for data in PLAN.combine(held, 0, 0, 6):
        mixture.add(0, data)
    assert (mixture.rank, mixture.dependent) == (4, 2)
    assert decoded(mixture) == [0, 1, 3, 4]


def test_one_wrong_combination_spoils_everybody_and_passes_for_nobody() -> None:
    mixture = Mixture(PLAN)
    good = PLAN.combine(SYMBOLS, 0, 0, 5)
    wrong = PLAN.parse(good[2])
    good[2] = dataclasses.replace(wrong, body=wrong.body ^ np.uint8(1), _wire_bytes=None).to_bytes()
    for data in good:
        mixture.add(0, data)
    assert mixture.rank == 5
    assert decoded(mixture) == []


def test_packets_of_others_are_refused() -> None:
    mixture = Mixture(PLAN)
    for plan in (MixPlan(5, 1024, 4, seed=7), MixPlan(6, 1024, 3, seed=7), MixPlan(5, 1088, 3, seed=7)):
        assert not mixture.add(1, plan.packet(0, b"x"))
    assert not mixture.add(1, b"noise")
    assert len(mixture.refused) == 4
    with pytest.raises(PacketError):
        PLAN.combine([MixPlan(5, 1024, 4, seed=7).packet(0, b"x")], 0, 0, 1)
    with pytest.raises(NotDecodable, match="no combination came"):
        Mixture(PLAN).payload(0)


def test_lengths_at_the_edges() -> None:
    room = 1024 - FRAMING.size
    plan = MixPlan(1, 1024, 0)
    for length in (0, 1, room):
        mixture = Mixture(plan)
        data = plan.packet(0, bytes(length))
        assert len(data) <= plan.max_packet
        mixture.add(0, data)
        assert mixture.payload(0) == bytes(length)
    with pytest.raises(ConfigError, match="raise mix_bytes"):
        plan.packet(0, bytes(room + 1))
    for clients, size in ((0, 64), (1025, 64), (2, 63), (2, 0), (1024, 1 << 22)):
        with pytest.raises(ConfigError):
            MixPlan(clients, size, 0)
