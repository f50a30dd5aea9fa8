"""Where a branch that repeats itself ends, and what may come again."""

from __future__ import annotations

import pytest

from specsot_master.core.plans.cuts import BRANCH_LOOPS, DIRECT_LOOPS, LoopRule, LoopWatch

LOOP = "It also helps you to keep a healthy weight"


def shown(text: str, size: int, rule: LoopRule = BRANCH_LOOPS) -> tuple[str, bool]:
    watch = LoopWatch(rule)
    out = "".join(watch.feed(text[at : at + size]) for at in range(0, len(text), size))
    return out + watch.flush(), watch.repeats


SLEEP = "定期运动可以帮助人们保持健康的体重，并且改善每天晚上的睡眠质量。"
PRODUCE = "* Buy in the produce:\n"
COOL = "- Automatisierung der Kühlung"
HEAT = "- Automatisierung der Heizung und Klimaanlagen"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (f"Run. {LOOP}. It is good. {LOOP}. And more.", f"Run. {LOOP}. It is good."),
        (f"Run. {LOOP}. It also helps YOU, to keep a healthy weight!", f"Run. {LOOP}."),
        (f"Run. {LOOP}. {LOOP[:36]}", f"Run. {LOOP}."),
        (f"“{LOOP}.” So. “{LOOP}.”\nMore", f"“{LOOP}.” So."),
        (f"Eat, and sleep. {LOOP}. Go, and sleep. {LOOP}.", f"Eat, and sleep. {LOOP}. Go, and sleep."),
        (SLEEP * 2, SLEEP),
        (f"Save:\n{PRODUCE * 9}", f"Save:\n{PRODUCE.strip()}"),
        ("".join(f"{n}. **Buy fruit**\n" for n in range(1, 9)), "1. **Buy fruit**"),
        ("* Fish\n" + "- A pack\n- A bottle with a cap\n" * 3, "* Fish\n- A pack\n- A bottle with a cap"),
        ("Take a jacket, 20g, 20g, 20g, 20g, 20g, 20g, 20g, 20g, 20g, 20g.", "Take a jacket, 20g,"),
        (f"So:\n{COOL}\n{HEAT}\n{HEAT}\n", f"So:\n{COOL}\n{HEAT}"),
        (f"So:\n{COOL}\n{HEAT}\n{HEAT}\n- Auto", f"So:\n{COOL}\n{HEAT}"),
        (f"So:\n{COOL}\n{HEAT}\n{COOL}\n{HEAT}", f"So:\n{COOL}\n{HEAT}"),
        ("睡眠，" * 20, "睡眠，"),
        (f"这是{'高级' * 90}", f"这是{'高级' * 12}"),
        ("It is " + "very " * 90, "It is " + ("very " * 6).strip()),
        ("We go " + "on and on and up " * 9, "We go " + ("on and on and up " * 4).strip()),
    ],
)
def test_a_branch_ends_where_it_repeats_itself(text: str, cut: str, size: int) -> None:
    found, repeats = shown(text, size)
    assert (found.rstrip(), repeats) == (cut, True)


REFRAIN = "And the sea sings its ancient lullaby,\nto the shore.\n"
TIMES = "Warm up.\n1. Ten squats\n2. Rest for thirty seconds before you go on\n"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        f"{LOOP}. It also helps you to keep a healthy heart. It also helps.",
        "Yes. No. Yes. No. Yes.",
        f"def f(x):\n    return {'x' * 30}\ndef g(x):\n    return {'x' * 30}\n",
        f"{LOOP}. {LOOP} and a strong heart.",
        "It is 3.5 km. " * 2,
        f"{REFRAIN}Waves rise.\n\n{REFRAIN}Gulls cry.\n\n{REFRAIN}Night falls.\n\n{REFRAIN}",
        f"{TIMES}3. Five push-ups\n4. Rest for thirty seconds before you go on\n5. Plank\n",
        "| Food | Fibre |\n| --- | --- |\n| Rice | little |\n| Bread | little |\n---\n---\n---\n",
        "```\n" + "add(1)  # one of them, as before\n" * 9 + "```\nDone.",
        "Location, location, location.",
        "It is far, far away, and on and on and on it goes again and again and again, again.",
        f"A third is 0.{'3' * 60} of it.",
        "Day 1:\n* Breakfast\n* Lunch\n* Dinner\n\nDay 2:\n* Breakfast\n* Lunch\n* Dinner\n",
        f"{HEAT}\n{HEAT}\n```\n- Auto",
        f"{HEAT}\n{COOL}\n{HEAT}\n{HEAT}\n- And one more",
        "1. True\n2. False\n3. True\n4. True\n5. False\n6. False\n7. True\n",
        "1. ",
        "",
    ],
)
def test_what_is_no_loop_is_left_alone(text: str, size: int) -> None:
    assert shown(text, size) == (text, False)


