"""A numbered list read as a plan, whatever pieces it comes in."""

from __future__ import annotations

import pytest

from specsot.core.list_plan import ListReader, title_of
from specsot.core.skeleton import PlanRules

RULES = PlanRules(direct=False, max_points=4, listed=True)


def titles(*pieces: str, rules: PlanRules = RULES) -> list[str]:
    reader = ListReader(rules)
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    assert [point.id for point in reader.points] == list(range(1, len(reader.points) + 1))
    return [point.title for point in reader.points]


def test_the_prompts_number_belongs_to_the_first_line() -> None:
    text = " Better sleep\n2. More energy\n3. Less stress"
    assert titles(text) == titles(*text) == ["Better sleep", "More energy", "Less stress"]


def test_points_come_as_their_lines_are_complete_and_no_more_than_were_asked_for() -> None:
    reader = ListReader(RULES)
    assert [len(reader.feed(piece)) for piece in (" A one", "\n2. Two\n3.", " T\n4. F\n", "5. E\n")] == [
        0,
        2,
        2,
        0,
    ]
    assert reader.finished
    assert reader.finish() == []


def test_a_free_list_may_have_other_marks_and_ends_where_something_else_begins() -> None:
    said = " **One thing**: it is so.\n\n2) Two things\n\n- 3、第三\n\nThese are all.\n4. Never read"
    assert titles(said) == ["One thing", "Two things", "第三"]


@pytest.mark.parametrize(
    ("line", "title"),
    [
        (" **Sleep well**: get eight hours", "Sleep well"),
        (' "Sleep well."', "Sleep well"),
        (" Sleep well. Then eat.", "Sleep well"),
        (" Sleep - eight hours", "Sleep"),
        (" Well-being at 9:30", "Well-being at 9:30"),
        (" Day 1: Arrival", "Day 1: Arrival"),
        (" 保持健康：多运动。", "保持健康"),
        (' Teach commands, like "sit" or "stay"', 'Teach commands, like "sit" or "stay"'),
        (' "Sit" and more', '"Sit" and more'),
        (" **Performance**.", "Performance"),
        (" *Performance*.", "Performance"),
        (" **Performance** and **safety**", "Performance and safety"),
        (" **Sleep schedule** (every day)", "Sleep schedule (every day)"),
        (" Use `ls` and `cd`.", "Use ls and cd"),
        (" **Use `ls` and `cd`**: both", "Use ls and cd"),
        (" **S**pecific **g**oals", "Specific goals"),
        (" **保持**健康的**方法**", "保持健康的方法"),
        (" **Sleep well", "Sleep well"),
        (" Sleep well**: get eight hours", "Sleep well"),
        (" 2**n growth", "2**n growth"),
        (" 2**n and 3**n", "2**n and 3**n"),
        (" **2**n growth**: fast", "2**n growth"),
        (" **Growth of `2**n`**", "Growth of 2**n"),
        (" *args and **kwargs", "*args and **kwargs"),
        (" **`*args` and `**kwargs`**: arguments", "*args and **kwargs"),
        (" A * b * c", "A * b * c"),
        (' Say "sit".', 'Say "sit"'),
        (" : so", ""),
        ("  ", ""),
    ],
)
def test_a_title_ends_where_a_model_goes_on_about_it(line: str, title: str) -> None:
    assert title_of(line) == title
