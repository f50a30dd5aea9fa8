"""Counts the words of the private dialect that the project is leaving: a report, not a gate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

# Words with many legitimate uses (text, row, one, rest, step) are left out, so the count is lower than the
# number of passages to rewrite.
DIALECT: Mapping[str, str] = {
    "told, said": "told|tells|said",
    "heard": "heard|hearer|hearers|ear|ears",
    "nobody, whoever": "nobody|somebody|anybody|everybody|whoever|whom|whose",
    "behind, beside": "behind|beside",
    "lap": "lap|laps",
    "resting": "resting|rested|waking",
    "lesson": "lesson|lessons",
    "verdict": "verdict|verdicts|judged|judge|judges",
    "foresee": "foresee|foreseen|foresees|unread|astray|went_on|took_early",
    "purse": "purse|purses|stake|stakes",
    "handed": "handed|parcel|parcels|crossing|crossings",
    "begun": "begun",
    "door": "door|doors|papers",
    "bury": "bury|buried|strand|stranded|doubted",
    "least, most": "least|most",
}
# Compiled patterns of the words, which also match parts of snake_case names.
_PATTERNS = {
    name: re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE)
    for name, words in DIALECT.items()
}


def dialect_in(text: str) -> Counter[str]:
    """Return how often each group of words occurs in a text, parts of names included (`told_rows`).

    text: Source of a file.
    """
    return Counter({name: len(pattern.findall(text)) for name, pattern in _PATTERNS.items()})


def dialect_report(texts: Mapping[str, list[str]]) -> str:
    """Return a line for each room that has such words, most first, then a line for each group of words.

    texts: Sources of the files of each room, by room.

    Each room's line has its number of words and the three most frequent groups. The last line is the sum of
    all. Rooms without such words have 0.
    """
    rooms = {
        room: sum((dialect_in(text) for text in room_texts), Counter[str]())
        for room, room_texts in texts.items()
    }
    total = sum(rooms.values(), Counter[str]())
    lines = [f"{'room':44} {'words':>6}  most of them"]
    for room, counts in sorted(rooms.items(), key=lambda item: (-item[1].total(), item[0])):
        often = ", ".join(f"{name} {count}" for name, count in counts.most_common(3) if count)
        lines.append(f"{room:44} {counts.total():6}  {often}")
    lines += ["", *(f"{name:44} {count:6}" for name, count in total.most_common())]
    return "\n".join([*lines, f"{'ALL':44} {total.total():6}"])
