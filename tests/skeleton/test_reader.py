"""What the reader makes of skeletons: exact ones, those of an unconstrained model, in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsot.core.skeleton import MAX_POINTS, PlanReader, PlanRules, Point, read_plan, write_plan
from specsot.errors import InvalidRequest, PlanError
from tests.there import there

PLAN = "[PLAN]\n1.<80><None>[-]NREM Stages of Sleep\n2.<120><Search>[1]睡眠 😴\n[END]"
POINTS = (Point(1, 80, "NREM Stages of Sleep"), Point(2, 120, "睡眠 😴", "Search", (1,)))


def only_point(line: str) -> Point:
    points = there(read_plan(f"[PLAN]\n1.<9><None>[-]First\n{line}\n[END]"))
    assert len(points) == 2, line
    return points[1]


def test_an_exact_plan() -> None:
    assert read_plan(PLAN) == POINTS


def test_a_written_plan_is_read_as_the_same_points() -> None:
    assert write_plan(POINTS) == PLAN
    odd = (
        Point(1, 10**6, "Say [END] twice: [END]"),
        Point(2, 1, "A", needs=(1,)),
        Point(3, 2, "B", None, (1, 2)),
    )
    read = there(read_plan(write_plan(odd)))
    assert read == (Point(1, 9999, "Say END twice: END"), *odd[1:])


def test_points_come_as_soon_as_their_lines_are_whole() -> None:
    reader = PlanReader()
    reported = {len(reader.text): points for character in PLAN if (points := reader.feed(character))}
    assert reported == {PLAN.index("2.<"): [POINTS[0]], PLAN.index("[END]"): [POINTS[1]]}
    assert reader.finished
    assert reader.kind == "plan"


def test_the_kind_is_reported_as_soon_as_the_marker_is_complete() -> None:
    reader = PlanReader()
    kinds = [(reader.feed(character), reader.kind)[1] for character in "[PLAN]"]
    assert kinds == [None] * 5 + ["plan"]


@pytest.mark.parametrize(
    ("line", "point"),
    [
        ("2. <200> <None> [-] Loose  spacing ", Point(2, 200, "Loose  spacing")),
        ("  - 2.<30 tokens><none>[1]Units", Point(2, 30, "Units", None, (1,))),
        ("２．＜８０＞＜Search＞［１］睡眠阶段", Point(2, 80, "睡眠阶段", "Search", (1,))),
        ("2、《80》《无》【-】睡眠，第二", Point(2, 80, "睡眠，第二")),
        ("2) <80> <None> [—] Dash", Point(2, 80, "Dash")),
        ("2.<80><None>No list", Point(2, 80, "No list")),
        ("2.<80>[1]No tool", Point(2, 80, "No tool", None, (1,))),
        ("2.<80>Neither", Point(2, 80, "Neither")),
        ("2.<0><None>[-]Zero", Point(2, 1, "Zero")),
        ("2.<123456><None>[-]Much", Point(2, 9999, "Much")),
        ("2.<80><None>[1;1，1]Twice", Point(2, 80, "Twice", None, (1,))),
        ("2.<80><None>[2,3,1,0]Self and later", Point(2, 80, "Self and later", None, (1,))),
        ("7.<80><None>[1,6]Renumbered", Point(2, 80, "Renumbered", None, (1,))),
        ("2.<80><None>[-][1]Bracketed", Point(2, 80, "[1]Bracketed")),
        ("2.<80><None>[-]Tab\there\r", Point(2, 80, "Tab here")),
        ("2.<80><None>[-]" + "睡" * 40, Point(2, 80, "睡" * 26)),
        ("2.<80><None>[-]End here [END]", Point(2, 80, "End here")),
    ],
)
def test_tolerates(line: str, point: Point) -> None:
    assert only_point(line) == point


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Some words",
        "2. Title",
        "2.<many><None>[-]Title",
        "<80><None>[-]Title",
        "2.<80><None>[-]  ",
        "2.<80>",
    ],
)
def test_lines_that_are_none_are_left_out(line: str) -> None:
    points = read_plan(f"[PLAN]\n1.<9><None>[-]First\n{line}\n3.<9><None>[1]Last\n[END]")
    assert points == (Point(1, 9, "First"), Point(2, 9, "Last", None, (1,)))


@pytest.mark.parametrize(
    "text",
    [
        PLAN.removesuffix("[END]"),
        PLAN.removesuffix("\n[END]"),
        PLAN + "\nand more\n3.<9><None>[-]Late",
        PLAN.replace("[PLAN]", "【plan】").replace("[END]", "【End】"),
        PLAN.replace("[PLAN]", "\n **[ Plan ]**").replace("[END]", " ［END］"),
        "Sure, here it is:\n" + PLAN,
        "x" * 255 + "\n" + PLAN,
        PLAN.replace("\n", "\r\n"),
        PLAN.replace("\n", "\n\n"),
    ],
)
def test_markers_may_be_loose_or_missing(text: str) -> None:
    assert read_plan(text) == POINTS


def test_dependencies_follow_the_ids_as_written() -> None:
    text = "[PLAN]\n3.<9><None>[-]A\n5.<9><None>[3]B\n5.<9><None>[5]C\n9.<9><None>[5,3]D\n[END]"
    points = there(read_plan(text))
    assert [(point.id, point.needs) for point in points] == [(1, ()), (2, (1,)), (3, (2,)), (4, (1, 3))]


def test_rules_bound_tools_and_points() -> None:
    assert read_plan(PLAN, PlanRules(tools=("Search",))) == POINTS
    assert read_plan(PLAN, PlanRules(max_points=1)) == POINTS[:1]
    unoffered = there(read_plan(PLAN, PlanRules()))
    assert unoffered[1].tool is None
    many = "[PLAN]\n" + "".join(f"{i}.<9><None>[-]T\n" for i in range(1, 40))
    assert len(read_plan(many) or ()) == MAX_POINTS


@pytest.mark.parametrize(
    "text", ["[PLAN]\n[END]", "[PLAN]\nNo line at all", "[PLAN]", "[PLAN]\n1.<9><None>[-] \n[END]"]
)
def test_a_plan_without_a_line_is_an_error_with_its_text(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        read_plan(text)
    assert caught.value.text == text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[DIRECT]\nYes.[END]", "Yes."),
        ("[DIRECT]\n\nA [list] [EN\n[END] no more", "\nA [list] [EN\n"),
        ("[DIRECT]\nCut at [EN", "Cut at [EN"),
        ("【Direct】 Yes", " Yes"),
        ("[DIRECT]\n[END]", ""),
        ("Just an answer. [END]", "Just an answer. [END]"),
        ("See [PLAN] there", "See [PLAN] there"),
        ("x" * 256 + "\n" + PLAN, "x" * 256 + "\n" + PLAN),
        ("x" * 255 + "\n[PLANE]\n" + PLAN, "x" * 255 + "\n[PLANE]\n" + PLAN),
        ("", ""),
    ],
)
def test_direct_answers(text: str, answer: str) -> None:
    assert read_plan(text) is None
    for pieces in ([text], list(text)):
        reader, shown = PlanReader(), ""
        for piece in pieces:
            reader.feed(piece)
            assert reader.direct_text.startswith(shown), "what was shown stays"
            shown = reader.direct_text
        reader.finish()
        assert (reader.kind, reader.direct_text, reader.finished) == ("direct", answer, True)


def test_a_direct_answer_holds_back_only_what_may_be_its_end() -> None:
    reader = PlanReader()
    reader.feed("[DIRECT]\nYes [E")
    assert reader.direct_text == "Yes "
    reader.feed("ggs] [END")
    assert reader.direct_text == "Yes [Eggs] "
    reader.feed("]")
    assert (reader.direct_text, reader.finished) == ("Yes [Eggs] ", True)


@given(st.data())
def test_pieces_make_no_difference(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from([PLAN, "Hm.\n【plan】\n1. <9> Loose\n 2、《8》x [END] y", "[DIRECT]\n\nA [E [END]B"])
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader, points = PlanReader(), list[Point]()
    for begin, end in zip([0, *cuts], [*cuts, len(text)]):
        points += reader.feed(text[begin:end])
    points += reader.finish()
    assert tuple(points) == reader.points == (read_plan(text) or ())
    whole = PlanReader()
    whole.feed(text)
    assert (reader.kind, reader.direct_text) == (whole.kind, whole.direct_text)


def test_nothing_is_read_after_the_end() -> None:
    reader = PlanReader()
    reader.feed(PLAN)
    assert reader.feed("\n3.<9><None>[-]Late\n") == []
    assert reader.finish() == []
    assert reader.points == POINTS


@pytest.mark.parametrize("count", [0, -1, 100])
def test_impossible_numbers_of_points_are_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match="max_points"):
        PlanRules(max_points=count)
