"""The rules of the ring: what members and master may do, whatever clients see; see `checker`."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tests.faults.history import (
    Closed,
    Complained,
    Composed,
    Doubled,
    Formed,
    History,
    Hurt,
    Incomplete,
    Lapped,
    Limited,
    Looked,
    Missed,
    Opened,
    Rested,
    Strayed,
    Worked,
)

HARMLESS = 1.0  # seconds for which any loop may stand still, and nobody calls it lost
DEATHS = 8  # processes that one request may end
STEPS, SHARE, PATIENT = 16, 4, 2  # see `most_steps`


def check_ring(history: History) -> list[str]:
    """Everything that is wrong, by rule."""
    rules = (_noticed, _young, _rested, _first_token, _innocent, _single, _alarms, _enrolled, _complete)
    return list(itertools.chain.from_iterable(rule(history) for rule in rules))


def harmless(hurt: Hurt) -> bool:
    """Nobody may be called lost for it, and nobody fails: short stalls, a pause of everybody at once, work
    that takes long and gets on.
    """
    return hurt.kind in ("pause", "slow") or (hurt.kind == "stall" and hurt.lasts <= HARMLESS)


def most_steps(tokens: int, budget: int) -> int:
    """Frames within which a prompt is through, counted from its opening. tokens: of all prompts that wait
    beside it, its own included. budget: rows of a frame, of which prompts that wait have at least a fourth;
    half of that where chunks follow each other through several stages.
    """
    return STEPS + PATIENT * math.ceil(tokens / max(budget // SHARE, 1))


@dataclass(slots=True)
class _Waiting:
    """own: tokens of its prompt. tokens: of all prompts that waited while it did, its own included."""

    own: int
    tokens: int
    steps: int = 0


def _first_token(history: History) -> Iterable[str]:
    """Rule 3: a prompt that was opened is through within `most_steps` frames. A prefix of which no request
    needs the rest is not waited for; once a request needs it again, it waits from then on. Whoever forks it
    is waited for in any case.
    """
    epochs = defaultdict[int, dict[int, _Waiting]](dict)
    interrupted = dict[tuple[int, int], _Waiting]()
    for _, entry in history:
        match entry:
            case Opened(epoch, sequence, tokens):
                _begin_waiting(epochs[epoch], sequence, tokens)
            case Closed(epoch, sequence):
                epochs[epoch].pop(sequence, None)
                interrupted.pop((epoch, sequence), None)
            case Limited(epoch, sequence, True) if one := epochs[epoch].pop(sequence, None):
                interrupted[epoch, sequence] = one
            case Limited(epoch, sequence, False) if one := interrupted.pop((epoch, sequence), None):
                _begin_waiting(epochs[epoch], sequence, one.own)
            case Composed(epoch, _, budget, begun):
                waiting = epochs[epoch]
                for sequence in begun:
                    waiting.pop(sequence, None)
                for sequence, one in list(waiting.items()):
                    one.steps += 1
                    if one.steps > most_steps(one.tokens, budget):
                        del waiting[sequence]
                        late = f"{one.steps} frames of {budget} rows"
                        yield f"3 sequence {sequence} has no first token after {late}"
            case _:
                pass


def _begin_waiting(waiting: dict[int, _Waiting], sequence: int, tokens: int) -> None:
    """From now on this prompt waits, with so many tokens, and those that wait already wait for it, too."""
    for one in waiting.values():
        one.tokens += tokens
    waiting[sequence] = _Waiting(tokens, tokens + sum(one.tokens for one in waiting.values()))


def _innocent(history: History) -> Iterable[str]:
    """Rule 6: a request that ends processes is given up."""
    deaths = sum(isinstance(entry, Hurt) and entry.kind == "poison" for _, entry in history)
    if deaths > DEATHS:
        yield f"6 one request ended {deaths} processes"


def _single(history: History) -> Iterable[str]:
    """Rule 7: a request lives in one ring."""
    for _, entry in history:
        if isinstance(entry, Doubled):
            yield f"7 request {entry.request} is in rings {entry.rings}"


def _alarms(history: History) -> Iterable[str]:
    """Rule 8: nobody is called lost, and no epoch ends, without a reason."""
    hurt, gave_up = set[str](), set[str]()  # names
    for _, entry in history:
        match entry:
            case Hurt() if not harmless(entry) and entry.kind != "lie":
                hurt.update(entry.whom.split())
            case Missed("master", by, reason):
                gave_up.add(by)
                if not hurt & {"master", by}:
                    yield f"8 {by} lost the master, which was there: {reason}"
            case Missed(whom, _, reason) if whom not in hurt | gave_up:
                yield f"8 {whom} was called lost, and lived: {reason}"
            case Complained(member, reason) if not hurt:
                yield f"8 an epoch ended for nothing: {member}: {reason}"
            case _:
                pass


def _enrolled(history: History) -> Iterable[str]:
    """Rule 10: who has a stream to the master is in its roll."""
    return (
        f"10 {e.member} has a stream, and is not in the roll" for _, e in history if isinstance(e, Strayed)
    )


def _complete(history: History) -> Iterable[str]:
    """Rule 13: a ring that nobody hurts is complete."""
    return (f"13 the ring still waits for {e.lacking}" for _, e in history if isinstance(e, Incomplete))


def _noticed(history: History) -> Iterable[str]:
    """Rule 9: a peer that does not answer is noticed."""
    return (f"9 nobody noticed {e.whom}" for _, e in history if isinstance(e, Looked) and e.unnoticed)


def _young(history: History) -> Iterable[str]:
    """Rule 11: epochs only grow, for everybody; frames and results are of the newest, each once, in order."""
    formed: dict[str, int] = {}
    frames: dict[int, int] = {}
    worked: dict[tuple[str, int], tuple[int, int]] = {}  # the newest frame, and its newest part
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
            case Worked(member, epoch, number, part):
                if epoch != formed.get(member):
                    yield f"11 {member} worked on epoch {epoch}, formed for {formed.get(member)}"
                newest_number, newest_part = worked.get((member, epoch), (0, 0))
                if (number, part) not in ((newest_number + 1, 0), (newest_number, newest_part + 1)):
                    yield f"11 {member} worked on frame {number}, part {part}, of epoch {epoch} out of order"
                worked[member, epoch] = number, part
            case Lapped(epoch, number):
                if epoch in over:
                    yield f"11 the master took a result of epoch {epoch}, which was over"
                if number and number <= frames.get(epoch, 0):
                    yield f"11 the master took result {number} of epoch {epoch} twice"
                frames[epoch] = max(number, frames.get(epoch, 0))
            case _:
                pass


def _rested(history: History) -> Iterable[str]:
    """Rule 5: at rest nothing is left of anybody."""
    for _, entry in history:
        if isinstance(entry, Rested):
            yield from (f"5 {count} {name} are left" for name, count in entry.left if count)
