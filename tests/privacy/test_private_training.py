"""DP-SGD: what one record contributes is bounded, noise and cost come from one object, and the cost comes first."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from dpsgd_problems import OPTIONS, gradient, ledger, loss, net, per_sample, records, seeded, training, weights
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedcomp.errors import ConfigError
from fedcomp.privacy.coins import secret_draws
from fedcomp.privacy.dpsgd import PoissonLoader, StepSettings, private_training
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.errors import BudgetExceeded
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.privacy.optimizers import clip_rows, vote_rows
from fedcomp.privacy.sampling import Sampling
from fedcomp.privacy.votes import topk_stochastic_sign
from fedcomp.rng import Key
from fedcomp.systems.private.record import METHODS

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@pytest.mark.slow
def test_1_9_three_hundred_poisson_steps_with_empty_batches_are_all_paid_for() -> None:
    data, module = records(300), net()
    with training(module, data, "topagg", rate=0.01, steps=300, noise_multiplier=1.5) as t:
        empty = 0
        for batch in t.loader:
            empty += len(batch[0]) == 0
            t.step(batch, loss)
    assert empty > 0  # e^-3 of them on average
    assert t.accountant.history == [(1.5, 0.01, 300)]
    book = t.optimizer.ledger
    assert book.releases == book.rounds == 300
    assert {(e.noise_multiplier, e.rate, e.noise) for e in book.events} == {(1.5, 0.01, "discrete_gaussian")}
    assert np.isfinite(weights(module)).all()
    # Opacus' accountant was told by its own hook, ours by the mechanism: the looser analysis bounds the tighter one.
    assert book.epsilon() <= t.accountant.get_epsilon(1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_1_9_a_record_whose_gradient_is_not_finite_contributes_nothing(method: str) -> None:
    data = records(8)
    broken = TensorDataset(data.tensors[0].clone(), data.tensors[1])
    broken.tensors[0][3] = float("nan")
    broken.tensors[0][5, 2] = float("inf")
    others = TensorDataset(*(x[[0, 1, 2, 4, 6, 7]] for x in data.tensors))
    found = []
    for given in (broken, others):
        module = net()
        # Plain signs: a vote's random number belongs to its place in the batch.
        options = {"stochastic": False} if method == "topagg" else {}
        with training(module, given, method, loss_reduction="sum", **options) as t:
            t.step(next(iter(t.loader)), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum"))
            found.append(gradient(module))
            refused = t.optimizer.refused
        assert np.isfinite(weights(module)).all()
        assert refused == (2 if given is broken else 0)
    assert np.abs(found[0]).max() > 0
    np.testing.assert_array_equal(*found)


def test_1_9_votes_of_a_batch_at_once_equal_a_loop_over_records() -> None:
    data, module = records(11), net()
    rows = per_sample(module, data)
    key = Key(5)
    with training(module, data, "topagg", k=9, saturation=0.05, key=key) as t:
        t.step(next(iter(t.loader)), loss)
        found = gradient(module) * t.optimizer.batch
    drawn = key.at(purpose="dp-sgd votes").uniform(11 * 9).reshape(11, 9)
    naive = sum(
        topk_stochastic_sign(row.numpy(), 9, saturation=0.05, uniforms=u).astype(int)
        for row, u in zip(rows, drawn, strict=True)
    )
    assert set(np.abs(naive)) != {0}
    np.testing.assert_allclose(found, naive, atol=1e-5)


def test_votes_of_rows_are_those_of_the_vote_encoder_also_where_they_overflow() -> None:
    rows = Key(1, "rows").generator().standard_normal((6, 40)).astype(np.float32)
    rows[1] = 0.0
    rows[2] *= np.float32(1e38)
    rows[3, 4] = np.nan
    rows[4, 30:] = np.inf
    rows[5, :35] = 0.0
    uniforms = Key(2).uniform(60).reshape(6, 10)
    for drawn in (uniforms, None):
        found = vote_rows(torch.from_numpy(rows), 10, uniforms=drawn).numpy()
        np.testing.assert_array_equal(
            found, topk_stochastic_sign(rows, 10, stochastic=drawn is not None, uniforms=drawn)
        )
    assert not found[[1, 3, 4]].any()
    assert list(np.abs(found).sum(axis=1)) == [10, 0, 10, 0, 0, 5]


def test_dp_sgd_without_noise_is_the_sum_of_clipped_gradients_over_the_expected_batch() -> None:
    data, module = records(12), net()
    rows = per_sample(module, data).double().numpy()
    norms = np.linalg.norm(rows, axis=1)
    clip = float(np.median(norms))
    assert norms.min() < clip < norms.max()
    with training(module, data, max_grad_norm=clip) as t:
        t.step(next(iter(t.loader)), loss)
        found = gradient(module)
    naive = (rows * np.minimum(1.0, clip / norms)[:, None]).sum(axis=0) / 12
    # Each of 12 records is off by half a grid step, and a clipped one by 1.5 in its norm.
    np.testing.assert_allclose(found, naive, atol=2.1 * GridGaussian(noise_multiplier=0, clip=clip, size=53).step)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_one_record_moves_the_sum_by_the_bound_at_most(method: str) -> None:
    """On what is really summed: with and without a record, at several scales of its gradient."""
    data = records(5)
    for scale in (1e-6, 1.0, 1e6, 1e30):
        totals = []
        for count in (5, 4):
            module = net()
            with training(module, data, method, loss_reduction="sum", rate=1.0) as t:
                mechanism = t.optimizer.mechanism()
                batch = [x[:count] for x in data.tensors]
                weight = torch.tensor([1.0, 1.0, 1.0, 1.0, scale])[:count]
                t.optimizer.zero_grad()
                terms = nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")
                (terms * weight).sum().backward()
                t.optimizer.clip_and_accumulate()
                totals.append(t.optimizer.total)
        moved = (totals[0] - totals[1]).astype(object)
        assert totals[0].dtype == np.int64
        assert sum(moved * moved) <= round(mechanism.bound**2)
        if scale >= 1e6 or method == "topagg":
            assert sum(moved * moved) >= 0.98 * mechanism.bound**2  # the bound is no larger than it must be


def test_a_rounded_row_is_inside_the_bound_in_exact_arithmetic_and_close_to_what_the_mechanism_admits() -> None:
    size = 2000
    mechanism = GridGaussian(noise_multiplier=1.0, clip=0.7, size=size)
    rows = Key(4).generator().standard_normal((40, size)).astype(np.float32)
    # Clipped, every coordinate of these is 91.59 steps, which rounds up: their norm is raised above the bound of 4096.
    assert np.rint(mechanism.bound / math.sqrt(size)) ** 2 * size > mechanism.bound**2
    for number in range(20):
        rows[number] = 10.0 ** (number - 5)
    rows[20] = 3e38
    rows[21] = 0.0
    found = clip_rows(torch.from_numpy(rows.copy()), mechanism).numpy()
    squares = [int((row.astype(np.int64) ** 2).sum()) for row in found]
    assert max(squares) <= int(mechanism.bound) ** 2
    for row, given in zip(found, rows, strict=True):
        assert np.abs(row - mechanism.admit(given.astype(np.float64))).max() <= mechanism.bound * 0.01


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_event_is_recorded_before_the_noise_is_drawn_and_says_what_was_drawn(method: str) -> None:
    class Watching(SeededEntropy):
        def bytes(self, count: int) -> bytes:
            seen.append(book.releases)
            return super().bytes(count)

    seen: list[int] = []
    book = ledger(1.0)
    module, data = net(), records(6)
    watching = Watching(Key(0), insecure_deterministic=True)
    with training(module, data, method, noise_multiplier=2.0, steps=2, entropy=watching, ledger=book) as t:
        batch = [*data.tensors]
        for step in (1, 2):
            seen.clear()
            expected = t.optimizer.mechanism().event(rate=1.0, size=1, label="gradient")
            t.step(batch, loss)
            assert set(seen) == {step}
            assert book.events[-1] == expected


def test_a_step_beyond_the_budget_leaves_the_model_and_no_gradient() -> None:
    module, data = net(), records(20)
    probe = ledger(1.0)
    probe.record(
        GridGaussian(noise_multiplier=2.0, adjacency="add_remove", clip=1.0, size=53).event(), round=0, times=3
    )
    with training(module, data, noise_multiplier=2.0, steps=5, budget=probe.epsilon() + 1e-6) as t:
        for _, batch in zip(range(3), t.loader, strict=False):
            t.step(batch, loss)
        before = weights(module)
        with pytest.raises(BudgetExceeded):
            t.step([*data.tensors], loss)
    assert t.optimizer.ledger.releases == 3
    np.testing.assert_array_equal(weights(module), before)
    assert all(p.grad is None for p in module.parameters())


def test_the_sum_is_divided_by_the_expected_batch_untruncated() -> None:
    data, module = records(200), net()
    with training(module, data, rate=1 / 67, steps=1, max_grad_norm=2.0) as t:
        assert t.optimizer.batch == pytest.approx(200 / 67)
        batch = [x[:3] for x in data.tensors]
        t.step(batch, loss)
        found = gradient(module)
    naive = per_sample(net(), TensorDataset(*batch)).double().numpy()
    assert np.linalg.norm(naive, axis=1).max() < 2.0
    step = 2.0 / 512
    np.testing.assert_allclose(found, naive.sum(axis=0) / (200 / 67), atol=0.52 * step)


def test_a_second_training_on_one_ledger_goes_on_where_the_first_ended() -> None:
    """Steps are rounds of the ledger: the same number twice would say the same records were drawn."""
    book, module, data = ledger(0.5), net(), records(20)
    for _ in range(2):
        with training(module, data, "random-mask", rate=0.5, steps=3, noise_multiplier=1.0, ledger=book) as t:
            for batch in t.loader:
                t.step(batch, loss)
    assert [entry.round for entry in book.entries] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_two_steps_on_one_batch_are_recorded_in_the_round_of_its_records() -> None:
    data, books = records(20), []
    for times in (1, 2):
        module, book = net(), ledger(0.2)
        with training(module, data, rate=0.2, steps=16 // times, noise_multiplier=2.0, ledger=book) as t:
            for batch in t.loader:
                for _ in range(times):
                    t.step(batch, loss)
        books.append(book)
    apart, together = books
    assert apart.releases == together.releases == 16
    # A record that is drawn is in both steps of a round, and the ledger charges that as one draw with two releases.
    assert (apart.rounds, together.rounds) == (16, 8)
    assert [entry.round for entry in together.entries] == [number // 2 for number in range(16)]
    with training(net(), data, rate=0.2, steps=1, noise_multiplier=2.0, ledger=together) as t:
        t.step(next(iter(t.loader)), loss)
    assert together.entries[-1].round == 8


def test_a_ledger_of_another_promise_is_refused() -> None:
    data, module = records(20), net()
    for sampling in (Sampling("capped", cap=3), Sampling("everyone")):
        book = PrivacyLedger(delta=1e-5, population=1000, adjacency="add_remove", sampling=sampling, unit="record")
        if sampling.cap:
            # Three of a hundred steps would be counted.
            with pytest.raises(ConfigError, match="any record may be in any step"):
                training(module, data, ledger=book)
        else:
            with pytest.raises(ConfigError, match="is not the ledger's"):
                training(module, data, ledger=book, adjacency="replace")
    twice = PrivacyLedger(
        delta=1e-5, population=1000, adjacency="replace", sampling=Sampling("everyone"), unit="record"
    )
    with training(module, data, ledger=twice, noise_multiplier=1.0) as t:
        assert t.optimizer.mechanism().sensitivity == 2 * t.optimizer.mechanism().bound


class Watching(nn.Module):
    """Adds what it has seen of former batches to what comes, in place or by another tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.inside, self.in_place = net(), in_place
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.seen += x.detach().sum(0)
        else:
            self.seen = self.seen + x.detach().sum(0)
        return self.inside(x + self.seen)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_carries_nothing_of_a_batch_on_to_the_next_nor_out(in_place: bool) -> None:
    module, data = Watching(in_place), records(9)
    with training(module, data, steps=2) as t:
        for batch in t.loader:
            t.step(batch, loss)
            assert not module.state_dict()["seen"].any()


