"""Shapes of the figures, in the colours of one of two themes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Final

# Okabe-Ito colours; fills are the same hue, lighter or darker by theme.
THEMES: Final[Mapping[str, Mapping[str, str]]] = {
    "light": {
        "ink": "#1b1f24",
        "inkfill": "#f6f8fa",
        "soft": "#57606a",
        "line": "#8c959f",
        "lane": "#f6f8fa",
        "card": "#ffffff",
        "blue": "#0072b2",
        "bluefill": "#cfe6f5",
        "orange": "#b8630a",
        "orangefill": "#fbe3c0",
        "green": "#00775a",
        "greenfill": "#cdeee3",
        "red": "#c22f2f",
    },
    "dark": {
        "ink": "#e6edf3",
        "inkfill": "#262b35",
        "soft": "#9da7b3",
        "line": "#6e7681",
        "lane": "#262b35",
        "card": "#313947",
        "blue": "#6cbcf0",
        "bluefill": "#173a52",
        "orange": "#f0ad4e",
        "orangefill": "#4a3410",
        "green": "#4fd1a8",
        "greenfill": "#123f33",
        "red": "#ff7b72",
    },
}
FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Svg:
    """A drawing of ``width`` by ``height`` pixels; ``title`` and ``text`` are for readers who do not see it.

    Colours are names of a theme's. What is drawn later lies on top.
    """

    def __init__(self, width: int, height: int, title: str, text: str, theme: str) -> None:
        self.c = THEMES[theme]
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="t d" font-family="{FONT}">',
            f'<title id="t">{escape(title)}</title><desc id="d">{escape(text)}</desc>',
        ]

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str = "card",
        stroke: str | None = "line",
        r: float = 8,
        dash: str = "",
        width: float = 1.5,
    ) -> None:
        """Draw a rectangle with its upper left corner at (x, y), its corners rounded by ``r``."""
        d = f' stroke-dasharray="{dash}"' if dash else ""
        s = f'stroke="{self.c[stroke]}" stroke-width="{width}"' if stroke else 'stroke="none"'
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{r}" fill="{self.c[fill]}" {s}{d}/>')

    def circle(self, x: float, y: float, r: float, fill: str = "card", stroke: str = "line", dash: str = "") -> None:
        """Draw a circle around (x, y)."""
        d = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{self.c[fill]}" '
            f'stroke="{self.c[stroke]}" stroke-width="1.8"{d}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 14,
        color: str = "ink",
        anchor: str = "middle",
        weight: str = "normal",
    ) -> None:
        """Write a line whose base is at y; x is its middle, or with ``anchor`` "start" or "end" that."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{self.c[color]}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        color: str = "ink",
        width: float = 2.2,
        dash: str = "",
        head: bool = True,
    ) -> None:
        """Draw a line from the first point to the second, where its head is."""
        d = f' stroke-dasharray="{dash}"' if dash else ""
        a, c = math.atan2(y2 - y1, x2 - x1), self.c[color]
        ex, ey = (x2 - 8 * math.cos(a), y2 - 8 * math.sin(a)) if head else (x2, y2)
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{ex:.1f}" y2="{ey:.1f}" stroke="{c}" stroke-width="{width}"{d}/>'
        )
        if head:
            p = [(x2, y2), *((x2 - 11 * math.cos(a + s), y2 - 11 * math.sin(a + s)) for s in (0.42, -0.42))]
            self.parts.append(f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in p)}" fill="{c}"/>')

    def cross(self, x: float, y: float, r: float = 9, color: str = "red", width: float = 3) -> None:
        """Draw the mark of what is lost."""
        for s in (1, -1):
            self.parts.append(
                f'<line x1="{x - r:.1f}" y1="{y - s * r:.1f}" x2="{x + r:.1f}" y2="{y + s * r:.1f}" '
                f'stroke="{self.c[color]}" stroke-width="{width}" stroke-linecap="round"/>'
            )

    def done(self) -> str:
        """Return the file's text."""
        return "\n".join([*self.parts, "</svg>", ""])
