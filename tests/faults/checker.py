"""Whether a history keeps the rules that always hold; every line of its verdict begins with a rule's number.

Pure. Refuses to know how the history came about. The numbers are those of the rules of the service:
1 streams are whole, 2 the text is the undisturbed one, 4 a drafter's end is nobody's, 5 nothing is left
behind, 9 everything ends and is noticed in time, 11 nothing old is taken, 12 who comes and goes loses
nothing, 14 points do not spoil each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
from tests.faults.history import (
    Asked,
    Ended,
    Formed,
    Got,
    History,
    Hurt,
    Lapped,
    Looked,
    Rested,
    Resumed,
    Stopped,
    Worked,
)

LATE = 1.0  # seconds a call may outlive its deadline
_WELL = (Reason.STOP, Reason.LENGTH)


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
    found: list[str] = []
    for id, story in stories.items():
        for rule in (_whole, _same, _points):
            found += [f"{line} ({id})" for line in rule(story, answers)]
        found += [f"{line} ({id})" for line in (*_ends(story), *_excused(story, hurts))]
    return [*found, *_noticed(history), *_young(history), *_rested(history)]


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
                stories[request].got(numbered.offset, numbered.event)
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
    """Rule 2: token for token the answer of a fleet that nothing happens to; cut short, its beginning."""
    end, whole = story.finished, answers[story.asked.ask]
    merged = "".join(event.text for event in story.events if isinstance(event, MergedText))
    if not whole.startswith(merged):
        yield "2 the text is not that of the undisturbed fleet"
    if end is None:
        return
    if end.text != merged:
        yield "2 the last event tells another text than was streamed"
    if end.reason in _WELL and end.text != whole:
        yield f"2 the answer has {len(end.text)} characters, the undisturbed one {len(whole)}"


def _points(story: Story, answers: Mapping[Ask, str]) -> Iterable[str]:
    """Rule 14: bodies in the skeleton's order; who needs others waits for them; each point ends once."""
    bodies: dict[int, str] = {}
    over: list[int] = []
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
            case _:
                pass
    end = story.finished
    if end and points and end.reason in _WELL:
        parts = [f"## {one.id}. {one.title}\n{bodies[one.id]}" for one in points if bodies.get(one.id)]
        if end.text != "\n\n".join(parts):
            yield "14 the answer is not its points in the plan's order"


def _ends(story: Story) -> Iterable[str]:
    """Rule 9: every call ends, by its deadline where it has one."""
    if story.ended is None:
        yield "9 it never ended"
        return
    timeout = story.asked.timeout
    took = story.ended_at - story.at
    if timeout is not None and took > timeout + LATE:
        yield f"9 it ended after {took:.1f} s, its deadline was {timeout:g} s"


def _excused(story: Story, hurts: list[tuple[float, Hurt]]) -> Iterable[str]:
    """Who fails, fails for what happened to the ring while it was there, or for what its client did."""
    ended, end = story.ended, story.finished
    failed = end is not None and end.reason not in (*_WELL, Reason.CANCELLED)
    if end is not None and end.reason is Reason.CANCELLED and not story.stopped:
        yield "1 it was cancelled, but not by its client"
    if ended is None or (ended.error is None and not failed):
        return
    if ended.error == "TimedOut" and story.asked.timeout is not None:
        return
    kinds = {_cause(hurt) for at, hurt in hurts if at <= story.ended_at}
    excuses = {"stage"} if story.asked.ask.resumable and story.asked.timeout is None else {"stage", "revive"}
    if ended.error in ("Unavailable", "NotFound", "Overloaded") and kinds & excuses:
        return
    rule = {frozenset({"drafter"}): 4, frozenset({"leave"}): 12}.get(frozenset(kinds), 1)
    yield f"{rule} it failed with {ended.error}: {ended.message}"


def _cause(hurt: Hurt) -> str:
    """revive: the master began anew with a journal, so that who is resumable has no excuse."""
    if hurt.whom == "drafter":
        return "drafter"
    return hurt.kind if hurt.kind in ("leave", "revive") else "stage"


def _noticed(history: History) -> Iterable[str]:
    """Rule 9: a peer that does not answer is noticed."""
    return (f"9 nobody noticed {e.whom}" for _, e in history if isinstance(e, Looked) and e.unnoticed)


def _young(history: History) -> Iterable[str]:
    """Rule 11: epochs only grow, for everybody; frames and results are of the newest, each once, in order."""
    formed: dict[str, int] = {}
    frames: dict[tuple[str, int], int] = {}
    newest: dict[str, int] = {}  # epoch of each member, whichever of its lives
    over: set[int] = set()  # epochs that a member has left for another
    for _, entry in history:
        match entry:
            case Formed(member, epoch):
                if epoch <= formed.get(member, 0):
                    yield f"11 {member} was formed for epoch {epoch} behind {formed[member]}"
                formed[member], name = epoch, member.partition("#")[0]
                over.add(newest.get(name, 0))
                newest[name] = epoch
            case Worked(member, epoch, number):
                if epoch != formed.get(member):
                    yield f"11 {member} worked on epoch {epoch}, formed for {formed.get(member)}"
                if number != frames.get((member, epoch), 0) + 1:
                    yield f"11 {member} worked on frame {number} of epoch {epoch} out of order"
                frames[member, epoch] = number
            case Lapped(epoch, number):
                if epoch in over:
                    yield f"11 the master took a result of epoch {epoch}, which was over"
                if number and number <= frames.get(("", epoch), 0):
                    yield f"11 the master took result {number} of epoch {epoch} twice"
                frames["", epoch] = max(number, frames.get(("", epoch), 0))
            case _:
                pass


def _rested(history: History) -> Iterable[str]:
    """Rule 5: at rest nothing is left of anybody."""
    for _, entry in history:
        if isinstance(entry, Rested):
            yield from (f"5 {count} {name} are left" for name, count in entry.left if count)
