"""Writes what documents show of lab/results: a page for each machine, tables of pages, claims, charts.

python tools/results.py            # after a change of lab/results; `make docs` runs it, and a test holds it

A measurement is one JSON file: `title`, `machine` (a key of machines.json), `date`, `command` (a line or a
list of lines), `note` (optional), and `rows`, objects whose keys are column headings with their units.
`claims.json` names pairs of rows whose ratio is said; `charts.json` says what is drawn. A page asks for a
table between two comments:

    <!-- table h200-served -->                        the rows as they are
    <!-- table h200-served: where=clients=64 -->      some rows; also before `rows=`
    <!-- table h200-served: rows=server; columns=clients; value=tokens/s -->     a column for each clients
    <!-- claims lost -->, <!-- claims won -->         claims below 1, and the others
    <!-- claims readme -->                            claims that README makes
    <!-- end -->
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from charts import Chart, draw

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS, DOCS = REPOSITORY / "lab" / "results", REPOSITORY / "docs"
# Files of lab/results that are no measurement.
OTHERS = ("machines.json", "claims.json", "charts.json")
MARKED = re.compile(
    r"(<!-- (?P<kind>table|claims) (?P<what>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL
)

Cell = str | int | float | None
Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    name: Name of its file, without the ending.
    machine: Key of the machine.
    date: The day, as YYYY-MM-DD; the last one if there were several.
    command: Lines that repeat the measurement.
    note: What a reader must know of the rows, in sentences; empty if nothing.
    rows: Figures by column heading.
    """

    name: str
    title: str
    machine: str
    date: str
    command: tuple[str, ...]
    note: str
    rows: tuple[Row, ...]

    @staticmethod
    def read(file: Path) -> Measurement:
        """Return the measurement of a JSON file.

        file: A file of lab/results.

        Raises ValueError if it lacks a field or has one of another name, or if a cell is a list or an object.
        """
        told = json.loads(file.read_text(encoding="utf-8"))
        fields = {"title", "machine", "date", "command", "rows"}
        if missing := (fields - told.keys()) | (told.keys() - fields - {"note"}):
            raise ValueError(f"{file}: fields {', '.join(sorted(missing))} are missing or unknown")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", told["date"]):
            raise ValueError(f"{file}: date must be YYYY-MM-DD, got {told['date']!r}")
        for row in told["rows"]:
            if composed := [name for name, cell in row.items() if isinstance(cell, list | dict)]:
                raise ValueError(f"{file}: {composed[0]!r} must be one number or text")
        command = told["command"]
        lines = (command,) if isinstance(command, str) else tuple(command)
        note, rows = told.get("note", ""), tuple(told["rows"])
        return Measurement(file.stem, told["title"], told["machine"], told["date"], lines, note, rows)

    def find(self, wanted: Row) -> Row:
        """Return the only row whose cells equal the wanted ones.

        wanted: Cells by column heading.

        Raises ValueError if there is no such row, or more than one.
        """
        found = [row for row in self.rows if all(row.get(name) == cell for name, cell in wanted.items())]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} rows have {dict(wanted)}, not one")
        return found[0]


def read_all(folder: Path = RESULTS) -> dict[str, Measurement]:
    """Return the measurements of a folder, by name.

    folder: A folder like lab/results; folders within it are not read.

    Raises ValueError for a file that is no measurement.
    """
    files = [file for file in sorted(folder.glob("*.json")) if file.name not in OTHERS]
    return {file.stem: Measurement.read(file) for file in files}


