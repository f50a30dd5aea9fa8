"""Whether a history keeps the rules that always hold; every line of its verdict begins with a rule's number.

Pure. The numbers are those of the rules of the service:
1 streams are whole, 2 the text is the undisturbed one, 3 nobody waits for ever for a first token, 4 a
drafter's end, or lie, is nobody's, 5 nothing is left behind, 6 of a poisonous or refused request nobody
else fails, 7 a request is in one ring, 8 nobody who lives is called lost, 9 everything ends and is noticed in
time, 10 who has a stream is in the roll, 11 nothing old is taken, 12 who comes and goes loses nothing, 13 a
ring that nobody hurts is complete, 14 points do not spoil each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    Event,
    Finished,
    MergedText,
    Planned,
    Reason,
)
from specsot.params import Ask
from specsot_master.core.plans.sentences import ends_sentence
from tests.faults.history import Asked, Ended, Got, History, Hurt, Resumed, Stopped
from tests.faults.parts import POISONS
from tests.faults.rules import HARMLESS, check_ring, harmless

REFUSALS = ("InvalidRequest", "ContextLengthExceeded", "NotFound", "Overloaded", "Unavailable")
LATE = 1.0  # seconds a call may outlive its deadline
__all__ = ["HARMLESS", "check", "tell"]

_WELL = (Reason.STOP, Reason.LENGTH)
HEADING = "\n\n## "  # between two points of an answer
_NUMBER = re.compile(r"(?:## )?(\d+)\. ")  # of a heading, after HEADING or at the beginning of an answer


@dataclass(slots=True)
class Story:
    """One request as its client saw it."""

    asked: Asked
    at: float
    events: list[Event] = field(default_factory=list)
    place: int = 0
    stopped: bool = False
    ended: Ended | None = None
    ended_at: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def finished(self) -> Finished | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished) else None

    def got(self, offset: int, event: Event) -> None:
        if offset != self.place:
            self.wrong.append(f"event {offset} came in the place of {self.place}")
        elif offset < len(self.events):
            if self.events[offset] != event:
                self.wrong.append(f"event {offset} is another one when read again")
        elif self.finished:
            self.wrong.append(f"event {offset} came behind the last one")
        else:
            self.events.append(event)
        self.place = offset + 1


def check(history: History, answers: Mapping[Ask, str]) -> list[str]:
    """Everything that is wrong. answers: of the undisturbed fleet, by what was asked."""
    stories = tell(history)
    hurts = [(at, entry) for at, entry in history if isinstance(entry, Hurt)]
    poisoned = any(story.asked.ask.seed in POISONS for story in stories.values())
    found: list[str] = []
    for id, story in stories.items():
        for rule in (_whole, _same, _points):
            found += [f"{line} ({id})" for line in rule(story, answers)]
        found += [f"{line} ({id})" for line in (*_ends(story, hurts), *_excused(story, hurts, poisoned))]
    return [*found, *check_ring(history)]


def tell(history: History) -> dict[str, Story]:
    """Every request, as its client saw it."""
    stories: dict[str, Story] = {}
    for at, entry in history:
        match entry:
            case Asked():
                stories[entry.request] = Story(entry, at)
            case Resumed(request, offset):
                stories[request].place = offset
            case Got(request, numbered):
                stories[request].got(numbered.number, numbered.event)
            case Stopped(request):
                stories[request].stopped = True
            case Ended(request):
                stories[request].ended, stories[request].ended_at = entry, at
            case _:
                pass
    return stories


def _whole(story: Story, answers: Mapping[Ask, str]) -> Iterable[str]:
    """Rule 1: every event once, in order, one end; every stretch of text where the one before ended."""
    yield from (f"1 {line}" for line in story.wrong)
    places: dict[int, int] = {}
    for event in story.events:
        if isinstance(event, BranchText | MergedText):
            branch = event.branch if isinstance(event, BranchText) else 0
            place = places.get(branch, 0)
            if event.offset != place:
                yield f"1 text of branch {branch} at {event.offset}, it had {place} characters"
            places[branch] = event.offset + len(event.text)
    if story.ended and not story.ended.error and not story.ended.left and not story.finished:
        yield "1 the stream ended without a last event"


def _same(story: Story, answers: Mapping[Ask, str]) -> Iterable[str]:
    """Rule 2: token for token the answer of a fleet that nothing happens to. An answer that is cut short is
    the beginning of that one; its end also brings what later points have written, the beginning of each.
    """
    end, whole = story.finished, answers.get(replace(story.asked.ask, seed=1), "")
    merged = "".join(event.text for event in story.events if isinstance(event, MergedText))
    begins = begins_each_point if end and end.reason not in _WELL else str.startswith
    if not begins(whole, merged):
        yield "2 the text is not that of the undisturbed fleet"
    if end is None:
        return
    if end.text != merged:
        yield "2 the last event tells another text than was streamed"
    if end.reason in _WELL and end.text != whole:
        yield f"2 the answer has {len(end.text)} characters, the undisturbed one {len(whole)}"


def begins_each_point(whole: str, cut: str) -> bool:
    """Return whether an answer that was cut short has points of the whole one in their order, and of each the
    heading and the beginning of its text. Headings count from 1 in each answer.

        # whole "## 1. A\nab\n\n## 2. B\ncd": "## 1. A\na\n\n## 2. B\nc" -> True, "## 1. B\nd" -> False

    whole: the answer to which nothing happened.
    cut: the answer that was cut short. An answer without headings is one point.
    """
    pieces = cut.split(HEADING)
    numbers = [int(match[1]) for piece in pieces if (match := _NUMBER.match(piece))]
    parts = (_NUMBER.sub("", part) for part in whole.split(HEADING))
    return numbers == [*range(1, len(numbers) + 1)] and all(
        any(part.startswith(_NUMBER.sub("", piece)) for part in parts) for piece in pieces
    )


def _points(story: Story, answers: Mapping[Ask, str]) -> Iterable[str]:
    """Rule 14: bodies in the skeleton's order; who needs others waits for them; each point ends once."""
    bodies: dict[int, str] = {}
    over: list[int] = []
    marks: dict[int, str] = {}  # of points that a limit cut within a sentence
    points = next((event.points for event in story.events if isinstance(event, Planned)), ())
    for event in story.events:
        match event:
            case BranchStarted(id):
                needs = next(point.needs for point in points if point.id == id)
                if not set(needs) <= set(over):
                    yield f"14 point {id} started before those it needs"
            case BranchText(id):
                bodies[id] = bodies.get(id, "") + event.text
                if id in over:
                    yield f"14 point {id} wrote behind its end"
            case BranchFinished(id):
                if id in over:
                    yield f"14 point {id} ended twice"
                over.append(id)
                if event.reason is Reason.LENGTH and not ends_sentence(bodies.get(id, "")):
                    marks[id] = "…"
            case _:
                pass
    end = story.finished
    if end and points and end.reason in _WELL:
        whole = {id: body + marks.get(id, "") for id, body in bodies.items() if body}
        shown = [one for one in points if one.id in whole]
        parts = [f"## {number}. {one.title}\n{whole[one.id]}" for number, one in enumerate(shown, 1)]
        if end.text != "\n\n".join(parts):
            yield "14 the answer is not its points in the plan's order"