@pytest.mark.slow
def test_a_records_gradient_does_not_depend_on_how_many_others_there_are() -> None:
    """A mean loss is divided by the batch's size and the gradients multiplied by it again, which rounds."""
    data = records(61, 40)
    found: dict[str, list[torch.Tensor]] = {"none": [], "mean": []}
    for reduction, rows in found.items():
        for count in (61, 60, 41):
            module, batch = net(40, 60), [x[:count] for x in data.tensors]
            with training(module, data, loss_reduction=reduction) as t:
                honest = t.optimizer.rows

                def kept(honest=honest, rows=rows) -> torch.Tensor:
                    rows.append(honest()[:41].clone())
                    return rows[-1].clone()

                t.optimizer.rows = kept  # type: ignore[method-assign]
                t.step(batch, lambda m, b, how=reduction: nn.functional.cross_entropy(m(b[0]), b[1], reduction=how))
    same = {name: [torch.equal(rows[0], other) for other in rows[1:]] for name, rows in found.items()}
    assert same["none"] == [True, True]
    assert not all(same["mean"])
    torch.testing.assert_close(found["none"][0], found["mean"][0], atol=1e-6, rtol=1e-5)


def test_losses_that_are_not_one_for_each_record_are_refused() -> None:
    with training(net(), records(9), loss_reduction="none") as t, pytest.raises(ConfigError, match="one loss for each"):
        t.step([*records(9).tensors], loss)


