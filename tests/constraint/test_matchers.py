"""Built beside the steps: matchers before they are worn out, grammars and counts before a mask asks."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from specsot.core.frames import Opening
from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import Spelling, describe, read_vocabulary
from specsot.grammar import TokenAutomaton, grammar_of, prebuild
from specsot.grammar.answers import COMPILER, Choices, Matchers
from specsot.params import Ask, Form
from specsot_master.core.limits import rules_of
from tests.conftest import seeds
from tests.constraint.vocabularies import SINGLE

DEMO = read_vocabulary(Path(__file__).parents[2] / "models" / "demo" / "base", 8192)


class Compiled:
    """A matcher that knows its number and copies of itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def deep_copy(self) -> Compiled:
        return Compiled(self.number)


class Later(Executor):
    """Works when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append((Future(), fn))
        return self.waiting[-1][0]

    def work(self) -> None:
        jobs, self.waiting = self.waiting, []
        for future, fn in jobs:
            if future.set_running_or_notify_cancel():
                future.set_result(fn())


class House:
    """compiled: how often, and `here` of those on the thread that asked."""

    def __init__(self) -> None:
        self.compiled = self.here = 0
        self.later = Later()
        self.matchers = Matchers(self.compile_one, self.later)  # type: ignore[arg-type]
        self.here = 0  # but for the first, which is asked for on that thread

    def compile_one(self) -> Compiled:
        self.compiled, self.here = self.compiled + 1, self.here + 1
        return Compiled(self.compiled)

    def work(self) -> None:
        here = self.here
        self.later.work()
        self.here = here


def test_who_wears_one_out_finds_the_next_one_compiled() -> None:
    house = House()
    for batch in range(3):
        house.work()
        assert house.matchers.copy_matcher()[0] == batch
        assert house.matchers.copy_matcher(failed_batch=batch)[0] == batch + 1
    assert house.here == 0


def test_one_renewal_serves_every_matcher_with_a_worn_out_copy() -> None:
    house = House()
    house.work()
    taken = [house.matchers.copy_matcher(failed_batch=0) for _ in range(8)]
    assert {(batch, matcher.number) for batch, matcher in taken} == {(1, 2)}  # type: ignore[attr-defined]
    assert len({id(matcher) for _, matcher in taken}) == 8
    house.work()
    assert house.compiled == 3


def test_one_that_waits_for_other_forms_is_compiled_by_who_needs_it() -> None:
    house = House()
    assert house.matchers.copy_matcher(failed_batch=0)[0] == 1
    assert house.here == 1
    house.work()
    assert house.compiled == 3, "what was no longer needed was compiled too"


def test_no_grammar_is_built_on_the_thread_that_asks_for_it() -> None:
    """It is the one that computes steps."""
    busy = threading.Event()
    COMPILER.submit(busy.wait)
    try:
        plan = Opening(1, 1, plan=PlanRules(tools=("a tool of its own",)))
        form = Opening(2, 1, form=Form("choice", ("a text of its own", "b")))
        coming = [grammar_of(DEMO, one) for one in (plan, form)]
        assert [one and one.done() for one in coming] == [False, False]
    finally:
        busy.set()
    plans, forms = (one.result() for one in coming if one)
    assert (
        plans.mask(plans.start(), 400).tolist()
        == TokenAutomaton(DEMO, plan.plan).mask(plans.start(), 400).tolist()
    )
    assert forms.mask(forms.start(), 40).any()


def test_what_most_requests_are_held_by_is_built_before_they_come() -> None:
    vocabulary = describe(SINGLE.bytes)
    prebuild(vocabulary).result()
    listed = rules_of(Ask("Why?"), listed=True)
    for rules in (PlanRules(True), PlanRules(False), listed):
        coming = grammar_of(vocabulary, Opening(1, 1, plan=rules))
        assert coming is not None
        assert coming.done()


def test_a_choice_counts_its_spellings_once_when_it_is_compiled() -> None:
    counted: list[bytes] = []

    class Counting(Spelling):
        def counts(self, text: bytes, ceiling: int) -> list[int]:
            counted.append(text)
            return super().counts(text, ceiling)

    texts = ("a lake", "a pond", "b")
    choices = Choices(SINGLE, texts, Counting(SINGLE))
    assert counted == [text.encode() for text in texts]
    for remaining in (1, 3, 6, 9):
        choices.fit(np.ones(len(SINGLE), dtype=np.bool_), b"a", remaining)
    assert len(counted) == len(texts)


@pytest.mark.parametrize("seed", seeds(20, quick=6))
def test_a_choice_allows_the_tokens_after_which_one_of_its_options_can_be_completed(seed: int) -> None:
    dice = random.Random(seed)
    texts = ["".join(dice.choices("ab", k=dice.randrange(1, 9))) for _ in range(dice.randrange(1, 6))]
    written = dice.choice(texts)[: dice.randrange(4)].encode()
    vocabulary = describe([b"a", b"b", b"ab", b"ba", b"aab", None, b"bbbb"])
    spelling, remaining = Spelling(vocabulary), dice.randrange(1, 6)

    def fits(token: bytes | None) -> bool:
        longer = written + (token or b"")
        rests = [text.encode()[len(longer) :] for text in texts if text.encode().startswith(longer)]
        return any(spelling.count(rest, 99) < remaining for rest in rests)

    allowed = np.array([bool(token) for token in vocabulary.bytes], dtype=np.bool_)
    found = Choices(vocabulary, texts).fit(allowed, written, remaining)
    roomy = all(len(text) - len(written) <= remaining for text in texts if text.encode().startswith(written))
    wanted = allowed if roomy else [fits(token) if token else False for token in vocabulary.bytes]
    assert found.tolist() == list(wanted)
