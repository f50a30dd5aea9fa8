"""A request machine that is played by hand: a character is a token, its code the id."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from specsot.core.frames import End
from specsot.events import (
    BranchText,
    Candidate,
    Event,
    Finished,
    MergedText,
    Numbered,
    Reason,
    SkeletonText,
    TokenLogprobs,
)
from specsot.params import Ask, Limits, Mode
from specsot_master.core.plans.answer_forms import UsualLengths
from specsot_master.core.plans.plan import CloseSequence, Command, RequestPlan, TextPiece
from specsot_master.core.plans.router import Decision, ScorePrompt

PLAN = "[PLAN]\n1.<60><None>[-]Light\n2.<30><None>[-]Deep\n3.<10><None>[1,2]Dreams\n[END]"


HEADINGS = "\n\n## 1. Light\n\n\n## 2. Deep\n\n\n## 3. Dreams\n"


def figures_of(character: str) -> TokenLogprobs:
    return TokenLogprobs(Candidate(ord(character), character.encode(), -1.0))


class Play:
    """A request machine and everything it said so far."""

    def __init__(
        self,
        mode: Mode = "auto",
        stop: tuple[str, ...] = (),
        constraint: bool = True,
        told: tuple[str, ...] | None = None,
        decision: Decision | None = None,
        score: ScorePrompt | None = None,
        polish: bool = False,
        speculates: bool = False,
        plans: bool = True,
        answer_tokens: int | None = None,
        shows_markers: bool = False,
        prompt: str = "?",
        ends: dict[str, Any] | None = None,
        beginnings: Callable[[str], tuple[int, ...]] = lambda _: (),
        **limits: int,
    ):
        wanted = Limits(**limits)
        ask = Ask(
            prompt=prompt,
            mode=mode,
            stop=stop,
            constraint=constraint,
            limits=wanted,
            polish=polish,
            **(ends or {}),
        )
        self.shows_markers = shows_markers
        self.plan = RequestPlan(
            *(ask, "r", 7, "demo"),
            told=told,
            decision=decision,
            score=score,
            speculates=speculates,
            answer_tokens=UsualLengths(answer_tokens, answer_tokens) if answer_tokens else None,
            shows_markers=shows_markers,
            beginnings=beginnings,
        )
        self.said: list[Command] = self.plan.start(prompt_tokens=5, now=1.0, plans=plans)

    def write(self, ordinal: int, text: str, step: int = 1000) -> None:
        """Text in steps of `step` characters."""
        for start in range(0, len(text), step):
            stretch = text[start : start + step]
            pieces = [TextPiece(ord(one), one, figures_of(one)) for one in stretch]
            self.said += self.plan.on_text(ordinal, pieces, now=2.0)

    def end(self, ordinal: int, end: End = End.STOP) -> None:
        self.said += self.plan.on_end(ordinal, end, now=3.0)

    def open_ready(self) -> list[int]:
        """Open whatever may be opened."""
        opened: list[int] = []
        while ready := self.plan.ready():
            self.said += self.plan.open_branch(ready[0])
            opened.append(ready[0].id)
        return opened

    def planned(self, text: str = PLAN) -> Play:
        self.write(0, text)
        self.end(0, End.GRAMMAR)
        return self

    def tell(self) -> list[Event]:
        return [command.event for command in self.said if isinstance(command, Numbered)]

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [one for one in (*self.tell(), *self.said) if isinstance(one, kinds)]

    @property
    def closed(self) -> list[int]:
        """Ordinals in the order they were closed; a plan's own sequence too, ended by itself or not."""
        return [command.ordinal for command in self.said if isinstance(command, CloseSequence)]

    @property
    def finished(self) -> Finished:
        last = self.tell()[-1]
        assert isinstance(last, Finished)
        return last

    def check_stream(self) -> None:
        """No event lost, doubled, reordered; texts are contiguous and make up the answer."""
        offsets = [command.number for command in self.said if isinstance(command, Numbered)]
        assert offsets == list(range(len(offsets)))
        merged, bodies = "", dict[int, str]()
        told, branches = list[int](), dict[int, list[int]]()
        for event in self.tell():
            if isinstance(event, MergedText):
                assert event.offset == len(merged)
                merged += event.text
                told += [one.chosen.token for one in event.logprobs]
            if isinstance(event, BranchText):
                assert event.offset == len(bodies.get(event.branch, ""))
                bodies[event.branch] = bodies.get(event.branch, "") + event.text
                branches.setdefault(event.branch, []).extend(one.chosen.token for one in event.logprobs)
        assert merged == self.finished.text
        if self.finished.reason is not Reason.CANCELLED:
            assert told == list(self.finished.tokens)
            # The introduction precedes the branches, and is no branch.
            assert (
                told[-sum(map(len, branches.values())) or len(told) :]
                == [t for _, tokens in sorted(branches.items()) for t in tokens]
                or not branches
            )
        raw = "".join(e.text for e in self.tell() if isinstance(e, SkeletonText))
        raw = raw.removeprefix("1.")  # of a list, it stands in the prompt
        raw = "" if self.shows_markers else raw
        assert raw == text_of(
            one.chosen.token for e in self.tell() if isinstance(e, SkeletonText) for one in e.logprobs
        )


def text_of(tokens: Iterable[int]) -> str:
    return "".join(map(chr, tokens))