def test_a_batch_gathered_in_parts_gets_one_noise_and_one_event() -> None:
    data = records(10)
    found = []
    for parts in ([10], [4, 6]):
        module = net()
        with training(module, data, noise_multiplier=1.0, loss_reduction="sum") as t:
            t.hooks.allow_grad_accumulation()
            start = 0
            for number, count in enumerate(parts):
                t.optimizer.signal_skip_step(number < len(parts) - 1)
                t.optimizer.zero_grad()
                batch = [x[start : start + count] for x in data.tensors]
                nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="sum").backward()
                t.optimizer.step()
                start += count
            assert t.optimizer.ledger.releases == 1
            found.append(gradient(module))
    np.testing.assert_array_equal(*found)


def test_a_noise_schedule_reaches_the_noise_and_the_event_alike() -> None:
    module, data = net(20, 30, 10), records(50, 20, 10)
    with training(module, data, rate=1e-9, steps=40, noise_multiplier=1.0, lr=1e-9) as t:
        spread = []
        for number, batch in enumerate(t.loader):
            t.optimizer.noise_multiplier = 1.0 if number < 20 else 3.0
            t.step(batch, loss)
            spread.append(gradient(module) * t.optimizer.batch)
    assert [e.noise_multiplier for e in t.optimizer.ledger.events] == [1.0] * 20 + [3.0] * 20
    assert np.std(spread[:20]) == pytest.approx(1.0, rel=0.03)
    assert np.std(spread[20:]) == pytest.approx(3.0, rel=0.03)


