"""Sparse spectra (part C of the transform compressors): test list C7, orders of axes, the falling share left out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedcomp.codecs import DCT, DFT, FFT, Domain, TopK, diminishing, get_codec
from fedcomp.codecs.axes import ORDERS, read_in, write_back
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, SmallDense, Update
from fedcomp.rng import Key
from fedcomp.wire import LimitExceeded

ALL = SmallDense(min_size=1)


def energy(x: np.ndarray) -> float:
    return float(np.square(x.astype(np.float64)).sum())


def sent(codec: FFT | TopK | Domain, x: np.ndarray, round_: int = 1) -> np.ndarray:
    """What arrives of a model that is one tensor."""
    layout = Layout.of({"w": x}, ALL)
    update = Update(x.reshape(-1).astype(np.float32), layout)
    return codec.decode(codec.encode(update, codec.init(layout), Key(1, round=round_))[0], layout).reshape(x.shape)


def spectrum(x: np.ndarray, order: str = "FDHW") -> np.ndarray:
    vector = x.astype(np.float32).reshape(-1).copy()
    DFT(order=order).apply(vector, Layout.of({"w": x}, ALL))
    return vector


INPUTS = {
    "random": lambda n: np.random.default_rng(n).standard_normal(n),
    "constant": lambda n: np.full(n, 2.5),
    "impulse": lambda n: np.eye(1, n, n // 3)[0],
    "alternating": lambda n: (-1.0) ** np.arange(n),
    "heavy": lambda n: np.random.default_rng(n).standard_t(2, n),
}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 64, 997, 1000])
@pytest.mark.parametrize("name", INPUTS)
def test_c7_everything_kept_comes_back_and_lengths_stay(name: str, n: int) -> None:
    x = INPUTS[name](n).astype(np.float32)
    length = np.linalg.norm(x)
    assert np.linalg.norm(sent(FFT(1.0, values="float32"), x) - x) <= 1e-6 * length
    assert np.linalg.norm(spectrum(x)) == pytest.approx(length, rel=1e-6)
    # numpy's own half of the spectrum, with its weights of 1 and √2.
    half = np.fft.rfft(x.astype(np.float64), norm="ortho")
    expected = [half[0].real]
    for j in range(1, n // 2 + 1):
        alone = 2 * j == n
        expected += [half[j].real] if alone else [np.sqrt(2) * half[j].real, np.sqrt(2) * half[j].imag]
    np.testing.assert_allclose(spectrum(x), expected, atol=1e-6 * length + 1e-12)


@pytest.mark.parametrize("n", [2, 3, 64, 997])
@pytest.mark.parametrize("name", INPUTS)
def test_c7_the_error_is_what_was_dropped_and_at_most_its_share(name: str, n: int) -> None:
    """Parseval: the error in space is that of the spectrum; and at most 1 - k/n of the energy, whatever the input."""
    x = INPUTS[name](n).astype(np.float32)
    for density in (0.05, 0.3, 0.9):
        k = int(np.ceil(density * n - 1e-9))
        got = sent(FFT(density, values="float32"), x)
        ranked = np.sort(np.abs(spectrum(x).astype(np.float64)))
        assert energy(got - x) == pytest.approx(energy(ranked[: n - k]), rel=1e-4, abs=1e-9 * energy(x))
        assert energy(got - x) <= (1.0 - k / n) * energy(x) * (1 + 1e-5) + 1e-9
        for values in ("range8", "range6"):
            codec = FFT(density, values=values)
            kept = codec.contraction(Layout.of({"w": x}, ALL))
            assert kept is not None
            assert energy(sent(codec, x) - x) <= (1.0 - kept) * energy(x) * (1 + 1e-5) + 1e-9


def test_c7_a_spike_costs_as_much_as_its_share_and_a_wave_two_numbers() -> None:
    n = 1024
    spike = np.eye(1, n, 5)[0]
    # Squares of cosines: no coefficient holds more than 2/n.
    assert 0.8 < energy(sent(FFT(0.1, values="float32"), spike) - spike) < 0.9
    wave = np.cos(2 * np.pi * 37 * np.arange(n) / n + 0.3)
    assert energy(sent(FFT(2 / n, values="float32"), wave) - wave) < 1e-9 * energy(wave)
    highest = (-1.0) ** np.arange(n)
    assert energy(sent(FFT(1 / n, values="float32"), highest) - highest) < 1e-9 * n


def test_c7_of_equal_coefficients_those_of_lower_frequency_are_kept() -> None:
    x = np.eye(1, 65, 0)[0]
    kept = np.flatnonzero(np.abs(spectrum(sent(FFT(9 / 65, values="float32"), x))) > 1e-4)
    # A spike at 0: every cosine is √(2/n), every sine 0, the mean half as much in energy.
    assert kept.tolist() == list(range(1, 18, 2))


@pytest.mark.parametrize("clients", [1, 2, 7])
def test_c7_summing_spectra_is_the_mean_of_what_was_decoded(clients: int) -> None:
    layout = Layout.of({"w": np.zeros((6, 5, 3, 3)), "v": np.zeros(77)}, ALL)
    codec = FFT(0.3, order="HWDF")
    weights = np.random.default_rng(clients).dirichlet(np.ones(clients))
    total, each = Update(np.full(layout.size, -0.0, np.float32), layout), np.zeros(layout.size)
    for i, weight in enumerate(weights):
        x = np.random.default_rng(i).standard_normal(layout.size).astype(np.float32)
        frame, _ = codec.encode(Update(x, layout), {}, Key(i))
        codec.gather(frame, float(weight), total)
        each += weight * codec.decode(frame, layout)
    codec.conclude(total)
    assert np.linalg.norm(total.vector - each) <= 1e-6 * np.linalg.norm(each)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_undone(order: str) -> None:
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32)
    moved = x.copy()
    read_in(moved, (2, 3, 4, 5), order)
    axes = ["FDHW".index(letter) for letter in order]
    assert moved.tolist() == x.reshape(2, 3, 4, 5).transpose(axes).reshape(-1).tolist()
    write_back(moved, (2, 3, 4, 5), order)
    assert moved.tolist() == x.tolist()
    for shape in ((120,), (10, 12), (2, 3, 20), (2, 3, 4, 5, 1)):
        read_in(moved, shape, order)
        assert moved.tolist() == x.tolist()
    for transform in (DFT(order=order), DCT(16, order=order)):
        assert get_codec(Domain(transform, TopK(0.1)).to_config()).transform == transform
        there = spectrum_of(transform, x, (2, 3, 4, 5))
        transform.apply(there, Layout.of({"w": x.reshape(2, 3, 4, 5)}, ALL), inverse=True)
        np.testing.assert_allclose(there, x, atol=1e-4)


def spectrum_of(transform: DFT | DCT, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = x.copy()
    transform.apply(out, Layout.of({"w": x.reshape(shape)}, ALL))
    return out


def test_what_varies_slowly_in_an_order_is_compressed_in_that_order() -> None:
    rng, slow = np.random.default_rng(2), np.zeros(9600, np.float32)
    for i in range(1, slow.size):
        slow[i] = 0.95 * slow[i - 1] + rng.standard_normal()
    stored = slow.reshape(5, 5, 16, 24).transpose(3, 2, 0, 1)
    wrong, right = (
        energy(sent(FFT(0.1, values="float32", order=order), stored) - stored) for order in ("FDHW", "HWDF")
    )
    # In another order the same elements are far apart, which only moves their common waves to other frequencies.
    assert right < 0.75 * wrong
    # Chunks of 64 see none of what is further apart.
    wrong, right = (
        energy(sent(Domain(DCT(64, order=order), TopK(0.1, "layer")), stored) - stored) for order in ("FDHW", "HWDF")
    )
    assert right < 0.3 * wrong
    with pytest.raises(ConfigError, match="no axes"):
        DFT(scope="global", order="HWDF")
    with pytest.raises(ConfigError, match="order"):
        FFT(order="HWDD")


def test_white_noise_is_better_listed_than_transformed() -> None:
    """One complex coefficient or its parts: noise is as flat in frequency as in space, and no flatter."""
    x = np.random.default_rng(0).standard_t(3, 20_000).astype(np.float32)
    assert energy(sent(TopK(0.1, "layer"), x) - x) < 0.6 * energy(sent(FFT(0.1, values="float32"), x) - x)


SCHEDULE = ((1, 0.1), (3, 0.5), (4, 1.0))


@pytest.mark.parametrize("codec", [TopK(0.02, schedule=SCHEDULE), FFT(0.02, schedule=SCHEDULE, values="float32")])
def test_a_schedule_decides_how_many_travel_in_each_round(codec: TopK | FFT) -> None:
    layout = Layout.flat(100)
    x = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    counts = [10, 10, 10, 50, 100, 100]
    frames = {}
    for round_, count in enumerate(counts):
        key = Key(1, round=round_)
        frames[round_], _ = codec.encode(Update(x, layout), codec.init(layout), key)
        assert codec.verify(frames[round_], layout, key).tensors[0].values.k == count
    with pytest.raises(LimitExceeded, match="allows 10"):
        codec.verify(frames[3], layout, Key(1, round=2))
    assert codec.contraction(layout) == 0.1
    assert get_codec(codec.to_config()) == codec
    assert max(map(len, frames.values())) <= codec.longest(layout)
    later = TopK(0.02, schedule=SCHEDULE[1:])
    assert [later.count(later.stretches(layout)[0], Key(1, round=r)) for r in (1, 2, 3)] == [2, 2, 50]
    assert later.contraction(layout) == 0.02


def test_schedules_that_are_none_are_refused() -> None:
    for schedule in (((0, 0.5),), ((2, 0.5), (2, 0.6)), ((3, 0.5), (2, 0.6)), ((1, 0.0),), ((1, 1.5),), (1, 2), 7):
        with pytest.raises(ConfigError):
            TopK(0.1, schedule=schedule)
    with pytest.raises(ConfigError, match="not both"):
        TopK(0.1, schedule=SCHEDULE, warmup=3)


def test_what_is_left_out_follows_the_learning_rate() -> None:
    rates = [0.1 / (1 + t / 10) for t in range(50)]
    schedule = diminishing(0.9, rates, 5.0)
    assert schedule[0] == (1, 0.5)
    for (start, density), (end, _) in itertools.pairwise((*schedule, (51, 1.0))):
        for round_ in range(start, end):
            assert 1.0 - density == pytest.approx(min(0.9, 5.0 * rates[round_ - 1]), abs=1e-9)
    assert diminishing(0.3, [1.0, 0.5, 1e-3], 2.0) == ((1, 0.7), (3, 0.998))
    for bad in ((1.0, [1.0], 1.0), (-0.1, [1.0], 1.0), (0.5, [0.0], 1.0), (0.5, [1.0], 0.0)):
        with pytest.raises(ConfigError):
            diminishing(*bad)


def loss_after(rounds: int, theta: str) -> float:
    """Mean loss over the last tenth of a quadratic with noisy gradients and falling steps.

    An eighth of the spectrum is noisy, more than the constant share sends: all else is then left out for good.
    """
    n, rng = 256, np.random.default_rng(5)
    layout = Layout.flat(n)
    rates = [0.5 / (1 + t / 20) for t in range(rounds)]
    schedules = {"none": ((1, 1.0),), "constant": ((1, 0.1),), "falling": diminishing(0.9, rates, 8.0)}
    codec = FFT(1.0, values="float32", schedule=schedules[theta])
    x, losses = rng.standard_normal(n), []
    for t, rate in enumerate(rates):
        noise = (10.0 * rng.standard_normal(n) * (np.arange(n) < n / 8)).astype(np.float32)
        DFT().apply(noise, layout, inverse=True)
        gradient = Update((x + noise).astype(np.float32), layout)
        x = x - rate * codec.decode(codec.encode(gradient, {}, Key(1, round=t + 1))[0], layout)
        losses.append(float(x @ x) / 2)
    return float(np.mean(losses[-rounds // 10 :]))


def test_c7_leaving_out_less_with_the_step_reaches_the_dense_loss_and_a_constant_share_does_not() -> None:
    dense, falling, constant = (loss_after(1000, theta) for theta in ("none", "falling", "constant"))
    assert falling <= 1.1 * dense
    assert constant >= 2.5 * dense
