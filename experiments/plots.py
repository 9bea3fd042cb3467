"""Line plots as inline SVG for a page with a light and a dark face, and pictures as PNG.

Matplotlib draws with placeholder colours that are then replaced by CSS variables of the page, so that one
drawing serves both faces. Figures are plain objects: no pyplot, no global figure list, no window.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from fedcomp.experiments.findings import Curves, Pictures, Series
from fedcomp.experiments.report import number, short_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES_COLOURS = 8
"""How many series a plot tells apart by colour; further ones repeat a colour with another dash."""

# What matplotlib draws with -> the CSS variable it becomes. Any colours do that nothing else uses.
_INK = "#010203"
_GRID = "#040506"
_SERIES = tuple(f"#f0f0{i:02x}" for i in range(SERIES_COLOURS))
_VARIABLES = {_INK: "var(--muted)", _GRID: "var(--grid)"} | {
    colour: f"var(--series-{i})" for i, colour in enumerate(_SERIES)
}
# Lines that lie on each other stay visible: broken ones are drawn over whole ones.
_WHOLE, _DASHED, _DOTTED = (0.0, ()), (0.0, (4.0, 1.6)), (0.0, (1.3, 1.5))
_DASHES: tuple[tuple[float, tuple[float, ...]], ...] = (_WHOLE, _DASHED, _WHOLE, _DASHED, _DOTTED)


def line_plot(curves: Curves, *, salt: str) -> str:
    """Return an ``<svg>`` element with one line per series, colours and dashes in the order of the series.

    ``salt`` tells apart the element ids of several plots on one page.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text, in the page's own font; ids do not depend on the time of day.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 11.5}):
        figure = Figure(figsize=(6.0, 3.9), layout="constrained")
        axes = figure.add_subplot()
        drawn = []
        for i, line in enumerate(curves.series):
            points = _points(line, curves)
            drawn += points
            if points:
                _draw(axes, i, points)
        _scale(axes, "x", [x for x, _ in drawn], log=curves.log_x, as_bytes=curves.x_bytes)
        _scale(axes, "y", [y for _, y in drawn], log=curves.log_y)
        axes.set_xlabel(curves.x_label, color=_INK, parse_math=False)
        axes.set_ylabel(curves.y_label, color=_INK, parse_math=False)
        _dress(axes)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue(), curves.title)


def swatch(index: int) -> str:
    """Return a small ``<svg>`` that shows the line of series ``index``, for a legend."""
    pattern = " ".join(f"{2 * length:g}" for length in _dash(index)[1]) or "none"
    return (
        '<svg class="swatch" width="30" height="8" aria-hidden="true"><line x1="0" y1="4" x2="30" y2="4" '
        f'style="stroke: var(--series-{index % SERIES_COLOURS}); stroke-width: {_width(index) + 0.6:g}; '
        f'stroke-dasharray: {pattern}"/></svg>'
    )


def _dash(index: int) -> tuple[float, tuple[float, ...]]:
    return _DASHES[index % len(_DASHES)]


def _width(index: int) -> float:
    return 3.4 if index == 0 else 1.9


def _draw(axes: Axes, index: int, points: list[tuple[float, float]]) -> None:
    x, y = zip(*points, strict=True)
    axes.plot(
        x,
        y,
        color=_SERIES[index % SERIES_COLOURS],
        linestyle=_dash(index) if _dash(index)[1] else "-",
        linewidth=_width(index),
        marker="o" if len(points) < 12 else "",
        markersize=4,
        solid_capstyle="round",
    )


def _points(line: Series, curves: Curves) -> list[tuple[float, float]]:
    """Return the points that can be drawn: finite, and above zero where the axis is logarithmic."""
    return [
        (x, y)
        for x, y in zip(line.x, line.y, strict=True)
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not curves.log_x) and (y > 0 or not curves.log_y)
    ]


def picture_sheet(pictures: Pictures) -> str:
    """Return a PNG of all pictures, a pixel of it for each of theirs and a grey line between them, base64."""
    from matplotlib.image import imsave

    rows, columns, height, width = pictures.shape
    sheet = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1), 128, np.uint8)
    for r, c in np.ndindex(rows, columns):
        top, left = r * (height + 1), c * (width + 1)
        sheet[top : top + height, left : left + width] = pictures.images[r, c]
    buffer = io.BytesIO()
    imsave(buffer, sheet, cmap="gray", vmin=0, vmax=255, format="png", metadata={"Software": ""})
    return base64.b64encode(buffer.getvalue()).decode()


def _scale(axes: Axes, which: str, values: Sequence[float], *, log: bool, as_bytes: bool = False) -> None:
    """Give an axis its scale and readable marks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    if log and values:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if math.log10(high / low) < 2.5 else (1.0,)))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_bytes(value) if as_bytes else number(value)))
    elif as_bytes:
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_bytes(value)))
    elif which == "x":
        axis.set_major_locator(MaxNLocator(integer=all(value == int(value) for value in values)))


def _dress(axes: Axes) -> None:
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, which="both", length=0, pad=5)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)


def _inline(svg: str, title: str) -> str:
    """Make a stand-alone drawing a part of an HTML page: no prolog, no fixed size, no name spaces, page colours."""
    svg = svg[svg.index("<svg") :]
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', head)
    assert box is not None  # matplotlib always writes one
    for colour, variable in _VARIABLES.items():
        rest = rest.replace(colour, variable)
    rest = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", rest, count=1, flags=re.DOTALL)
    rest = re.sub(r" font-family: [^;\"]*;?", "", rest)
    return f'<svg class="plot" {box.group()} role="img" aria-label="{escape(title)}">{rest}'
