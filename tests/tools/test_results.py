"""What tools/results.py and tools/charts.py make of measurements, and tools/site_links.py of links."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import results
from charts import Chart, draw
from site_links import relinked, with_bars

ROWS = [
    {"server": server, "clients": n, "tokens/s": n * speed}
    for server, speed in (("a", 1200), ("b", 2))
    for n in (1, 8)
]
GIVEN: Mapping[str, Any] = {
    "title": "Served", "machine": "gpu", "date": "2026-11-29", "command": "serve", "rows": ROWS
}  # fmt: skip


def write(folder: Path, name: str, given: object) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(given))
    return file


def test_a_table_has_the_rows_as_they_are_or_a_column_for_each_value(tmp_path: Path) -> None:
    write(tmp_path, "served", GIVEN)
    page = (
        "# Page\n<!-- table served: where=server=b -->\nold\n<!-- end -->\n"
        "<!-- table served: rows=server; columns=clients; value=tokens/s -->\n<!-- end -->\nend\n"
    )
    filled = results.filled(page, results.read_all(tmp_path))
    assert "| b | 1 | 2 |\n| b | 8 | 16 |" in filled
    assert "| server | clients: 1, tokens/s | clients: 8, tokens/s |" in filled
    assert "| a | 1,200 | 9,600 |" in filled
    assert "Served, 2026-11-29: [command and notes](measurements/gpu.md#served)." in filled
    assert "old" not in filled
    assert results.filled(filled, results.read_all(tmp_path)) == filled, "again is the same"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"date": "today"}, "date must be YYYY-MM-DD, got 'today'"),
        ({"rows": [{"x": [1, 2]}]}, "'x' must be one number or text"),
        ({"settings": 1}, "fields settings are missing or unknown"),
    ],
)
def test_a_measurement_that_is_none_is_refused_by_name(
    change: Mapping[str, Any], why: str, tmp_path: Path
) -> None:
    file = write(tmp_path, "odd", {**GIVEN, **change})
    with pytest.raises(ValueError, match=why):
        results.Measurement.read(file)


def claim(**changes: object) -> Mapping[str, object]:
    own, other = {"server": "b", "clients": 8}, {"server": "a", "clients": 8}
    return {"what": "b", "measurement": "served", "value": "tokens/s", "own": own, "other": other, **changes}


def test_a_ratio_is_above_one_where_specsot_is_better_and_the_worst_comes_first(tmp_path: Path) -> None:
    write(tmp_path, "served", GIVEN)
    given = [claim(better="less"), claim(what="slow", readme=True)]
    write(tmp_path, "claims", given)
    slow, quick = results.claims(results.read_all(tmp_path), "", tmp_path)
    assert (slow.row["what"], slow.ratio, slow.in_readme) == ("slow", 16 / 9600, True)
    assert (quick.ratio, quick.in_readme) == (600, False)
    write(tmp_path, "claims", [claim(own={"server": "b"})])
    with pytest.raises(ValueError, match="2 rows have"):
        results.claims(results.read_all(tmp_path), "", tmp_path)


def test_a_chart_shows_every_figure_and_says_it_in_words() -> None:
    svg = draw(Chart("T & U", "tokens/s", "2026-11-29", {"one": {"a": 12345, "b": 0.5}, "two": {"b": 1}}))
    texts = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"12,345", "0.5", "1", "one", "two", "a", "b"} <= set(texts)
    assert "one: a 12345, b 0.5; two: b 1" in svg
    assert svg.count("<rect") == 2 + 3, "of the legend, and the bars"


@pytest.mark.parametrize(
    ("source", "link", "on_the_site"),
    [
        ("CONTRIBUTING.md", "[walk](docs/walk.md#core)", "[walk](walk.md#core)"),
        ("docs/index.md", "[how](../CONTRIBUTING.md)", "[how](contributing.md)"),
        ("docs/measurements/cpu.md", "[one](../serve.md)", "[one](../serve.md)"),
        (
            "docs/index.md",
            "[card](../models/smollm2/README.md)",
            "card (`models/smollm2/README.md` in the repository)",
        ),
        ("docs/index.md", "[`LICENSE`](../LICENSE)", "`LICENSE`"),
        (
            "docs/index.md",
            "[here](#there), [far](https://a.b/c.md)",
            "[here](#there), [far](https://a.b/c.md)",
        ),
        ("docs/index.md", "![a picture](terminal.svg)", "![a picture](terminal.svg)"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_are_text(source: str, link: str, on_the_site: str) -> None:
    assert relinked(link, source) == on_the_site


def test_a_bar_in_a_table_has_no_backslash_on_the_site() -> None:
    html = "<p><code>a\\|b</code></p><table><td><code>True\\|False</code></td></table>"
    assert with_bars(html) == "<p><code>a\\|b</code></p><table><td><code>True|False</code></td></table>"
