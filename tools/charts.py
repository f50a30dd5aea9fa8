"""Draws grouped bars as SVG that is read in light and dark: text has the colour of the page around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Final

# Pixels of the drawing, and of the space around the bars.
WIDTH: Final = 720
HEIGHT: Final = 340
LEFT: Final = 16
TOP: Final = 84
BOTTOM: Final = 34
# Part of a group's width that its bars take.
FILLED: Final = 0.86
# Colours of series, readable on white and on black, in the order of use.
COLOURS: Final = ("#8a94a6", "#3b82f6", "#0d9f6e", "#d97706", "#9061f9")
# Average width of a character of 12 pixels, for the places of the legend.
CHARACTER: Final = 6.4
# Colours where nothing around the drawing says one; the site's pages leave them out.
STYLE: Final = (
    "<style>.chart{color:#1f2328}.chart text{fill:currentColor}"
    "@media(prefers-color-scheme:dark){.chart{color:#e6edf3}}</style>\n"
)


@dataclass(frozen=True)
class Chart:
    """What is drawn.

    title: One line above the bars.
    unit: Unit of all figures.
    date: The day of the measurement.
    groups: Figures of each group by series; a series has one colour in all groups.
    """

    title: str
    unit: str
    date: str
    groups: Mapping[str, Mapping[str, float]]

    @property
    def series(self) -> list[str]:
        """Return the names of all series, in the order of first use."""
        return list(dict.fromkeys(name for bars in self.groups.values() for name in bars))


def draw(chart: Chart) -> str:
    """Return the chart as SVG.

    chart: What is drawn; at least one figure is above 0.
    """
    words = "; ".join(
        f"{group}: " + ", ".join(f"{name} {value:g}" for name, value in bars.items())
        for group, bars in chart.groups.items()
    )
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12">\n{STYLE}',
        f"<title>{escape(chart.title)}</title>\n<desc>{escape(f'{chart.unit}. {words}')}</desc>\n",
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(chart.title)}</text>\n',
        f'<text x="{LEFT}" y="42" opacity="0.75">{escape(chart.unit)}, {chart.date}</text>\n',
        *legend(chart.series),
        *bars_of(chart),
        f'<line x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}" '
        'stroke="currentColor" opacity="0.4"/>\n</svg>\n',
    ]
    return "".join(parts)


def legend(series: list[str]) -> Iterator[str]:
    """Yield a square and the name of each series, in one line.

    series: Names in the order of their colours.
    """
    x = float(LEFT)
    for name, colour in zip(series, COLOURS, strict=False):
        yield f'<rect x="{x:.0f}" y="54" width="11" height="11" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 16:.0f}" y="64">{escape(name)}</text>\n'
        x += 34 + CHARACTER * len(name)


def bars_of(chart: Chart) -> Iterator[str]:
    """Yield the bars of every group with their figures, and the group's name below.

    chart: What is drawn.
    """
    most = max(value for bars in chart.groups.values() for value in bars.values())
    scale = (HEIGHT - TOP - BOTTOM - 16) / most
    wide = (WIDTH - 2 * LEFT) / len(chart.groups)
    series = chart.series
    bar = wide * FILLED / len(series)
    for at, (group, bars) in enumerate(chart.groups.items()):
        begin = LEFT + at * wide + wide * (1 - FILLED) / 2
        for name, value in bars.items():
            place = series.index(name)
            x, height = begin + place * bar, value * scale
            y = HEIGHT - BOTTOM - height
            yield (
                f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{bar - 4:.1f}" height="{height:.1f}" rx="2" '
                f'fill="{COLOURS[place % len(COLOURS)]}"/>'
            )
            yield f'<text x="{x + bar / 2:.1f}" y="{y - 5:.1f}" text-anchor="middle">{figure(value)}</text>\n'
        middle = begin + wide * FILLED / 2
        yield f'<text x="{middle:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(group)}</text>\n'


def figure(value: float) -> str:
    """Return a number in three digits or all of its whole ones, with separators of thousands."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