def shown(cell: Cell) -> str:
    """Return a cell as text: whole numbers with separators of thousands, nothing for None."""
    if cell is None:
        return ""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell).replace("|", "\\|")


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table. Columns that hold a number are aligned to the right.

    rows: Figures by column heading; the headings are those of all rows, in the order of first use.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    right = {name for name in names if any(isinstance(row.get(name), int | float) for row in rows)}
    lines = [names, ["---:" if name in right else "---" for name in names]]
    lines += [[shown(row.get(name)) for name in names] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pivoted(rows: Sequence[Row], by: str, columns: str, value: str) -> list[Row]:
    """Return a row for each value of one heading, with a column for each value of another one.

    rows: Figures by column heading.
    by: Heading whose values name the rows.
    columns: Heading whose values name the columns.
    value: Heading of the figures.
    """
    found: dict[Cell, dict[str, Cell]] = {}
    for row in rows:
        found.setdefault(row[by], {by: row[by]})[f"{columns}: {row[columns]}, {value}"] = row[value]
    return list(found.values())


def asked_table(what: str, measurements: Mapping[str, Measurement]) -> str:
    """Return the table of a comment `table NAME`, or of `table NAME: where=A=B; rows=C; columns=D; value=E`.

    what: The comment's words after `table`.
    measurements: All measurements by name.

    A line below the table has the title, the date and a link to the machine's page. Raises KeyError for an
    unknown name.
    """
    name, _, words = what.partition(":")
    one = measurements[name.strip()]
    options = dict(re.findall(r"(\w+)=(.+?)(?=; |$)", words.strip()))
    rows: Sequence[Row] = one.rows
    if "where" in options:
        heading, _, value = options["where"].partition("=")
        rows = [row for row in rows if str(row[heading]) == value]
    if "columns" in options:
        rows = pivoted(rows, options["rows"], options["columns"], options["value"])
    link = f"[command and notes](measurements/{one.machine}.md#{one.name})"
    return f"\n{table(rows)}\n{one.title}, {one.date}: {link}.\n\n"


@dataclass(frozen=True)
class Claim:
    """A ratio of two measured figures that the documents state.

    ratio: Above 1 if SpecSoT is better.
    row: Its row of a table.
    in_readme: Whether README states it, too.
    """

    ratio: float
    row: Row
    in_readme: bool


def claims(measurements: Mapping[str, Measurement], to: str, folder: Path = RESULTS) -> list[Claim]:
    """Return all claims, those with the least ratio first.

    measurements: All measurements by name.
    to: Path from the page to docs/measurements, such as "measurements/".
    folder: Folder of claims.json.

    Raises ValueError if a claim names no row, or several, or a cell that is no number.
    """
    made: list[Claim] = []
    for claim in json.loads((folder / "claims.json").read_text(encoding="utf-8")):
        one = measurements[claim["measurement"]]
        sides = [
            one.find(claim[side])[claim.get(f"{side} value", claim.get("value"))] for side in ("own", "other")
        ]
        own, other = (side if isinstance(side, int | float) else 0 for side in sides)
        if not own or not other:
            raise ValueError(f"{one.name}: a side of the claim {claim['what']!r} is no number")
        ratio = other / own if claim.get("better") == "less" else own / other
        row: Row = {
            "what": claim["what"],
            "unit": claim.get("unit", claim.get("value")),
            "SpecSoT": own,
            "other": other,
            "ratio": f"**{ratio:.2f}**",
            "measured": f"[{one.date.replace('-', '&#8209;')}]({to}{one.machine}.md#{one.name})",
        }
        made.append(Claim(ratio, row, claim.get("readme", False)))
    return sorted(made, key=lambda each: each.ratio)


def asked_claims(what: str, measurements: Mapping[str, Measurement]) -> str:
    """Return the table of claims below 1 (`lost`), of the others (`won`), or of those of README (`readme`).

    what: `lost`, `won` or `readme`.
    measurements: All measurements by name.
    """
    made = claims(measurements, "docs/measurements/" if what == "readme" else "measurements/")
    wanted: Mapping[str, Callable[[Claim], bool]] = {
        "lost": lambda one: one.ratio < 1,
        "won": lambda one: one.ratio >= 1,
        "readme": lambda one: one.in_readme,
    }
    return f"\n{table([one.row for one in made if wanted[what](one)])}\n"


def filled(text: str, measurements: Mapping[str, Measurement]) -> str:
    """Return a page whose marked tables are those of the measurements.

    text: Markdown with comments as above.
    measurements: All measurements by name.
    """

    def body(found: re.Match[str]) -> str:
        ask = asked_table if found["kind"] == "table" else asked_claims
        return f"{found[1]}{ask(found['what'], measurements)}{found[5]}"

    return MARKED.sub(body, text)


def machine_page(name: str, detail: str, measurements: Sequence[Measurement]) -> str:
    """Return the page of one machine, newest measurement first.

    name: What readers call the machine.
    detail: What it is, in sentences.
    measurements: Those that were made on it.
    """
    parts = [f"# Measured on {name}\n\nWritten by `make docs` from `lab/results`. {detail}\n"]
    for one in sorted(measurements, key=lambda one: (one.date, one.name), reverse=True):
        commands = "\n".join(one.command)
        note = f"{one.note}\n\n" if one.note else ""
        heading = (
            f'<a id="{one.name}"></a>\n\n## {one.title}\n\n{one.date}, `lab/results/{one.name}.json`\n\n'
        )
        parts.append(f"{heading}```\n{commands}\n```\n\n{note}{table(one.rows)}")
    return "\n".join(parts)


def drawn_charts(
    measurements: Mapping[str, Measurement], folder: Path = RESULTS
) -> Iterator[tuple[str, str]]:
    """Yield the name and the SVG of each chart.

    measurements: All measurements by name.
    folder: Folder of charts.json.

    A chart names its measurement, the heading of the figures (`value`), of the series (`by`, with a name in
    the legend for each that is drawn: `series`) and of the groups of bars (`groups`), a label for the groups
    in which `{}` is the group, and which rows are taken (`where`, by heading). Without `groups` there is one.
    """
    for asked in json.loads((folder / "charts.json").read_text(encoding="utf-8")):
        one = measurements[asked["measurement"]]
        names: Mapping[str, str] = asked["series"]
        figures: dict[str, dict[str, float]] = {}
        for row in one.rows:
            series, wanted = str(row[asked["by"]]), asked.get("where", {}).items()
            if series in names and all(row[heading] == cell for heading, cell in wanted):
                group = asked["label"].format(row[asked["groups"]] if "groups" in asked else "")
                figures.setdefault(group, {})[names[series]] = float(str(row[asked["value"]]))
        yield asked["name"], draw(Chart(asked["title"], asked["unit"], one.date, figures))


def written() -> dict[Path, str]:
    """Return every file that this script writes, with its text."""
    measurements = read_all()
    machines: dict[str, Any] = json.loads((RESULTS / "machines.json").read_text(encoding="utf-8"))
    files = {
        DOCS / "measurements" / f"{key}.md": machine_page(
            machine["name"], machine["detail"], [one for one in measurements.values() if one.machine == key]
        )
        for key, machine in machines.items()
    }
    for page in (REPOSITORY / "README.md", DOCS / "performance.md"):
        files[page] = filled(page.read_text(encoding="utf-8"), measurements)
    return files | {DOCS / "charts" / f"{name}.svg": svg for name, svg in drawn_charts(measurements)}


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text, encoding="utf-8")