def _ends(story: Story, hurts: list[tuple[float, Hurt]]) -> Iterable[str]:
    """Rule 9: every call ends, by its deadline where it has one; later only where the master stood still."""
    if story.ended is None:
        yield "9 it never ended"
        return
    timeout = story.asked.timeout
    took = story.ended_at - story.at
    still = sum(hurt.lasts for _, hurt in hurts if hurt.whom in ("master", "everybody"))
    if timeout is not None and took > timeout + LATE + still:
        yield f"9 it ended after {took:.1f} s, its deadline was {timeout:g} s"


def _excused(story: Story, hurts: list[tuple[float, Hurt]], poisoned: bool) -> Iterable[str]:
    """Who fails, fails for what happened to the ring while it was there, or for what its client did."""
    ended, end, asked = story.ended, story.finished, story.asked
    failed = end is not None and end.reason not in (*_WELL, Reason.CANCELLED)
    if end is not None and end.reason is Reason.CANCELLED and not story.stopped:
        yield "1 it was cancelled, but not by its client"
    if asked.refused:
        if ended and ended.error not in REFUSALS:
            yield f"6 it ought to be refused, and ended with {ended.error}: {ended.message}"
        return
    if ended is None or (ended.error is None and not failed) or asked.ask.seed in POISONS:
        return
    if ended.error == "TimedOut" and asked.timeout is not None:
        return
    if ended.error in ("InvalidRequest", "Cancelled") and asked.twin:  # one of both has it
        return
    kinds = {_cause(hurt) for at, hurt in hurts if at <= story.ended_at} - {None}
    excuses = {"stage"} if asked.ask.resumable and asked.timeout is None else {"stage", "revive"}
    if ended.error in ("Unavailable", "NotFound", "Overloaded") and kinds & excuses:
        return
    rule = {frozenset({"drafter"}): 4, frozenset({"leave"}): 12, frozenset({"poison"}): 6}
    yield f"{rule.get(frozenset(kinds), 6 if poisoned else 1)} it failed with {ended.error}: {ended.message}"


def _cause(hurt: Hurt) -> str | None:
    """What may have come of it: nothing, where it must alarm nobody. revive: the master began anew with a
    journal, so that who is resumable has no excuse.
    """
    if harmless(hurt):
        return None
    if hurt.whom == "drafter":
        return "drafter"
    return hurt.kind if hurt.kind in ("leave", "revive", "poison") else "stage"