@pytest.mark.parametrize("method", METHODS)
def test_state_dict_keys_stay_and_the_hooks_go(method: str) -> None:
    module, data = net(), records(6)
    keys = list(module.state_dict())
    with training(module, data, method) as t:
        assert list(module.state_dict()) == keys
        t.step([*data.tensors], loss)
    assert list(module.state_dict()) == keys
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())
    loss(module, [*data.tensors]).backward()
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False), nn.SyncBatchNorm(5)])
def test_layers_that_mix_records_are_refused_with_advice(norm: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 3))
    with pytest.raises(ConfigError, match="GroupNorm"):
        training(module, records(6))


def test_parameters_the_optimiser_does_not_hold_are_refused() -> None:
    module = net()
    with pytest.raises(ConfigError, match="Freeze"):
        private_training(
            module,
            torch.optim.SGD(module[0].parameters(), lr=0.1),
            records(6),
            ledger(1.0),
            StepSettings(noise_multiplier=1.0, rate=1.0),
            steps=1,
        )
    for p in module[2].parameters():
        p.requires_grad_(False)
    with training(module, records(6)) as t:
        t.step([*records(6).tensors], loss)


def test_a_claimed_rate_must_be_the_ledgers() -> None:
    module, data = net(), records(6)
    with training(module, data, rate=0.25, ledger=ledger(0.5)) as t, pytest.raises(ConfigError, match="rate"):
        t.step([*data.tensors], loss)


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "gaussian"},
        {"rate": 0.0},
        {"rate": 1.5},
        {"steps": -1},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"max_grad_norm": 0.0},
        {"loss_reduction": "median"},
        {"method": "topagg", "k": 0},
        {"method": "topagg", "k": 5, "saturation": 0.0},
        {"method": "topagg", "k": 5, "threshold": -1.0},
        {"method": "random-mask", "keep": 0.0},
        {"method": "random-mask", "keep": 0.5, "mask": "batch_topk"},
        {"method": "lsg", "rank": -1},
        {"method": "lsg", "rank": 1, "refresh": 0},
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(wrong: dict) -> None:
    module = net()
    with pytest.raises(ConfigError):
        training(module, records(6), **{"noise_multiplier": 1.0, "ledger": ledger(1.0), **wrong})
    assert not hasattr(module[0].weight, "grad_sample")


