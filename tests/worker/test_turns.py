"""Prompts and trees take turns where steps are launched before their frames are composed."""

from __future__ import annotations

from specsot.core.frames import (
    Draft,
    Drafts,
    Fork,
    Frame,
    Open,
    Opening,
    Outcome,
    Result,
    TreeSegment,
    num_tokens_of,
)
from specsot.core.pages import PageTable
from specsot.core.run_ahead import MAX_PASSES, MAX_SECONDS
from specsot.core.tree import chain
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget, PipelineDepth
from specsot_worker.core.sequencer import Sequencer
from tests.there import there

# Seconds. A turn takes four steps, with room for rounding.
STEP = MAX_SECONDS / 3.5


class Clients:
    """A stage 0 with a drafter, whose results and trees this test makes up. Every step takes STEP seconds.

    now: Time in seconds.
    sequencer: The stage 0.
    """

    def __init__(self, launches: bool = True, rows: int = 256, prompts: int = 0) -> None:
        self.now = 0.0
        depth = PipelineDepth(1, ((1, STEP), (256, STEP)))
        self.sequencer = Sequencer(
            1,
            FrameBudget(rows, 1, MAX_PASSES, prompts),
            PageTable(64, 16),
            DraftTimeout(1.0),
            depth,
            runs_ahead=lambda: launches,
        )

    def open(self, sequence: int, family: int | None = None, fork: Fork | None = None) -> None:
        tokens = tuple(range(5))
        prompt = len(tokens) + (fork.length if fork else 0)
        opening = Opening(sequence, prompt, fork, limit=10**4, family=family or sequence)
        self.sequencer.apply_order(Open(opening, tokens, lease=10**6))

    def step(self, launched: int = 0) -> str:
        """Run the next frame, answer it with one token and a tree per sequence, and name its segments."""
        frame = there(self.sequencer.compose(self.now, launched))
        self.now += STEP
        outcomes = list[Outcome]()
        for one in frame.segments:
            tree = isinstance(one, TreeSegment)
            if tree or self.sequencer._sequences[one.sequence].opening.decodes:
                accepted = (0,) if tree else ()
                outcomes.append(Outcome(one.sequence, one.draft_round if tree else 0, accepted, (3,)))
        self.sequencer.apply_result(Result(1, frame.number, tuple(outcomes)), self.now)
        drafts = [Draft(one.sequence, one.draft_round + 1, chain([3, 4])) for one in outcomes]
        self.sequencer.add_drafts(Drafts(1, tuple(drafts)))
        return kinds_of(frame)

    def predictable(self, message_waits: bool) -> bool:
        return self.sequencer.next_is_predictable(message_waits)


def two_clients(launches: bool = True) -> Clients:
    """Return a stage 0 with two requests, 1 and 2, whose prompts wait."""
    clients = Clients(launches)
    for sequence in (1, 2):
        clients.open(sequence)
    return clients


def kinds_of(frame: Frame) -> str:
    """Return a word for every segment: "tree 1" or "prompt 2"."""
    return ", ".join(
        f"{'tree' if isinstance(one, TreeSegment) else 'prompt'} {one.sequence}" for one in frame.segments
    )


def test_prompts_wait_while_those_before_them_are_less_than_a_turn_old() -> None:
    clients = two_clients()
    seen = [clients.step()]
    for sequence in (3, 4, 5):
        clients.open(sequence)
        seen.append(clients.step())
    seen += [clients.step() for _ in range(3)]
    assert seen == [
        "prompt 1, prompt 2",
        "tree 1, tree 2",
        "tree 1, tree 2",
        "tree 1, tree 2",
        # A turn of trees takes MAX_SECONDS, the frame of prompts included.
        "prompt 3, prompt 4, prompt 5",
        "tree 1, tree 2, tree 3, tree 4, tree 5",
        "tree 1, tree 2, tree 3, tree 4, tree 5",
    ]


def test_a_prompt_that_comes_after_a_turn_is_fed_at_once() -> None:
    clients = two_clients()
    for _ in range(6):
        clients.step()
    clients.open(3)
    assert clients.step() == "prompt 3"


def test_prompts_ride_with_a_launched_step_once_per_turn() -> None:
    clients = two_clients()
    for _ in range(6):
        clients.step()
    seen = list[str]()
    for sequence in range(3, 9):
        clients.open(sequence)
        seen.append(clients.step(launched=1))
    assert seen == [
        "tree 1, tree 2, prompt 3",
        *["tree 1, tree 2, tree 3"] * 3,
        "tree 1, tree 2, tree 3, prompt 4, prompt 5, prompt 6, prompt 7",
        "tree 1, tree 2, tree 3, tree 4, tree 5, tree 6, tree 7",
    ]


def test_prompts_that_ride_do_not_share_the_tokens_of_a_frame_with_the_trees() -> None:
    """Trees keep the shapes with which their step was launched, and prompts have a pass of their own."""
    clients = Clients(rows=8)
    for sequence in (1, 2):
        clients.open(sequence)
        clients.step()
    for _ in range(6):
        clients.step()
    clients.open(3)
    frame = there(clients.sequencer.compose(clients.now, launched=1))
    assert num_tokens_of(frame.segments) == 2 + 2 + 5


def test_prompts_that_ride_are_no_more_than_a_frame_of_trees_may_have() -> None:
    """The trees wait for them. Without trees, a frame has as many prompts as the stage takes."""
    clients = Clients(rows=8, prompts=64)
    for sequence in range(1, 5):
        clients.open(sequence)
    assert clients.step() == "prompt 1, prompt 2, prompt 3, prompt 4"
    for _ in range(6):
        clients.step()
    for sequence in range(5, 9):
        clients.open(sequence)
    frame = there(clients.sequencer.compose(clients.now, launched=1))
    assert num_tokens_of(frame.segments[4:]) == 8


def test_prompts_of_the_same_request_ride_at_once() -> None:
    clients = Clients()
    clients.open(1, family=7)
    clients.step()
    clients.open(2, family=7)
    assert clients.step(launched=1) == "tree 1, prompt 2"


def test_the_sequences_of_one_request_share_frames_with_its_prompts() -> None:
    clients = Clients()
    clients.open(1, family=7)
    clients.step()
    clients.open(2, family=7)
    assert clients.step() == "tree 1, prompt 2"


def test_without_launches_ahead_prompts_and_trees_share_frames() -> None:
    clients = two_clients(launches=False)
    clients.step()
    clients.open(3)
    assert clients.step() == "tree 1, tree 2, prompt 3"


def test_a_prompt_does_not_wait_for_trees_that_are_not_ready() -> None:
    clients = two_clients()
    clients.step()
    for state in clients.sequencer._sequences.values():
        state.lease = 0
    clients.open(3)
    assert clients.step() == "prompt 3"


def test_the_trees_of_the_next_frame_are_predictable_although_prompts_come() -> None:
    clients = two_clients()
    clients.step()
    assert clients.predictable(message_waits=True)
    clients.open(3)
    for _ in range(6):
        assert clients.predictable(message_waits=True)
        clients.step(launched=1)


def test_after_prompts_alone_the_next_frame_is_not_predictable() -> None:
    clients = two_clients()
    for _ in range(6):
        clients.step()
    clients.open(3)
    assert clients.step() == "prompt 3"
    assert not clients.predictable(message_waits=False)  # The trees of 1 and 2 follow, too.


def test_with_one_request_the_next_frame_is_predictable_while_nothing_arrives() -> None:
    clients = Clients()
    clients.open(1)
    clients.step()
    assert clients.predictable(message_waits=False)
    assert not clients.predictable(message_waits=True)