TIP = "Use meaningful names: choose names that convey their purpose."
CLOSING = "This will help you feel more confident and prepared."


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("".join(f"{n}. {TIP}\n" for n in range(6, 15)), f"6. {TIP}\n7. {TIP}"),
        (f"Be early. {LOOP}. " + f"Go on. {LOOP}. " * 9, f"Be early. {LOOP}. Go on. {LOOP}. Go on."),
        (
            "".join(f"{n}. Step {n} is new. {CLOSING}\n" for n in range(1, 9)),
            "".join(f"{n}. Step {n} is new. {CLOSING}\n" for n in range(1, 5)) + "5. Step 5 is new.",
        ),
    ],
    ids=["list lines", "sentences", "a sentence in every item"],
)
def test_a_direct_answer_ends_where_it_goes_on_and_on(text: str, cut: str, size: int) -> None:
    found, repeats = shown(text, size, DIRECT_LOOPS)
    assert (found.rstrip(), repeats) == (cut, True)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "".join(f"{n}. Step {n} is new. {CLOSING}\n" for n in range(1, 5)) + "Good luck.",
        "word " * 90,
        f"{LOOP}. {LOOP}. Done.",
        f"{HEAT}\n" * 3,
    ],
    ids=[
        "a sentence that ends four items",
        "a word that was asked for",
        "a sentence said twice",
        "a line said three times",
    ],
)
def test_a_direct_answer_may_say_a_sentence_more_than_once(text: str, size: int) -> None:
    assert shown(text, size, DIRECT_LOOPS) == (text, False)


def held(text: str, rule: LoopRule) -> int:
    """The most characters that are held back at once while the text is written letter by letter."""
    watch = LoopWatch(rule)
    shown = 0
    most = 0
    for fed, letter in enumerate(text, start=1):
        shown += len(watch.feed(letter))
        most = max(most, fed - shown)
    assert not watch.repeats
    return most


def test_short_clauses_that_come_again_in_another_order_are_shown() -> None:
    pairs = "".join(f"- ({a}, {b})\n" for a in range(1, 7) for b in range(1, 7))
    assert held(f"These are the outcomes:\n{pairs}There are 36.", DIRECT_LOOPS) <= 40


COUNTS = [
    "- Number of girls present: 43",
    "- Number of girls absent: 53",
    "- Number of boys present: 53",
    "- Number of boys absent: 4",
]


def test_lines_that_begin_alike_are_shown_while_they_are_written() -> None:
    lines = "\n".join(COUNTS * 2)
    assert held(f"{lines}\nSo 49 boys were there on Friday.", DIRECT_LOOPS) <= 1
    assert held(f"{lines}\nSo 49 boys were there on Friday.", BRANCH_LOOPS) > len(COUNTS[0])


def test_a_repetition_that_a_fence_interrupts_is_cut_off_after_the_fence_only() -> None:
    text = f"{PRODUCE * 2}```\nrun()\n```\n{PRODUCE * 4}"
    found, repeats = shown(text, 1, BRANCH_LOOPS)
    assert repeats
    assert found.startswith(f"{PRODUCE}")
