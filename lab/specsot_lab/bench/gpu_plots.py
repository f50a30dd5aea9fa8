"""`specsot bench gpu --draw FILE`: pictures of what `specsot bench gpu --json FILE` measured.

Aims are drawn beside what was reached, and floors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specsot_app.bench.plots import OTHER, PLAIN, RIVAL, SAME, picture

Row = Mapping[str, Any]

COLOURS = (SAME, OTHER, RIVAL)
VERIFY_AIMS = {64: 1.10, 200: 1.35}
GAIN_AIMS = {"eagle": 3.9, "eagle, fp8 head": 4.4, "both": 14.0, "both, fp8 head": 14.0, "whole": 9.0}
NEVER_BELOW = 0.97  # of plain decoding, with many requests


def draw_stored(file: Path) -> int:
    """The pictures of a stored run, beside it."""
    for drawn in draw(json.loads(file.read_text()), file.with_suffix("")):
        print(drawn)
    return 0


def draw(told: Mapping[str, Any], stem: Path) -> list[Path]:
    """`stem`-verify.png, -gains.png, -requests.png; returns them. Raises InvalidRequest: no matplotlib."""
    rows, device, drawn = told["rows"], told["settings"]["device"], list[Path]()
    for what, title, fill, size in (
        ("verify", "Verification, bf16", _verify, (6.4, 4.2)),
        ("gains", "Speculation and branches, acceptance replayed", _gains, (7.6, 5.6)),
        ("requests", "Requests at once, acceptance replayed", _requests, (6.4, 3.8)),
    ):
        drawn.append(stem.with_name(f"{stem.name}-{what}.png"))
        with picture(drawn[-1], f"{title}, {device}", size) as (panel,):
            fill(panel, rows)
    return drawn


def _verify(panel: Any, rows: Sequence[Row]) -> None:
    """Multiples of one row's time; the same of the floors."""
    ours = [row for row in rows if row["what"] == "verify, device"]
    for colour, model in zip(COLOURS, dict.fromkeys(row["model"] for row in ours)):
        mine = [row for row in ours if row["model"] == model]
        counts = [row["rows"] for row in mine]
        panel.plot(counts, [row["t/t(1)"] for row in mine], "o-", color=colour, label=model, markersize=4)
        if "floor ms" in mine[0]:
            floors = [row["floor ms"] / mine[0]["ms"] for row in mine]
            panel.plot(counts, floors, ":", color=colour, label=f"{model}, floor")
    panel.plot(*zip(*VERIFY_AIMS.items()), "_", color=PLAIN, markersize=18, markeredgewidth=2, label="aim")
    powers = [2**power for power in range(10)]
    panel.set_xscale("log", base=2)
    panel.set_xticks(powers, powers)
    panel.set_ylim(0)
    panel.set_xlabel("rows of a tree, behind 1,024 rows of text")
    panel.set_ylabel("time of a lap, in laps of one row")


def _gains(panel: Any, rows: Sequence[Row]) -> None:
    """Bars, with what each would be at its floor."""
    ours = [row for row in rows if _way(row) and "requests" not in row and row["x plain"] != 1]
    places, gains = range(len(ours)), [row["x plain"] for row in ours]
    if floors := [row["x plain at the floor"] for row in ours if "x plain at the floor" in row]:
        panel.barh(
            places, floors, color="#dddddd", height=0.8, label="if laps took no longer than their floor"
        )
    drawn = panel.barh(places, gains, color=SAME, height=0.56, label="measured")
    panel.bar_label(drawn, [f"{gain:.2f} " for gain in gains], padding=-26, fontsize=8, color="white")
    for place, aim in enumerate(map(_aim, ours)):
        if aim:
            panel.plot([aim, aim], [place - 0.4, place + 0.4], color=PLAIN, linewidth=2)
    panel.plot([], [], color=PLAIN, linewidth=2, label="aim")
    panel.set_yticks(places, [_said(row) for row in ours])
    panel.invert_yaxis()
    panel.set_xlabel("tokens/s, in those of plain decoding by the same stage")


def _requests(panel: Any, rows: Sequence[Row]) -> None:
    """How much faster than as many plain requests; the tuner decides."""
    ours = [row for row in rows if "requests" in row]
    gains = [row["x plain"] for row in ours]
    drawn = panel.bar(range(len(ours)), gains, color=SAME, width=0.6)
    texts = [f"{row['x plain']:.2f}\n{row['tokens/s']:,.0f} tok/s" for row in ours]
    panel.bar_label(drawn, texts, padding=4, fontsize=8)
    panel.axhline(
        NEVER_BELOW, color=PLAIN, linewidth=1, linestyle="--", label=f"aim: never below {NEVER_BELOW}"
    )
    panel.set_xticks(range(len(ours)), [row["requests"] for row in ours])
    panel.margins(y=0.2)
    panel.set_xlabel("requests at once")
    panel.set_ylabel("tokens/s, in those of plain decoding")


def _way(row: Row) -> str | None:
    """How it was written; None where nothing was replayed."""
    what = str(row["what"])
    return what.removeprefix("replayed, ") if what.startswith("replayed, ") else None


def _said(row: Row) -> str:
    """The ring's way, and for a whole request whether its branches are equally long."""
    way, lengths = _way(row) or "", set(str(row.get("branches", "")).split())
    return f"{way}\n{'equal' if len(lengths) == 1 else 'uneven'} branches" if lengths else way


def _aim(row: Row) -> float | None:
    way = _way(row) or ""
    whole = way.startswith("whole") and not way.endswith("sot")
    return GAIN_AIMS["whole"] if whole else GAIN_AIMS.get(way)
