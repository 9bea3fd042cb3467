"""DataLens' server: every image is paid for, before its noise is drawn; what cannot be verified is not in the sum."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datalens_toy import IMAGES, NODES, PIXELS, SEED, ToyTeachers, client, grid, kept, model, row, strategy
from flwr.app import ConfigRecord, Context, Message, RecordDict
from private_runs import forged

from fedcomp import wire
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import asks, checkpoint
from fedcomp.flower.faults import ScriptedFaults
from fedcomp.flower.payload import FRAME, NODE_RECORD, put_frame
from fedcomp.flower.privacy import Private, find_private
from fedcomp.flower.rounds import fit
from fedcomp.layout import Layout
from fedcomp.privacy import mechanism
from fedcomp.privacy.accounting import CLASSICAL_ORDERS, classical_epsilon, gaussian_epsilon, releases_for
from fedcomp.privacy.entropy import Entropy, SystemEntropy
from fedcomp.privacy.errors import PrivacyLedgerError, Unbounded
from fedcomp.privacy.events import Event
from fedcomp.privacy.gaussian import lattice_delta
from fedcomp.privacy.mechanism import GridGaussian, Mechanism, PrivateSum, Votes
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.votes import encode_rows
from fedcomp.rng import Key
from fedcomp.strategies.private.datalens import DataLens

K, ROUNDS = 4, 5


def run(made: DataLens, over: Any, rounds: int = ROUNDS, first: int = 1, arrays: Any = None) -> Any:
    return fit(made, over, model() if arrays is None else arrays, rounds, start_round=first, timeout=9)


def paid_per_image(made: DataLens, rounds: int = ROUNDS) -> bool:
    """Whether the ledger holds what the published code's rule charges: alpha 2k / sigma^2 for each image and order."""
    z = made.noise_multiplier
    sigma = z * 2 * math.sqrt(K)
    rho = IMAGES * rounds * 2 * K / sigma**2
    delta = made.privacy.delta
    expected = min(a * rho + math.log(1 / delta) / (a - 1) for a in CLASSICAL_ORDERS)
    # The same event again and again is one line of the ledger for each round.
    return math.isclose(classical_epsilon(made.privacy.events, delta), expected, rel_tol=1e-9)


def test_1_11_d_the_ledger_holds_one_release_for_each_image_of_each_round() -> None:
    made = strategy(noise_multiplier=20.0)
    run(made, grid())
    assert isinstance(made, Private)
    assert find_private(made) is made
    assert [entry.round for entry in made.privacy.entries] == [1, 2, 3, 4, 5]
    assert made.privacy.releases == IMAGES * ROUNDS
    assert paid_per_image(made)
    mu = math.sqrt(IMAGES * ROUNDS) / 20.0
    exact = gaussian_epsilon(mu, lattice_delta(mu, 1e-5, made.mechanism(Layout.flat(IMAGES * PIXELS)).grid_sigma))
    assert made.privacy.epsilon() == pytest.approx(exact, rel=1e-9)
    # What one client or record of a teacher may change in all: B votes, each by sqrt(k) there and back.
    said = made.statement()
    assert said.sensitivity == pytest.approx(2 * math.sqrt(K))
    assert (said.releases, said.rounds, said.unit, said.adjacency) == (15, 5, "client", "replace")


class OneEventPerBatch(DataLens):
    """MUTANT: all images of a batch are paid for as one release."""

    def event(self, mechanism: Mechanism, size: int) -> Event:
        return replace(super().event(mechanism, size), releases=1)


def test_mutant_one_event_per_batch_is_caught() -> None:
    made = strategy(OneEventPerBatch, noise_multiplier=20.0)
    run(made, grid())
    assert not paid_per_image(made)
    assert made.privacy.releases == ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("way", ["serve", "alone"])
