"""What cannot work is refused where it is written, by the argument's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedcomp as fc
from fedcomp.errors import ConfigError
from fedcomp.flower.report import Reports
from fedcomp.gossip import get_algorithm

TOPK = fc.TopK(density=0.1)
PAIR = fc.Compressed(FedAvg(), TOPK)
HALVES = (fc.compression,)
SEEDED: dict[str, Callable[..., object]] = {
    "Compressed": lambda **seed: fc.Compressed(FedAvg(), TOPK, **seed),
    "SharedSupport": lambda **seed: fc.SharedSupport(fc.ScaleCom(density=0.1), **seed),
    "SharedBasis": lambda **seed: fc.SharedBasis(fc.PowerSGD(rank=2), **seed),
    "FittedBasis": lambda **seed: fc.FittedBasis(fc.GradiVeQ(), **seed),
    "LearnedGradients": lambda **seed: fc.LearnedGradients(fc.LGC(), **seed),
    "Buffered": lambda **seed: fc.Buffered(PAIR, concurrency=2, buffer=2, **seed),
    "CodedFedAvg": lambda **seed: fc.CodedFedAvg(PAIR, **seed),
    "GossipRelay": lambda **seed: fc.GossipRelay(get_algorithm({"name": "dpsgd", "lr": 0.1}), **seed),
    "DpFedAvg": lambda **seed: fc.DpFedAvg(
        FedAvg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0, population=10, **seed
    ),
    "ForwardGradients": lambda **seed: fc.ForwardGradients(FedAvg(), **seed),
    "InProcessGrid": lambda **seed: fc.InProcessGrid(ClientApp(), 2, **seed),
}
WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "a policy that is a number": ("policy=1000", lambda: fc.Compressed(FedAvg(), TOPK, policy=1000)),  # type: ignore[arg-type]
    "a policy of a basis": ("policy=3", lambda: fc.FittedBasis(fc.GradiVeQ(), policy=3)),  # type: ignore[arg-type]
    "a record that is a number": ("record=3", lambda: fc.Compressed(FedAvg(), TOPK, record=3)),  # type: ignore[arg-type]
    "feedback in words": ("feedback='yes'", lambda: fc.Compressed(FedAvg(), TOPK, feedback="yes")),  # type: ignore[arg-type]
    "a first model that is a number": (
        "first_model_at_nodes=1",
        lambda: fc.Compressed(FedAvg(), TOPK, TOPK, first_model_at_nodes=1),  # type: ignore[arg-type]
    ),
    "halves as one text": ("only='compression'", lambda: fc.client(ClientApp(), only="compression")),
    "an app that is none": ("app=3", lambda: fc.client(3)),  # type: ignore[arg-type]
    "a half that is none": ("3 is not", lambda: fc.client(ClientApp(), 3)),  # type: ignore[arg-type]
    "an algorithm's name": ("algorithm='choco'", lambda: fc.GossipRelay("choco", "ring")),  # type: ignore[arg-type]
    "a grid without an app": ("client_app=None", lambda: fc.InProcessGrid(None, 4)),  # type: ignore[arg-type]
    "half a node": ("num_nodes=2.5", lambda: fc.InProcessGrid(ClientApp(), 2.5)),  # type: ignore[arg-type]
    "a meter around nothing": ("inner=None", lambda: fc.MeteredGrid(None)),  # type: ignore[arg-type]
    "a first model that is no function": ("first_model=3", lambda: fc.compression(first_model=3)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_refused_by_its_name(what: str) -> None:
    name, make = WRONG[what]
    with pytest.raises(ConfigError) as error:
        make()
    assert name in str(error.value)


@pytest.mark.parametrize("seed", [0.5, True, "7", None, 2**63, -(2**63) - 1])
@pytest.mark.parametrize("kind", SEEDED)
def test_a_seed_is_an_integer_of_64_bits(kind: str, seed: object) -> None:
    with pytest.raises(ConfigError, match="seed="):
        SEEDED[kind](seed=seed)


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**63 - 1])
@pytest.mark.parametrize("kind", SEEDED)
def test_every_other_seed_is_taken(kind: str, seed: int) -> None:
    SEEDED[kind](seed=seed)


@pytest.mark.parametrize("accept", ["topk", TOPK, [TOPK], ["topkk"], 3])
@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
def test_what_a_client_accepts_is_a_list_of_known_ids(half: Callable[..., object], accept: object) -> None:
    with pytest.raises(ConfigError, match="accept="):
        half(accept)


def test_a_pair_shows_what_it_sends() -> None:
    pair = fc.Compressed(FedAvg(), fc.TopK(density=0.01), downlink=fc.TopK(density=0.05))
    assert repr(pair) == ("Compressed(FedAvg): ErrorFeedback(codec=TopK(density=0.01)), downlink=TopK(density=0.05)")


def test_reports_are_a_table_in_a_notebook() -> None:
    reports = Reports()
    first, second = reports.begin(1), reports.begin(2)
    first.asked, first.used, first.payload_bytes, first.model_bytes = 4, 3, 12_500, 50_000
    first.refuse(17, "<b>of a client's making</b>")
    second.asked = 4
    page = reports._repr_html_()
    assert page.count("<tr>") == 3
    assert "<td>12,500</td><td>4</td>" in page
    assert "&lt;b&gt;of a client" in page
    assert "<b>" not in page