def test_votes_beyond_all_coordinates_are_all_of_them() -> None:
    module = net()
    with training(module, records(6), "topagg", k=10_000) as t:
        assert t.optimizer.k == 53
        assert t.optimizer.max_grad_norm == pytest.approx(math.sqrt(53))


def test_a_threshold_turns_noisy_sums_into_signs() -> None:
    data = records(9)
    module = net()
    rows = per_sample(module, data)
    with training(module, data, "topagg", k=20, stochastic=False, threshold=0.5) as t:
        t.step([*data.tensors], loss)
        found = gradient(module)
    votes = topk_stochastic_sign(rows.numpy(), 20, stochastic=False).astype(int).sum(axis=0)
    expected = np.sign(votes) * (np.abs(votes) > 4.5)
    assert 0 < np.count_nonzero(expected) < 53
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_poisson_batches_take_each_record_independently_at_the_rate() -> None:
    data = records(100)
    loader = PoissonLoader(data, rate=0.3, steps=1000, entropy=seeded("batches"))
    sizes, taken = [], np.zeros(100)
    marked = TensorDataset(torch.arange(100))
    for (batch,) in PoissonLoader(marked, rate=0.3, steps=1000, entropy=seeded("batches")):
        sizes.append(len(batch))
        taken[batch.numpy()] += 1
    assert len(loader) == 1000
    # Standard errors: 0.0145 of a record in a batch, 0.0014 of the mean; variance 21 of a batch's size.
    assert np.abs(taken / 1000 - 0.3).max() < 5 * 0.0145
    assert np.mean(sizes) == pytest.approx(30.0, abs=5 * 0.145)
    assert np.var(sizes) == pytest.approx(21.0, rel=0.25)


def test_a_data_set_of_another_kind_and_a_loader_give_the_same_batches() -> None:
    class Listed(Dataset):
        def __init__(self, data: TensorDataset) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> tuple:
            return self.data[index]

    data = records(30)
    kinds = [data, Listed(data), DataLoader(Listed(data), batch_size=4)]
    batches = [list(PoissonLoader(kind, rate=0.05, steps=25, entropy=seeded())) for kind in kinds]
    assert any(len(x) == 0 for x, _ in batches[0])
    for first, *others in zip(*batches, strict=True):
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_no_global_generator_is_read_or_written() -> None:
    found = []
    for seed in (1, 2):
        module = net()
        torch.manual_seed(seed)  # what must not matter
        before = torch.get_rng_state()
        for method in OPTIONS:
            with training(module, records(40), method, rate=0.2, steps=3, noise_multiplier=1.0) as t:
                for batch in t.loader:
                    t.step(batch, loss)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(weights(module))
    np.testing.assert_array_equal(*found)


# What a module draws for its records.

HIDDEN, CLIP = 2, 0.5


def dropping(hidden: int = HIDDEN) -> nn.Sequential:
    first, tanh, last = net(hidden=hidden).children()
    return nn.Sequential(first, tanh, nn.Dropout(0.5), last)