def test_1_11_j_the_run_stops_before_the_budget_is_crossed_and_asks_nobody(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    honest = mechanism.draw

    def counted(noise: str, sigma: float, count: int, entropy: Entropy) -> Any:
        drawn.append(count)
        return honest(noise, sigma, count, entropy)

    monkeypatch.setattr(mechanism, "draw", counted)
    budget, z = 1.0, 20.0
    most = releases_for(budget, 1e-5, z) // IMAGES
    assert 3 <= most < 60
    made, over = strategy(noise_multiplier=z, budget=budget), grid()
    if way == "serve":  # whose driver asks before each round
        result = run(made, over, most + 3)
        arrays = result.arrays
    else:
        arrays = model()
        for server_round in range(1, most + 4):
            messages = list(made.configure_train(server_round, arrays, ConfigRecord(), over))
            arrays = made.aggregate_train(server_round, over.send_and_receive(messages))[0] or arrays
    assert drawn == [IMAGES * PIXELS] * most
    assert made.privacy.releases == most * IMAGES
    assert made.privacy.epsilon() <= budget
    assert gaussian_epsilon(math.sqrt((most + 1) * IMAGES) / z, 1e-5) > budget
    assert "budget of epsilon 1" in made.over(most + 1)
    assert over.ledger.total("messages", direction="down") == NODES * most
    # The last model is that of the last step that was afforded.
    same = strategy(noise_multiplier=z)
    assert np.array_equal(row(run(same, grid(), most).arrays), row(arrays))


def test_an_event_is_on_the_disk_before_its_noise_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "privacy.jsonl"

    def killed(*_: object) -> Any:
        raise KeyboardInterrupt(path.read_text().count('"event"'))

    made = strategy()
    made.open_ledger(path)
    monkeypatch.setattr(mechanism, "draw", killed)
    with pytest.raises(KeyboardInterrupt) as stop:
        run(made, grid())
    assert stop.value.args == (1,)


def test_without_noise_and_chance_targets_are_the_signs_of_the_majority() -> None:
    made = strategy(k=PIXELS, noise_multiplier=0.0, stochastic=False, beta=0.0, teachers=2)
    over = grid()
    moved = row(run(made, over, 1).arrays)
    wishes = np.concatenate([ToyTeachers(p, 2).wish for p in range(NODES)])
    images = made.student({}).images({"row": np.zeros(PIXELS, np.float32)}, request_key(made), IMAGES)
    majority = np.sign(np.sign(wishes[:, None] - images[None]).sum(0))
    np.testing.assert_allclose(moved, 0.01 * majority.sum(0), rtol=1e-6)
    assert made.privacy.epsilon() == math.inf
    assert made.statement().prose().splitlines()[1].startswith("NOT PRIVATE")


def request_key(made: DataLens) -> Key:
    return Key(Key(made.seed, "datalens/draw", 1).u64() >> 1, "datalens")


def frame(data: bytes) -> Callable[[RecordDict], None]:
    return lambda content: put_frame(content, FRAME + "values", data)


def cast(rows: int = IMAGES, size: int = PIXELS, votes: int = K) -> np.ndarray:
    out = np.zeros((rows, size), np.int8)
    out[:, :votes] = 1
    return out


def doubled() -> bytes:
    flat = 2 * cast().reshape(-1)
    at = np.flatnonzero(flat)
    return wire.encode([wire.sparse((IMAGES, PIXELS), at, flat[at].astype(np.float32))])


def stripped(content: RecordDict) -> None:
    head = content[NODE_RECORD]
    content[NODE_RECORD] = ConfigRecord({name: value for name, value in head.items() if name != FRAME + "values"})


HOSTILE: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "one vote too many on one image": (frame(encode_rows(np.vstack([cast(1, votes=K + 1), cast(2)]))), "13 values"),
    "one vote too many on one, one too few on another": (
        frame(encode_rows(np.vstack([cast(1, votes=K + 1), cast(1), cast(1, votes=K - 1)]))),
        "row 0 holds 5 votes, at most 4",
    ),
    "a vote of 2": (frame(doubled()), ""),
    "another number of images": (frame(encode_rows(cast(IMAGES + 1))), ""),
    "another size of images": (frame(encode_rows(cast(size=PIXELS - 1))), ""),
    "a vector": (frame(wire.encode([wire.dense(np.full((IMAGES, PIXELS), np.nan, np.float32))])), ""),
    "noise": (frame(bytes(range(200))), ""),
    "nothing": (stripped, "holds no values"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOSTILE)
def test_1_11_h_votes_that_cannot_be_verified_are_left_out_and_the_guarantee_stays(how: str) -> None:
    change, said = HOSTILE[how]
    made, honest = strategy(), strategy()
    lied = row(run(made, grid(forged(client(), change, 1)), 1).arrays)
    (reason,) = made.reports[1].refused.values()
    assert said in reason
    assert (made.reports[1].asked, made.reports[1].used) == (NODES, NODES - 1)

    def silent(delivery: Any) -> str:
        return "lost_reply" if delivery.partition == 1 else "none"

    # As if that client were not there: the same noise, the same divisor, the same price.
    assert np.array_equal(lied, row(run(honest, grid(fault=silent), 1).arrays))
    assert made.privacy.events == honest.privacy.events


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["duplicate", "duplicate_reply"])
def test_a_client_votes_once_whatever_arrives_twice(kind: str) -> None:
    plain, again, over = strategy(), strategy(), grid(fault=lambda _: kind)
    assert np.array_equal(row(run(plain, grid(), 2).arrays), row(run(again, over, 2).arrays))
    assert plain.privacy.events == again.privacy.events
    assert kept(over, 0).state["learnt"].tolist() == [again.teaching.pretrain + 2 * again.teaching.steps]


