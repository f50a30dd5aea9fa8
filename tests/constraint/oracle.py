"""The skeleton language a second time, as regular expressions over whole texts.

They are tested against this.
"""

from __future__ import annotations

import re
import unicodedata

from specsot.core.skeleton import PlanRules, Point

_LINE = re.compile(r"([1-9]\d*)\.<([1-9]\d{0,3})><([^>]*)>\[(-|\d+(?:,\d+)*)\]([^\n]*)\n", re.ASCII)


def parse(raw: bytes, rules: PlanRules) -> tuple[Point, ...] | str | None:
    """The points of a plan, the text of a direct answer, or None when `raw` is not of the language."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    if text.startswith("[DIRECT]\n") and rules.direct:
        body = text.removeprefix("[DIRECT]\n")
        return body.removesuffix("[END]") if body.find("[END]") == len(body) - 5 >= 0 else None
    if text.startswith("[PLAN]\n") and text.endswith("\n[END]"):
        return _points(text.removeprefix("[PLAN]\n").removesuffix("[END]"), rules)
    return None


def parse_list(raw: bytes, rules: PlanRules) -> tuple[str, ...] | None:
    """The titles of a list behind its "1.", or None when `raw` is no list."""
    try:
        lines = f"1.{raw.decode()}".removesuffix("\n\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        return None
    titles = tuple(_list_title(line, number) for number, line in enumerate(lines, 1))
    return titles if all(titles) and 2 <= len(titles) <= rules.max_points else None


def _list_title(line: str, number: int) -> str | None:
    """A colon may only end it, or stand behind a digit; behind a full stop stands no space, unless that is
    behind a digit or behind nothing. An ideographic full stop may only end it, or begin a word.
    """
    head = f"{number}."
    title = line.removeprefix(head)
    words = re.findall(r"[^\s\x1c-\x1f]+", title)
    fine = (
        line.startswith(head)
        and "[" not in title
        and 1 <= len(words) <= 10
        and len(title.encode()) <= 80
        and not re.search(r"(^|\s):|[^\d]:.|[^\d\s.]\. |\S。.", title)
        and not any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in title)
    )
    return title if fine else None


def _points(lines: str, rules: PlanRules) -> tuple[Point, ...] | None:
    points: list[Point] = []
    while lines:
        match = _LINE.match(lines)
        point = _point(match, len(points) + 1, rules) if match else None
        if match is None or point is None:
            return None
        points.append(point)
        lines = lines[match.end() :]
    return tuple(points) if 1 <= len(points) <= rules.max_points else None


def _point(match: re.Match[str], number: int, rules: PlanRules) -> Point | None:
    tool, title = match[3], match[5]
    needs = [] if match[4] == "-" else match[4].split(",")
    ids = [int(need) for need in needs]
    fine = (
        match[1] == str(number)
        and (tool == "None" or tool in rules.tools)
        and [str(need) for need in ids] == needs
        and ids == sorted(set(ids))
        and all(0 < need < number for need in ids)
        and 1 <= len(title.encode()) <= 80
        and title.strip() != ""
        and "[END]" not in title
        and not any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in title)
    )
    label = None if tool == "None" else tool
    return Point(number, int(match[2]), title.strip(), label, tuple(ids)) if fine else None
