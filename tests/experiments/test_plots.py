"""Plots: styles that anybody can tell apart, and labels that do not touch each other."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcomp.experiments.findings import Curves, Series
from fedcomp.experiments.plots import DARK, LIGHT, draw, line_plot, styles


def svg(curves: Curves, salt: str = "s") -> str:
    return line_plot(curves, styles(series.name for series in curves.series), salt=salt)


@pytest.mark.slow
def test_a_plot_draws_every_series_once_in_the_pages_colours() -> None:
    lines = [Series(f"line {i}", [0, 1, 2], [0.1 * i, math.nan, 0.5]) for i in range(3)]
    curves = Curves('accuracy "now"', "round", "%", lines)
    text = svg(curves)
    assert [text.count(f"var(--series-{i})") > 0 for i in range(4)] == [True, True, True, False]
    assert re.search(r"#[0-9a-f]{6}\b", text) is None  # a fixed colour would be unreadable on one of the two faces
    assert "&quot;now&quot;" in text
    assert text == svg(curves)
    last = line_plot(Curves("t", "x", "y", lines[2:]), styles(line.name for line in lines), salt="s")
    assert "var(--series-2)" in last, "its style is that of its name"
    assert "var(--series-0)" not in last


@pytest.mark.slow
def test_a_logarithmic_plot_leaves_out_what_has_no_logarithm() -> None:
    def drawn(x: list[float], y: list[float]) -> str:
        return svg(Curves("t", "x", "y", [Series("a", x, y)], log_x=True, log_y=True, x_bytes=True))

    with_zeros = drawn([0, 5, 10, 100], [1, 0, 2, 3])
    assert with_zeros == drawn([10, 100], [2, 3])
    assert "100 B" in with_zeros


AXES = {
    "rounds": (np.arange(41), False, False),
    "many rounds": (np.arange(123_457), False, False),
    "thousandths": (np.linspace(0.001, 0.0013, 9), False, False),
    "large and negative": (np.linspace(-3e7, 8e7, 9), False, False),
    "constant": (np.full(4, 9.86), False, False),
    "decades": (np.logspace(0, 12, 30), True, False),
    "small decades": (np.logspace(-15, -1, 30), True, False),
    "less than a decade": (np.linspace(2.1, 3.9, 30), True, False),
    "two decades": (np.logspace(3.1, 5.2, 30), True, False),
    "bytes": (np.linspace(0, 136e6, 30), False, True),
    "decades of bytes": (np.logspace(2, 11, 30), True, True),
    "two decades of bytes": (np.logspace(3.1, 5.2, 30), True, True),
    "wide labels": (np.linspace(123_456_000, 123_457_000, 30), False, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("log", [False, True])
def test_labels_of_one_magnitude_have_equally_many_decimals(log: bool) -> None:
    values = [2.246, 2.251, 2.259, 2.28]
    figure = draw(Curves("t", "x", "y", [Series("a", values, values)], log_x=log, log_y=log), styles(["a"]))
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        texts = [label.get_text() for label in axis.get_ticklabels()]
        assert len({len(text.partition(".")[2]) for text in texts}) == 1, texts


@pytest.mark.slow
@pytest.mark.parametrize("name", AXES)
def test_tick_labels_do_not_touch_and_are_in_the_picture(name: str) -> None:
    values, log, as_bytes = AXES[name]
    line = Series("a", values.tolist(), values.tolist())
    figure = draw(Curves("t", "x", "y", [line], log_x=log, log_y=log, x_bytes=as_bytes), styles(["a"]))
    figure.canvas.draw()
    (axes,) = figure.axes
    for axis in (axes.xaxis, axes.yaxis):
        labels = [label for label in axis.get_ticklabels() if label.get_text()]
        boxes = [label.get_window_extent() for label in labels]
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
        assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
        assert len({label.get_text() for label in labels}) == len(labels) >= 2, "without two names there is no scale"


def test_every_name_has_its_own_style_and_neighbours_share_nothing() -> None:
    known = styles(f"name {i}" for i in range(210))
    looks = [(style.colour, style.dash, tuple(style.marker)) for style in known.values()]
    assert len(set(looks)) == 210
    assert all(a != b for first, second in itertools.pairwise(looks) for a, b in zip(first, second, strict=True))
    assert styles(["b", "a", "b"]) == {"b": known["name 0"], "a": known["name 1"]}


# Machado, Oliveira, Fernandes 2009, severity 1, on linear sRGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
"""IEC 61966-2-1, from linear sRGB."""


def linear(colour: str) -> NDArray[np.float64]:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE 1976 L*a*b* for the white of D65."""
    xyz = TO_XYZ @ light / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(("face", "page"), [(LIGHT, "#ffffff"), (DARK, "#1d2024")], ids=["light", "dark"])
def test_colours_differ_for_every_reader_and_stand_out_from_the_page(
    face: tuple[str, ...], page: str, vision: str
) -> None:
    seen = [lab(np.clip(np.array(VISION[vision]) @ linear(colour), 0, 1)) for colour in face]
    distances = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)]
    assert min(distances) > 20, "Delta E 1976; 2.3 is just noticeable side by side"
    brightness = [float(TO_XYZ[1] @ linear(colour)) + 0.05 for colour in (*face, page)]
    contrast = [max(b, brightness[-1]) / min(b, brightness[-1]) for b in brightness[:-1]]
    assert min(contrast) >= 3.0, "WCAG 2.1, 1.4.11"