@pytest.mark.slow
def test_a_lost_client_costs_its_votes_and_nothing_else() -> None:
    def lossy(delivery: Any) -> str:
        lost = {(2, 0): "silent", (2, 1): "raise", (3, 2): "lost_reply", (4, 3): "offline"}
        return lost.get((delivery.round, delivery.partition), "none")

    made, whole = strategy(), strategy()
    over = grid(fault=lossy)
    run(made, over)
    run(whole, grid())
    assert made.privacy.events == whole.privacy.events
    assert made.expected == whole.expected == NODES
    assert [(r.datalens.answered, r.lost, len(r.refused)) for r in made.reports.values()] == [
        (4, 0, 0),
        (2, 1, 1),
        (3, 1, 0),
        (3, 0, 1),
        (4, 0, 0),
    ]
    # Whoever's reply was lost has learnt all the same, and once.
    steps = [kept(over, p).state["learnt"].tolist() for p in range(NODES)]
    first = made.teaching.pretrain + made.teaching.steps
    assert steps == [[first + requests * made.teaching.steps] for requests in (3, 3, 4, 3)]


def test_a_round_without_any_answer_releases_its_noise_and_pays() -> None:
    made = strategy(beta=0.0)
    result = run(made, grid(fault=lambda d: "silent"), 1)
    assert made.privacy.releases == IMAGES
    assert row(result.arrays).any()


def test_the_threshold_counts_the_teachers_expected_and_not_those_that_came() -> None:
    # Every vote that came agrees, but two of four are less than 0.7 of those expected.
    agreed = frame(encode_rows(cast()))
    options = {"noise_multiplier": 0.0, "beta": 0.7}
    all_in = run(strategy(**options), grid(forged(client(), agreed)), 1)
    assert row(all_in.arrays)[:K].all()

    def half(delivery: Any) -> str:
        return "silent" if delivery.partition > 1 else "none"

    assert not row(run(strategy(**options), grid(forged(client(), agreed), fault=half), 1).arrays).any()


def test_several_teachers_of_a_client_are_checked_one_by_one_and_counted_as_units() -> None:
    made = strategy(teachers=3)
    over = grid()
    run(made, over, 2)
    assert made.expected == 3 * NODES
    assert kept(over, 0).state["learnt"].shape == (3,)
    said = made.statement()
    assert (said.unit, said.population) == ("record", 15 * 3 * NODES)
    assert "a client as a whole is not protected" in said.unit_note
    # One teacher with a vote too many takes its client's others along: what is not verified is not in the sum.
    rows = cast(3 * IMAGES)
    rows[IMAGES, :] = 1
    lied = strategy(teachers=3)
    run(lied, grid(forged(client(), frame(encode_rows(rows)), 1)), 1)
    assert lied.reports[1].datalens.answered == NODES - 1
    with pytest.raises(ConfigError, match="say adjacency='replace'"):
        strategy(teachers=3, adjacency="zero_out")
    # Of records there are more than teachers, and delta is compared with those that are protected.
    with pytest.raises(ConfigError, match="number of records"):
        strategy(teachers=3, population=0)
    with pytest.raises(ConfigError, match="not below 1/200000"):
        strategy(teachers=3, population=200_000)