def contributions(data: TensorDataset) -> np.ndarray:
    """Return what each record contributes under each mask of the hidden layer, (records, 2^hidden, d), by a loop."""
    out = []
    for x, y in data:
        rows = []
        for mask in itertools.product((0.0, 2.0), repeat=HIDDEN):
            module = dropping()
            hidden = torch.tanh(module[0](x[None])) * torch.tensor(mask)
            nn.functional.cross_entropy(module[3](hidden), y[None]).backward()
            row = torch.cat([p.grad.reshape(-1) for p in module.parameters()]).double().numpy()  # type: ignore[union-attr]
            rows.append(row * min(1.0, CLIP / np.linalg.norm(row)))
        out.append(rows)
    return np.array(out)


def dealt(found: np.ndarray, coins: tuple[int, ...]) -> np.ndarray:
    """Return the sum in which record i has the mask ``coins[i]``."""
    return sum(row[coin] for row, coin in zip(found, coins, strict=True))


@pytest.mark.long
def test_a_sum_with_dropout_is_that_of_independent_coins_which_one_record_moves_by_its_bound():
    """Brute force over all coins of three records: the mechanism's sums are all of these, equally often, and every one
    is as near as the bound to one of each neighbour's, which has it as often for each coin of the record that is gone.
    """
    data = records(3)
    found = contributions(data)
    every = list(itertools.product(range(2**HIDDEN), repeat=3))
    sums = np.array([dealt(found, coins) for coins in every])
    steps = 12 * len(every)
    made = training(dropping(), data, steps=steps, max_grad_norm=CLIP, lr=0.0)
    counts = np.zeros(len(every), int)
    with made:
        for batch in made.loader:
            made.step(batch, loss)
            away = np.abs(sums - 3 * gradient(made.module)).max(axis=1)
            # Up to the rounding to the grid.
            assert away.min() < 0.01, "the sum of no coins"
            counts[away.argmin()] += 1
    # 64 sums of which some are the same: 12 of each on average, chi-square of at most 63 degrees of freedom.
    kinds: dict[bytes, list[int]] = {}
    for place, row in enumerate(sums):
        kinds.setdefault(np.round(row, 6).tobytes(), []).append(place)
    grouped = np.array([[counts[places].sum(), 12 * len(places)] for places in kinds.values()])
    assert ((grouped[:, 0] - grouped[:, 1]) ** 2 / grouped[:, 1]).sum() < 130
    # Neighbours: with the coins of the others as they are, whoever is gone.
    for gone in range(3):
        left = np.delete(found, gone, axis=0)
        moved = [np.linalg.norm(dealt(found, c) - dealt(left, (*c[:gone], *c[gone + 1 :]))) for c in every]
        assert max(moved) <= CLIP * (1 + 1e-9)
    # The wrong variant: public coins, dealt in the order of the batch.
    moved = [np.linalg.norm(dealt(found, coins) - dealt(found[1:], coins[:2])) for coins in every]
    assert max(moved) > 1.5 * CLIP


@pytest.mark.parametrize("method", OPTIONS)
def test_no_seed_of_torch_names_what_a_module_draws(method):
    given: dict[str, set[bytes]] = {}
    for entropy in ("secret", "secret", "seeded", "seeded"):
        module = dropping(hidden=64)
        settings = {} if entropy == "seeded" else {"entropy": None}
        made = training(module, records(20), method, lr=0.0, **settings)
        torch.manual_seed(7)
        before = torch.get_rng_state()
        with made:
            for batch in made.loader:
                made.step(batch, loss)
                given.setdefault(entropy, set()).add(gradient(module).tobytes())
        # And the app's own generator is where it was.
        assert torch.equal(before, torch.get_rng_state())
    assert len(given["secret"]) == 2
    # Experiments that must repeat do, and say so in their statement.
    assert len(given["seeded"]) == 1


def test_the_state_of_torchs_generator_is_laid_out_as_torch_itself_does():
    """The first draws are those of numpy's twister in the same state, and what was there before comes back."""
    before = torch.get_rng_state()
    with secret_draws(seeded("coins")):
        found = torch.randint(0, 2**16, (1500,)).numpy()
        torch.randn(3)
    assert torch.equal(before, torch.get_rng_state())
    words = seeded("coins").words(624) & np.uint64(0xFFFFFFFF)
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words.astype(np.uint32), "pos": 624}}
    np.testing.assert_array_equal(found, twister.random_raw(1500) % 2**16)
