"""Line plots as inline SVG for light and dark pages, their legends, and pictures as PNG.

Matplotlib draws with placeholder colours that are then replaced by CSS variables of the page, so that one
drawing serves both faces. Figures are plain objects: no pyplot, no global figure list, no window.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedcomp.errors import optional
from fedcomp.experiments.findings import Curves, Pictures, Series
from fedcomp.experiments.report import aligned, number, short_bytes

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

# What each face of the page draws a colour with. Any two of a face differ, also for a reader who is colour-blind, and
# stand out from its background (measured by the tests).
LIGHT = ("#8a9099", "#1b1d21", "#1456ab", "#b68e00", "#761c05", "#2ca05e", "#6d3f6d")
DARK = ("#8d949c", "#f2f3f4", "#3a87fb", "#c69014", "#ca5f45", "#8de49d", "#eeb2f9")

_DASHES: tuple[tuple[float, ...], ...] = ((), (4.0, 1.6), (1.3, 1.5), (6.0, 1.5, 1.3, 1.5), (9.0, 2.5))
_CIRCLE = [(math.cos(math.tau * i / 16), math.sin(math.tau * i / 16)) for i in range(16)]
_ARM = [(0.4, -0.4), (1.2, -0.4), (1.2, 0.4)]
_PLUS = [p for a, b in ((1, 0), (0, 1), (-1, 0), (0, -1)) for p in [(a * x - b * y, b * x + a * y) for x, y in _ARM]]
_MARKERS: tuple[Sequence[tuple[float, float]], ...] = (
    _CIRCLE,
    [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    [(-1.1, -0.8), (1.1, -0.8), (0.0, 1.1)],
    [(0.0, -1.2), (1.2, 0.0), (0.0, 1.2), (-1.2, 0.0)],
    [(-1.1, 0.8), (1.1, 0.8), (0.0, -1.1)],
    _PLUS,
)
"""Corners, y upwards, in half the marker's size. The numbers of colours, dashes and markers share few factors: 210
series differ in at least one of them, and neighbours in all."""

# What matplotlib draws with -> the CSS variable it becomes. Any colours do that nothing else uses.
_INK, _GRID = "#010203", "#040506"
_SERIES = tuple(f"#f0f0{i:02x}" for i in range(len(LIGHT)))
_VARIABLES = {_INK: "var(--muted)", _GRID: "var(--grid)"} | {
    colour: f"var(--series-{i})" for i, colour in enumerate(_SERIES)
}
_MANY = 12
"""Lines with as many points or more have markers at some of them only."""


class Style(NamedTuple):
    """How one system is drawn, in every plot and legend of a report. The first of a report is drawn broad.

    Attributes
    ----------
    colour : int
        Which of :data:`LIGHT` and :data:`DARK`.
    dash : tuple of float
        Lengths of strokes and gaps in widths of the line; empty for a whole line.
    marker : sequence of (float, float)
        Corners.
    width : float
        Of the line, in points.
    """

    colour: int
    dash: tuple[float, ...]
    marker: Sequence[tuple[float, float]]
    width: float

    def swatch(self) -> str:
        """Return a small ``<svg>`` that shows line and marker, for a legend."""
        dash = " ".join(f"{self.width * length:.3g}" for length in self.dash) or "none"
        corners = " ".join(f"{17 + 3.6 * x:.3g},{6 - 3.6 * y:.3g}" for x, y in self.marker)
        colour = f"var(--series-{self.colour})"
        return (
            '<svg class="swatch" width="34" height="12" aria-hidden="true">'
            f'<path d="M0 6H34" style="stroke: {colour}; stroke-width: {self.width:g}; stroke-dasharray: {dash}"/>'
            f'<polygon points="{corners}" style="fill: {colour}"/></svg>'
        )


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a style for each name, fixed by the order of their first appearance."""
    return {
        name: Style(i % len(LIGHT), _DASHES[i % len(_DASHES)], _MARKERS[i % len(_MARKERS)], 1.8 if i else 3.2)
        for i, name in enumerate(dict.fromkeys(names))
    }


def line_plot(curves: Curves, known: Mapping[str, Style], *, salt: str) -> str:
    """Return an ``<svg>`` element with one line per series, drawn in the styles of their names.

    ``salt`` keeps apart the element ids of several plots on one page.
    """
    with optional("a plot"):
        import matplotlib as mpl

    # Text stays text, in the page's own font; ids do not depend on the time of day.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw(curves, known).savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue(), curves.title)