def test_the_threshold_and_the_expected_number_follow_the_count_of_a_round() -> None:
    made = strategy(count=2, noise_multiplier=0.0, beta=0.7)
    assert made.expected == 2
    # All that were asked agree: with all clients expected, they would be less than 0.7 of them.
    assert row(run(made, grid(forged(client(), frame(encode_rows(cast())))), 1).arrays)[:K].all()
    assert len(made.chosen) == 2
    assert made.identity() != strategy(noise_multiplier=0.0, beta=0.7).identity()


@pytest.mark.parametrize("teachers", [1, 2])
def test_a_client_under_another_id_has_its_turns_once_whoever_is_the_unit(teachers: int) -> None:
    made = strategy(teachers=teachers, sampling=Sampling("capped", cap=1))
    layout = Layout.flat(IMAGES * PIXELS)
    first, _ = made.draw(lambda: [1, 2, 3, 4], layout, 1)
    event = made.event(made.mechanism(layout), layout.size)
    made.privacy.record(event, round=1, participants=first)
    assert made.draw(lambda: [5, 6, 7, 8], layout, 2)[0] == []
    with pytest.raises(PrivacyLedgerError, match="5 different participants"):
        made.privacy.record(event, round=2, participants=[5])


def test_more_clients_than_were_declared_are_not_asked_and_nothing_is_paid() -> None:
    made = strategy(clients=NODES - 1)
    over = grid()
    run(made, over, 1)
    assert made.privacy.releases == 0
    assert over.ledger.total("messages", direction="down") == 0


@pytest.mark.slow
def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    options = {"noise_multiplier": 3.0, "beta": 0.1, "teachers": 2}
    whole_strategy, whole_grid = strategy(**options), grid()
    whole = run(whole_strategy, whole_grid, 6)

    path, first, over = tmp_path / "run.ckpt", strategy(**options), grid()
    half = run(first, over, 3)
    checkpoint.save(path, server_round=3, arrays=half.arrays, strategy=first, grid=over)
    second, resumed = strategy(**options), grid()
    held = checkpoint.load(path)
    held.apply(second, resumed)
    result = run(second, resumed, 6, first=4, arrays=held.arrays)
    assert np.array_equal(row(result.arrays), row(whole.arrays))
    assert [kept(resumed, p).answer for p in range(NODES)] == [kept(whole_grid, p).answer for p in range(NODES)]
    for report in (*second.reports.values(), *whole_strategy.reports.values()):
        report.seconds = 0.0
    assert second.reports == whole_strategy.reports
    assert second.privacy.releases == whole_strategy.privacy.releases == 6 * IMAGES
    with pytest.raises(StateError, match="resume with the same settings"):
        held.apply(strategy(**{**options, "beta": 0.2}), None)


@pytest.mark.slow
def test_a_run_that_is_continued_pays_for_what_its_file_holds(tmp_path: Path) -> None:
    """Killed after two more rounds than its checkpoint knows of: they were paid, and the budget holds."""
    file, path = tmp_path / "privacy.jsonl", tmp_path / "run.ckpt"
    options = {"noise_multiplier": 20.0, "budget": 1.0}
    most = releases_for(1.0, 1e-5, 20.0) // IMAGES
    first, over = strategy(**options), grid()
    first.open_ledger(file)
    half = run(first, over, 1)
    checkpoint.save(path, server_round=1, arrays=half.arrays, strategy=first, grid=over)
    run(first, over, 3, first=2, arrays=half.arrays)
    first.privacy.close()
    second, resumed = strategy(**options), grid()
    held = checkpoint.load(path)
    held.apply(second, resumed)
    second.open_ledger(file)
    assert second.privacy.releases == 3 * IMAGES
    run(second, resumed, most + 5, first=2, arrays=held.arrays)
    assert second.privacy.releases == most * IMAGES


