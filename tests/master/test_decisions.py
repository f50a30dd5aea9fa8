"""What follows from what happened to a request: a table of events and commands, without ring or clients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsot.core.frames import End, Outcome
from specsot.errors import InvalidRequest, PlanError, SpecsotError, TimedOut, Unavailable, WireError
from specsot.events import Finished, Numbered, Reason, SkeletonText
from specsot.params import Ask
from specsot_master.core import inputs, records
from specsot_master.core.commands import (
    CloseSequence,
    Command,
    CutReader,
    DropRequest,
    FailRequest,
    KeepRequest,
    OpenAnswer,
    ReleaseRequest,
    RenewLeases,
    WatchReader,
)
from specsot_master.core.inputs import failure_of, react
from specsot_master.core.plans.plan import RequestPlan
from specsot_master.core.plans.router import Decision
from specsot_master.core.request import EncodedPrompt, Reader, RequestState
from specsot_master.core.sequence import ActiveSequence, Detokenizer, SequenceFactory, TokenLog

ASK = Ask(prompt="Hi", mode="direct")
UNREAD = Numbered(0, SkeletonText("a"))


class Nowhere:
    """Takes nothing in."""

    def handle(self, event: object) -> None:
        raise AssertionError(event)


def request_of(
    ask: Ask = ASK, events: int = 0, reads: bool = False, entered_ring: bool = False
) -> RequestState:
    prompt = EncodedPrompt(Decision("direct", ""), (1, 2, 3))
    request = RequestState(
        "a", "", 0, ask, 5, RequestPlan(ask, "a", 5), prompt, Nowhere(), entered_ring=entered_ring
    )
    if reads:
        request.events.attach(Reader(), 0)
    for _ in range(events):
        request.events.push(UNREAD)
    return request


KEPT = replace(ASK, resumable=True)
READ = request_of(reads=True, events=2)
TABLE: list[tuple[inputs.RequestEvent, list[Command]]] = [
    (inputs.EventsRead(request_of()), [RenewLeases()]),
    (inputs.ReaderLeft(request_of()), [DropRequest()]),
    (inputs.ReaderLeft(request_of(KEPT)), [KeepRequest()]),
    (inputs.KeepingOver(request_of(KEPT)), [DropRequest(), ReleaseRequest()]),
    (inputs.ReadingOverdue(request_of(events=1), 0), []),  # nobody reads
    (inputs.ReadingOverdue(request_of(reads=True), 0), []),  # nothing is unread
    (inputs.ReadingOverdue(READ, 1), [WatchReader()]),  # another event than then comes next
    (inputs.ReadingOverdue(READ, 0), [CutReader(), DropRequest()]),
    (inputs.ReadingOverdue(request_of(KEPT, 1, True), 0), [CutReader(), KeepRequest()]),
    (inputs.PromptMade(request_of(), None), []),
]


@pytest.mark.parametrize(("event", "commands"), TABLE)
def test_what_follows_from_what_happens(event: inputs.RequestEvent, commands: list[Command]) -> None:
    assert list(react(event)) == commands


@pytest.mark.parametrize(("entered_ring", "doing"), [(False, "waited for its turn"), (True, "was answered")])
def test_a_deadline_says_what_it_ended(entered_ring: bool, doing: str) -> None:
    (command,) = react(inputs.DeadlinePassed(request_of(entered_ring=entered_ring)))
    assert isinstance(command, FailRequest)
    assert isinstance(command.error, TimedOut)
    assert str(command.error).endswith(doing)


def test_a_prompt_that_could_not_be_made_fails_its_request() -> None:
    with pytest.raises(InvalidRequest, match="no such template"):
        react(inputs.PromptMade(request_of(), InvalidRequest("no such template")))


MEANT = PlanError("no plan", "raw")


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (MEANT, PlanError, "no plan"),
        (
            WireError("step 3 is missing"),
            Unavailable,
            "the ring reported an impossible result for this request: step 3",
        ),
        (KeyError(3), SpecsotError, "internal error"),
    ],
)
def test_a_client_receives_only_errors_that_are_meant_for_it(
    error: Exception, kind: type[SpecsotError], told: str
) -> None:
    failure = failure_of(error, SpecsotError("internal error"))
    assert type(failure) is kind
    assert str(failure).startswith(told)
    assert (failure is error) == (error is MEANT)


def test_a_failure_of_the_journal_is_reported_as_it_was() -> None:
    (command,) = request_of().play(records.FailedRecord("Unavailable", "the ring broke"))
    assert isinstance(command, FailRequest)
    assert isinstance(command.error, Unavailable)


def test_a_request_is_opened_written_closed_and_finished() -> None:
    request = request_of()
    _, opened = request.play(records.AdmittedRecord(1.0, 0))
    assert isinstance(opened, OpenAnswer)
    assert request.entered_ring
    opening = SequenceFactory((2,)).decoding_opening(3, ASK, 5, ordinal=0, limit=opened.limit)
    request.sequences[0] = ActiveSequence(TokenLog(opening, (1, 2, 3)), Detokenizer(lambda _: "Yes."), repr)
    step = records.StepRecord(2.0, ((0, Outcome(opening.sequence, 0, (), (7, 2), End.STOP)),))
    commands: list[Command] = []
    for command in request.play(step):  # each is carried out before the next is asked for
        commands.append(command)
        if isinstance(command, CloseSequence):
            del request.sequences[command.ordinal]
    assert commands[0] == CloseSequence(0)
    assert commands[-1] == RenewLeases()
    (finished,) = (
        one.event for one in commands if isinstance(one, Numbered) and isinstance(one.event, Finished)
    )
    assert (finished.text, finished.reason) == ("Yes.", Reason.STOP)
    assert list(request.play(records.CancelledRecord(3.0))) == []