def draw(curves: Curves, known: Mapping[str, Style]) -> Figure:
    """Return the matplotlib figure of ``curves``, its tick labels thinned out until none touches another."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Narrow, so that the text can be read on a phone, where the plot is drawn smaller than this.
    with mpl.rc_context({"font.size": 11.0}):
        figure = Figure(figsize=(5.2, 3.5), layout="constrained")
        axes = figure.add_subplot()
        if curves.log_x:
            axes.set_xscale("log")
        if curves.log_y:
            axes.set_yscale("log")
        drawn = [points(line, curves) for line in curves.series]
        for i, (line, found) in enumerate(zip(curves.series, drawn, strict=True)):
            if not found:
                continue
            style, every = known[line.name], max(1, len(found) // 5)
            axes.plot(
                *zip(*found, strict=True),
                color=_SERIES[style.colour],
                linestyle=(0.0, style.dash) if style.dash else "-",
                linewidth=style.width,
                marker=list(style.marker),
                markersize=6.5,
                markeredgewidth=0,
                # Lines on each other show their markers at different places.
                markevery=1 if len(found) < _MANY else (i * every // 4 % every, every),
                solid_capstyle="round",
                # Broken lines over whole ones, so that lines on each other stay visible.
                zorder=2.0 + bool(style.dash),
            )
        # A dollar sign in a label is a character, not the beginning of a formula.
        axes.set_xlabel(curves.x_label, color=_INK, parse_math=False)
        axes.set_ylabel(curves.y_label, color=_INK, parse_math=False)
        axes.grid(visible=True, color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, which="both", length=0, pad=5)
        for side, spine in axes.spines.items():
            spine.set(visible=side == "bottom", color=_GRID)
        whole = all(x == int(x) for found in drawn for x, _ in found)
        # Both have their own labels before any is measured: matplotlib's would be laid out as formulas.
        ticks = [_ticks(axes.yaxis), _ticks(axes.xaxis, as_bytes=curves.x_bytes, whole=whole)]
        for axis, (places, texts) in zip((axes.yaxis, axes.xaxis), ticks, strict=True):
            _thin(figure, axis, places, texts)
    return figure


def points(line: Series, curves: Curves) -> list[tuple[float, float]]:
    """Return the points that can be drawn: finite, and above zero where the axis is logarithmic."""
    return [
        (x, y)
        for x, y in zip(line.x, line.y, strict=True)
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not curves.log_x) and (y > 0 or not curves.log_y)
    ]


def _ticks(axis: Axis, *, as_bytes: bool = False, whole: bool = False) -> tuple[list[float], list[str]]:
    """Give an axis its usual ticks; return their places and labels."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = sorted(axis.get_view_interval())
    log = axis.get_scale() == "log"
    locator: Locator = MaxNLocator(7, integer=whole, steps=[1, 2, 2.5, 5, 10])
    if log:
        # Below two and a half decades powers of ten alone give too few ticks: 2 and 5 are labelled, too.
        few = math.log10(high / low) < 2.5
        # So many ticks that the locator skips no decade itself; which labels fit is measured below.
        logarithmic = LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=50)
        locator = logarithmic if sum(low <= x <= high for x in logarithmic.tick_values(low, high)) > 1 else locator
    places = [float(x) for x in locator.tick_values(low, high) if low <= x <= high]
    texts = _texts(places, log, as_bytes)
    axis.set_ticks([], minor=True)
    axis.set_ticks(places, texts)
    return places, texts


def _thin(figure: Figure, axis: Axis, places: Sequence[float], texts: Sequence[str]) -> None:
    """Leave an axis every tick, every second, every third ... until no labels touch each other or nearly do."""
    layout = figure.get_layout_engine()
    assert layout is not None
    for step in range(1, len(places) + 1):
        axis.set_ticks(places[::step], texts[::step])
        # Extents of tick labels are known only once the layout has been computed; nothing has to be drawn for that.
        layout.execute(figure)
        boxes = [label.get_window_extent().padded(1.5) for label in axis.get_ticklabels() if label.get_text()]
        if not any(first.overlaps(second) for first, second in pairwise(boxes)):
            return


def _texts(places: Sequence[float], log: bool, as_bytes: bool) -> list[str]:
    if as_bytes:
        return [short_bytes(place) for place in places]
    if not log or max(places) < 10 * min(places):
        # Multiples of a decimal step carry float errors, which would show as digits.
        return aligned([round(place, 12) for place in places])
    if all(1e-3 <= place <= 1e4 for place in places):
        return [number(place) for place in places]
    return [_power(place) for place in places]


def _power(value: float) -> str:
    """Return ``value`` as ``2·10⁻⁶``."""
    digits, _, exponent = f"{value:.0e}".partition("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if digits == "1" else f"{digits}·{power}"


def picture_sheet(pictures: Pictures) -> str:
    """Return a PNG of all pictures, a pixel of it for each of theirs and a grey line between them, base64."""
    with optional("a picture"):
        from matplotlib.image import imsave

    rows, columns, height, width = pictures.shape
    sheet = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1), 128, np.uint8)
    for r, c in np.ndindex(rows, columns):
        top, left = r * (height + 1), c * (width + 1)
        sheet[top : top + height, left : left + width] = pictures.images[r, c]
    buffer = io.BytesIO()
    # Fixed limits: by default the darkest and the lightest pixel would become black and white.
    imsave(buffer, sheet, cmap="gray", vmin=0, vmax=255, format="png", metadata={"Software": ""})
    return base64.b64encode(buffer.getvalue()).decode()


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
    # Groups have the same ids in every drawing.
    rest = re.sub(r'<g id="[^"]*">', "<g>", rest)
    return f'<svg class="plot" {box.group()} role="img" aria-label="{escape(title)}">{rest}'