def test_noise_from_the_system_is_another_one_each_time_and_public_choices_are_not() -> None:
    sent: list[bytes] = []
    honest = client()

    def app(message: Message, context: Context) -> Message:
        head = asks.find_ask(message.content)
        sent.append(repr((head.seed, head.number, head.sequence)).encode())
        return honest(message, context)

    options = {"insecure_deterministic": False, "noise_multiplier": 5.0, "beta": 0.0}
    models = [row(run(strategy(**options), grid(app), 2).arrays).tobytes() for _ in range(2)]
    assert models[0] != models[1]
    assert sent[: 2 * NODES] == sent[2 * NODES :]
    assert strategy(**options).statement().secure
    seeded = strategy()
    assert "INSECURE" in seeded.statement().prose()
    assert seeded.seed == SEED


def test_images_or_a_generator_go_down_and_one_frame_comes_up() -> None:
    down = {}
    for send in ("images", "generator"):
        over = grid()
        run(strategy(send=send), over, 1)
        down[send] = over.ledger.total("payload", direction="down") / NODES
        up = over.ledger.total("payload", direction="up") / NODES
        assert up == len(kept(over, 0).answer)
    assert down["images"] == 4 * IMAGES * PIXELS
    assert down["generator"] == len(model()["row"].data)


def test_capped_sampling_ends_when_everybody_has_taken_part() -> None:
    made, over = strategy(sampling=Sampling("capped", cap=2)), grid()
    run(made, over, 4)
    assert made.privacy.rounds == 2
    assert set(made.privacy.participations.values()) == {2}
    assert over.ledger.total("messages", direction="down") == 2 * NODES


@pytest.mark.parametrize(
    ("options", "said"), [({"delta": 0.5}, "delta"), ({"sampling": Sampling("poisson", rate=0.5)}, "Poisson")]
)
def test_what_cannot_keep_a_promise_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        strategy(**options)


def test_nothing_is_released_before_the_number_of_clients_is_known() -> None:
    made = strategy(clients=0)
    with pytest.raises(ConfigError, match="give clients=N"):
        run(made, grid(), 1)
    made.declare(NODES)
    run(made, grid(), 1)
    assert made.privacy.population == NODES


def test_contributions_of_several_units_are_bounded_one_by_one_all_or_none() -> None:
    votes = np.stack([cast(), -cast(), cast(votes=K - 1)])
    ballots = Votes(noise_multiplier=1.0, k=K, shape=(IMAGES, PIXELS), by_row=True)
    assert np.array_equal(ballots.admit_all(votes), sum(ballots.admit(v) for v in votes))
    clipped = GridGaussian(noise_multiplier=1.0, clip=1.0, size=PIXELS)
    vectors = np.linspace(-3, 3, 2 * PIXELS).reshape(2, PIXELS)
    assert np.array_equal(clipped.admit_all(vectors), clipped.admit(vectors[0]) + clipped.admit(vectors[1]))
    total = PrivateSum(ballots, (IMAGES, PIXELS))
    one_bad = votes.copy()
    one_bad[2, 0] = 1
    for wrong in (one_bad, 2 * votes, votes[:, :2], votes[:0], votes.astype(float), [1]):
        with pytest.raises(Unbounded):
            total.add_all(7, wrong)
    with pytest.raises(Unbounded):
        PrivateSum(clipped, (PIXELS,)).add_all(7, vectors[:0])
    assert total.participants == []
    total.add_all(7, votes)
    with pytest.raises(Unbounded, match="in the sum already"):
        total.add_all(7, votes)
    free = replace(ballots, noise_multiplier=0.0)
    assert np.array_equal(free.perturb(free.admit_all(votes), SystemEntropy()), votes.sum(0))


def test_the_generator_is_bit_for_bit_what_it_was() -> None:
    """Digests of four rounds with losses, taken from the release before."""
    faults = ScriptedFaults({(2, 1): "lost_reply", (2, 3): "silent", (3, 0): "duplicate_reply", (3, 2): "raise"})
    found = {}
    for name, options in {
        "one teacher": {},
        "three teachers": {"teachers": 3, "send": "images"},
        "poisson": {"sampling": Sampling("poisson", rate=0.6), "adjacency": "zero_out"},
    }.items():
        result = run(strategy(noise_multiplier=0.5, beta=0.1, **options), grid(fault=faults), 4)
        found[name] = hashlib.sha256(row(result.arrays).tobytes()).hexdigest()[:16]
    assert found == {
        "one teacher": "63494d932a2ceff8",
        "three teachers": "5193496047d68356",
        "poisson": "af13d9013b4fa150",
    }
