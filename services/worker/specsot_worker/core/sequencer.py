"""The scheduler of stage 0: joins results with drafts and composes the next frame.

Every change of the KV cache leaves this module as part of a frame header, so that all stages apply the same
changes in the same order. Callers pass in the time, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from specsot.core.frames import (
    Close,
    Drafts,
    End,
    Frame,
    Lease,
    Open,
    Opening,
    Order,
    Outcome,
    PromptChunk,
    Result,
    Segment,
    TreeSegment,
    num_tokens_of,
)
from specsot.core.pages import PageTable, max_held_pages
from specsot.core.run_ahead import FEW_SEQUENCES, MAX_PASSES, MAX_SECONDS, feeds_forced_tokens, num_passes
from specsot.core.tree import chain
from specsot.errors import SpecsotError
from specsot_model.core.kv_plan import open_sequence, policy_of
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget, InFlightFrame, PipelineDepth
from specsot_worker.core.sequence_state import SequenceState

# Divisor. While prompts wait, trees leave 1 / PREFILL_SHARE of a frame's tokens to prompts. Untuned.
PREFILL_SHARE = 4


class Sequencer:
    """Scheduler of all sequences of one epoch. Apply orders, results and drafts as they arrive, then call
    `compose`.

    There is no prefill or decode phase: a frame carries the trees of sequences that can decode and prompt
    chunks of other sequences, up to a token budget (`FrameBudget`).

    Fairness between prompts and decoding sequences: while prompts wait, trees leave 1 / PREFILL_SHARE of a
    frame's tokens to prompts, so that a new sequence produces its first token after a bounded number of
    frames. A frame may carry fewer prompt tokens than that if they would take long
    (`PipelineDepth.prompt_rows`), so that decoding sequences do not stall.

    Fairness between trees: if not all trees fit into a frame, a sequence whose tree was truncated is
    scheduled first in the next frame.

        # room for 8 tokens, trees of 5, 2 and 2 nodes in the order of their turns:
        # first: share 8 - 2 = 6 -> all 5 nodes; second: share 3 - 1 = 2 -> both nodes;
        # third: share 1 -> its root alone; it keeps its turn, so it comes first in the next frame
    """

    def __init__(
        self,
        epoch: int,
        budget: FrameBudget,
        table: PageTable,
        draft_timeout: DraftTimeout,
        depth: PipelineDepth | None = None,
        vocabulary: int | None = None,
        runs_ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start an epoch without sequences.

        epoch: Number of the epoch. Messages of any other epoch are dropped.
        budget: How many tokens a frame may have, and how many frames may be in flight.
        table: The table of KV pages, on which this object applies the same operations as every stage does.
        draft_timeout: Decides how long sequences wait for trees.
        depth: Decides how many frames are in flight, how many prompt tokens a frame carries, and into how
            many parts a tree is cut. None: all that `budget` allows, a family of sequences always shares a
            frame, and no tree is cut.
        vocabulary: Number of token ids of the base model. None: token ids are not checked.
        runs_ahead: Returns whether the stage can launch steps before their frames are composed, and so run
            several forward passes per frame (`run_ahead`).
        """
        self._epoch = epoch
        self._runs_ahead = runs_ahead
        # True if it was the turn of prompts when the newest frame was composed. The frame carries trees only
        # if no prompt could be fed.
        self._prompts_alone = False
        # Time in seconds of the newest frame with prompts.
        self._prompts_at = float("-inf")
        # Estimated seconds of the frames of prompts alone since the newest frame with trees.
        self._prompt_seconds = 0.0
        # Families that had drafted sequences of running requests when `_drafted` was called last.
        self._running_families = set[int]()
        # Time in seconds at which the newest plan ended.
        self._plan_ended_at = float("-inf")
        self._budget = budget
        self._table = table
        self._draft_timeout = draft_timeout
        self._depth = depth
        self._vocabulary = vocabulary
        # Sequences that are open or wait to be opened, by id, in order of arrival.
        self._sequences: dict[int, SequenceState] = {}
        # Those of them that are not open yet, or whose prompt is not fed completely, in order of arrival.
        self._unfed: dict[int, SequenceState] = {}
        # Ids that the next frame closes on every stage.
        self._closings = list[int]()
        # Outcomes of sequences that could not be opened, until the master is sent them.
        self._rejected = list[Outcome]()
        # Frames whose results have not arrived, by frame number.
        self._in_flight: dict[int, InFlightFrame] = {}
        # Number of the newest frame, and number of trees that were scheduled without being truncated.
        self._number = self._turns = 0
        # Time in seconds of the newest call of `compose`.
        self._composed = float("-inf")

    @property
    def idle(self) -> bool:
        """True if there is no sequence, no closing to send and no frame in flight."""
        return not (self._sequences or self._closings or self._in_flight)

    @property
    def prompt_tokens_due(self) -> int:
        """Number of prompt tokens that the next frame could carry, of all sequences together. 0 if no prompt
        can be fed.
        """
        return sum(map(self._feedable_tokens, self._unfed.values()))

    def passes_ahead(self) -> int:
        """Return how many forward passes the next frame without prompts may take: as `num_passes` says, or 1
        if drafts are awaited, if one of the sequences cannot run ahead, if no sequence decodes, if the stage
        cannot run ahead or several frames may be in flight, or if at most FEW_SEQUENCES decode while a plan
        is written or its branches begin (`_shapes_plan`). All passes together fit into the token budget of a
        frame, and into the slots that a tree may take of a sequence. No sequence takes more than its
        `max_passes` and its `pass_limit`. If any of the sequences is drafted, the frame takes no more than a
        pause of drafting has steps left.

        The stage may launch these passes before the next result is applied, and `compose` then is given their
        number.
        """
        if self._budget.max_in_flight > 1 or not self._runs_ahead():
            return 1
        states = self._sequences.values()
        max_passes = self._draft_timeout.max_passes
        # Every step with drafts returns here. The search ends at the first drafted sequence, so that the
        # other sequences need not be looked at.
        if max_passes == 1 and any(one.opening.drafted and one.decoding for one in states):
            return 1
        decoding = [one for one in states if one.decoding]
        if not decoding:
            return 1
        # A pause of drafting does not limit sequences that have no drafter.
        if not any(state.opening.drafted for state in decoding):
            max_passes = MAX_PASSES
        if len(decoding) <= FEW_SEQUENCES and self._shapes_plan():
            return 1
        seconds = self._depth.step_seconds(len(decoding)) if self._depth else 0.0
        limits = (
            self._budget.max_tree_nodes,
            self._budget.rows // len(decoding),
            *[min(state.max_passes, state.pass_limit) for state in decoding],
            max_passes,
        )
        return max(min(num_passes(seconds), *limits), 1)

    def _shapes_plan(self) -> bool:
        """Return whether tokens that decide what is opened for a plan are awaited (see `SequenceState`), or
        whether a plan ended less than MAX_SECONDS ago, so that its branches may be opened.

        These tokens delay the whole answer, and frames of one pass bring them soonest: the passes after a
        token that a grammar changes are lost, and what is opened or closed then waits for all passes of the
        frames that have been launched.
        """
        if self._composed - self._plan_ended_at < MAX_SECONDS:
            return True
        return any(state.shapes_plan for state in self._sequences.values())

    def apply_order(self, order: Order) -> None:
        """Apply an order of the master: open a sequence, close one, or extend a lease.

        order: The order. An opening of a sequence that exists is ignored; an opening whose prompt has token
            ids beyond the vocabulary is rejected, see `rejections`. Orders for unknown sequences, and for
            those that have ended, are ignored. An order to close a sequence of the previous epoch, whose KV
            was kept, has the next frame close it.

        The lease of a sequence that decodes only grows: a smaller position than the present one is ignored.
        That of a prefix also shrinks; then no more than that is fed of its prompt.
        """
        match order:
            case Open(opening, tokens, lease):
                if opening.sequence in self._sequences:
                    return
                state = SequenceState(opening, tokens, lease)
                self._sequences[opening.sequence] = self._unfed[opening.sequence] = state
                if not self._valid_ids(tokens):
                    self._reject(opening.sequence)
            case Close(sequence, kept):
                self._closings += [sequence] if kept else []
                self._close(sequence)
            case Lease(sequence, position):
                if state := self._sequences.get(sequence):
                    state.lease = max(state.lease, position) if state.opening.decodes else position

    def apply_result(self, result: Result, now: float, awaits_drafts: bool = True) -> None:
        """Apply a result: its frame is no longer in flight, and its outcomes advance or end their sequences.
        Results of other epochs, and outcomes of unknown sequences, are dropped.

        result: The verification result of one frame, from the last stage.
        now: Time in seconds.
        awaits_drafts: False if the drafter has already answered this result, so that its sequences wait for
            no tree.

        If `PipelineDepth` is given and the frame was in flight, its step time is recorded. A result whose
        frame is not in flight, such as number 0, still has its outcomes applied.
        """
        if result.epoch != self._epoch:
            return
        in_flight = self._in_flight.pop(result.number, None)
        if in_flight and self._depth:
            passes = result.passes
            rows = -(-result.rows // in_flight.parts_sent)
            seconds = [spent / passes for spent in result.seconds]
            elapsed = (now - in_flight.since) / passes
            parts = 1 + result.verified_part, in_flight.parts_sent
            self._depth.record_step(rows, seconds, elapsed, in_flight.alone, *parts)
        for outcome in result.outcomes:
            state = self._sequences.get(outcome.sequence)
            if state is None:
                continue
            if outcome.end:
                self._plan_ended_at = now if state.opening.plan else self._plan_ended_at
                self._close(outcome.sequence)
            else:
                state.apply_outcome(outcome, now, awaits_drafts)
                if state.forced and not feeds_forced_tokens(state.opening) and self._runs_ahead():
                    state.forced = ()

    def add_drafts(self, drafts: Drafts, now: float | None = None) -> None:
        """Store trees for their sequences.

        A tree for the present draft round is stored; a tree for the round after it is kept until its result
        arrives (`SequenceState.offer_tree`). A tree that comes too late, or of another epoch, is dropped and
        counts for nothing.

        drafts: The trees that one drafter proposed, by sequence and draft round, and for how many trees it
            pauses.
        now: Time in seconds, from which the usual wait for a tree is estimated. None: nothing is estimated.

        A tree with invalid token ids, with the wrong root, or for an unverified root counts as a miss of its
        drafter. While the drafter still receives features that a pause held back, it answers all results that
        it was sent at once: if it answers one sequence of a result, the other sequences that wait since that
        result stop waiting. If the drafter pauses (`drafts.paused_trees`), no tree is asked for until the
        pause is over.

        Trees of unknown sequences are skipped. A known sequence belongs to this drafter from now on, even if
        its tree is unusable. A tree that grows from an unverified node (`parent` is set) is unusable here.
        """
        if drafts.epoch != self._epoch:
            return
        self._draft_timeout.record_drafter_message(drafts.drafter)
        # Arrival times of the results for which a tree has come.
        answered = set[float | None]()
        # Checking the smallest and largest ids of all trees in one call takes much less time than checking
        # the ids of each tree. Each tree is checked alone only if that call finds an invalid id.
        trees = [draft.tree.tokens for draft in drafts.drafts]
        all_valid = self._valid_ids([*map(min, trees), *map(max, trees)])
        for draft in drafts.drafts:
            if (state := self._sequences.get(draft.sequence)) is None:
                continue
            since = state.waiting_since
            state.drafter = drafts.drafter
            # A tree that grows from an unverified node needs a second tree frame in flight.
            unverified = draft.parent is not None
            tokens = draft.tree.tokens
            valid_ids = all_valid or self._valid_ids(tokens)
            # Most roots are right. They are compared here to save the call of `has_wrong_root`.
            if unverified or not valid_ids or (tokens[0] != state.root and state.has_wrong_root(draft)):
                self._stop_waiting(state, draft.draft_round)
            elif state.offer_tree(draft.draft_round, draft.tree):
                if now is not None and since is not None:
                    self._draft_timeout.record_tree(now - since, drafts.drafter)
                answered.add(since)
        if answered:
            self._draft_timeout.record_tree(None, drafts.drafter)
        for state in self._sequences.values() if self._draft_timeout.sends_backlog else ():
            state.waiting_since = None if state.waiting_since in answered else state.waiting_since
        if drafts.paused_trees:
            self._draft_timeout.start_pause(drafts.paused_trees, self._drafted())

    def _valid_ids(self, tokens: Sequence[int]) -> bool:
        """Return whether the base model has all these token ids. Return False if one is negative or beyond
        the vocabulary: the embedding would read out of bounds. Return True if there are no ids, or if the
        size of the vocabulary is unknown.

        tokens: Token ids.
        """
        vocab_size = self._vocabulary
        return vocab_size is None or not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size)

    def _stop_waiting(self, state: SequenceState, draft_round: int) -> None:
        """Stop waiting for a tree, because the drafter has sent an unusable one, and record a miss of the
        drafter. Nothing happens if the sequence does not wait, or waits for another draft round.

        state: The sequence.
        draft_round: Number of the draft round for which the unusable tree was sent.

        A lost drafter (None) gets no miss.
        """
        if draft_round == state.draft_round and state.waiting_since is not None:
            state.waiting_since = None
            self._draft_timeout.record_miss(state.drafter)

    def lose_drafter(self, drafter: str) -> None:
        """Handle the loss of a drafter: its sequences, and the sequences that no drafter has drafted for yet,
        stop waiting for trees until one arrives. If no other drafter has sent anything, no sequence waits at
        all.

        drafter: Name of the lost drafter. If it is unknown or lost already, only sequences without a drafter
            stop waiting.

        Sequences of other drafters keep waiting.
        """
        self._draft_timeout.record_drafter_loss(drafter)
        for state in self._sequences.values():
            if state.drafter in (drafter, ""):
                state.drafter = None

    def rejections(self) -> tuple[Outcome, ...]:
        """Return a FAILED outcome for every sequence that could not be opened since the last call, for the
        master. Return () if there is none.

        The outcomes are forgotten, so that each is returned once.
        """
        rejected = tuple(self._rejected)
        self._rejected = []
        return rejected

    def compose(self, now: float, launched: int = 0) -> Frame | None:
        """Return the next frame, which is then in flight. Return None if nothing is ready, or if the maximum
        number of frames is in flight.

        now: Time in seconds.
        launched: Number of forward passes that the stage has launched already for this frame; 0 if it has
            launched nothing. After a launch, the frame is never one of prompts alone, and takes as many
            passes as were launched if it can; without a launch, as many as `passes_ahead` says. If the trees
            turn out otherwise than launched, the stage discards what it has launched.

        Prompts and trees take turns, so that a frame carries only one of both, if the frame may take several
        passes or if `_prompts_take_turns`. There is one exception: if a single pass was launched, prompts
        whose turn it is share the frame with the launched trees, and the stage computes the prompts in a pass
        of their own after the trees.

        With one frame at a time, also return None while a sequence waits for its tree within its family
        deadline: a frame that left without that sequence would delay it by a whole step. `deadline` explains
        both deadlines.

        As long as reused tokens have to be replayed, frames carry nothing else. A frame may carry openings or
        closings without any tokens. Within the call, sequences that cannot be opened are rejected, see
        `rejections`.

        The frame is returned whole. If its `last_part` is not 0, the caller sends it in parts (`cut_frame`).
        """
        self._composed = now
        max_in_flight = self._max_in_flight()
        if len(self._in_flight) >= max_in_flight or (max_in_flight == 1 and self._waiting_families(now)):
            return None
        if self._unfed and (replay := self._compose_replay(now)):
            return replay
        passes = launched or self.passes_ahead()
        if self._unfed:
            growths, openings, chunks = self._compose_turn(now, passes, launched)
        else:
            self._prompts_alone = False
            self._prompt_seconds = 0.0
            growths, openings, chunks = self._compose_trees(now, self._budget.rows), [], []
        num_tokens = num_tokens_of(growths) + num_tokens_of(chunks) if chunks else num_tokens_of(growths)
        closings = self._pop_closings() if self._closings else ()
        extra_passes = 0
        if passes > 1 and growths and not (openings or chunks) and self._can_run_ahead(growths, passes):
            extra_passes = passes - 1
            growths = [self._with_passes(segment, passes) for segment in growths]
            # Such a frame has no prompts, and each sequence feeds one token per pass.
            num_tokens *= passes
        frame = Frame(
            self._epoch,
            self._number + 1,
            tuple(openings),
            (*growths, *chunks),
            closings,
            paused=self._draft_timeout.paused,
            catching_up=self._draft_timeout.catching_up,
            extra_passes=extra_passes,
            last_part=self._num_parts(openings, growths, chunks, closings) - 1,
        )
        if not (frame.openings or frame.segments or closings):
            return None
        self._record_launch(frame, now, num_tokens)
        return frame

    def _compose_turn(
        self, now: float, passes: int, launched: int
    ) -> tuple[list[TreeSegment], list[Opening], list[PromptChunk]]:
        """Return the tree segments, openings and prompt chunks of the next frame. Call it only while some
        sequence is not open yet or has prompt tokens to feed. `compose` says how prompts and trees take
        turns.

        now: Time in seconds.
        passes: Number of forward passes that the frame takes if it can.
        launched: Number of forward passes that the stage has launched already for this frame. 0: none.

        All three lists are empty if nothing is ready. The call also records whether it is the turn of
        prompts, how long the frames of prompts alone since the newest frame with trees take, and the time of
        the newest frame with prompts.
        """
        prompts_wait = self.prompt_tokens_due > 0
        take_turns = prompts_wait and (passes > 1 or self._prompts_take_turns())
        trees_alone = self._prompts_alone if passes > 1 else self._prompts_had_turn(now)
        self._prompts_alone = (
            take_turns and not launched and (not trees_alone or (self._prompts_alone and self._prompts_fit()))
        )
        prompts_ride = launched == 1 and not (take_turns and self._prompts_had_turn(now))
        openings = list[Opening]()
        chunks = list[PromptChunk]()
        growths = list[TreeSegment]()
        if self._prompts_alone:
            openings, chunks = self._compose_prompts(0, own_pass=True)
        self._count_prompt_seconds(chunks)
        if not (openings or chunks):
            # Trees leave tokens to prompts only if both are computed in the same pass.
            same_pass = not (take_turns or launched)
            num_reserved = self._tokens_reserved_for_prompts() if same_pass else 0
            growths = self._compose_trees(now, self._budget.rows - num_reserved)
        if prompts_ride or not (take_turns and (growths or chunks or openings)):
            openings, chunks = self._compose_prompts(num_tokens_of(growths), own_pass=prompts_ride)
        if chunks:
            self._prompts_at = now
        return growths, openings, chunks

    def next_is_predictable(self, message_waits: bool) -> bool:
        """Return whether the next frame carries the trees of just those sequences that the newest frame
        decodes, unless they end.

        message_waits: True if a message has arrived that was not handled yet. It may open a sequence.

        Return False after a frame of prompts alone, because the trees of the other sequences follow it.
        Otherwise return True if no message waits and no prompt can be fed. While prompts and trees of one
        pass take turns, return True also if a message waits or a prompt can be fed: prompts that share the
        next frame with launched trees (see `compose`) leave these trees as they are.

        With many clients, a prompt arrives in nearly every step. If its frame could not be launched ahead, it
        would take two to three times as long as a frame of trees, and so would the next one:

            frames   | trees | trees + prompts | trees | trees | trees + prompts | trees | trees |
        """
        if self._prompts_alone:
            return False
        if not (message_waits or self.prompt_tokens_due):
            return True
        return self._prompts_take_turns() and self.passes_ahead() == 1

    def _prompts_had_turn(self, now: float) -> bool:
        """Return whether the newest frame with prompts is less than MAX_SECONDS old.

        now: Time in seconds.
        """
        return now - self._prompts_at < MAX_SECONDS

    def _prompts_take_turns(self) -> bool:
        """Return whether prompts and trees of one pass take turns: only if the stage can launch steps before
        their frames are composed, and sequences of at least two families decode. With one family, a request
        would only wait for itself. Return False if several frames may be in flight.
        """
        if self._budget.max_in_flight > 1 or not self._runs_ahead():
            return False
        families = (state.family for state in self._sequences.values() if state.root is not None)
        first = next(families, None)
        return any(family != first for family in families)

    def _num_parts(
        self,
        openings: Sequence[Opening],
        trees: Sequence[TreeSegment],
        chunks: Sequence[PromptChunk],
        closings: Sequence[int],
    ) -> int:
        """Return in how many parts a frame travels. The result is 1 unless the frame carries one tree and
        nothing else, no other frame is in flight, and the sequence has no KV policy, because several frames
        keep the stages busy without cutting, and stages refuse parts under a KV policy.

        openings: Openings of the frame.
        trees: Its tree segments.
        chunks: Its prompt chunks.
        closings: Ids of the sequences that it closes.
        """
        if not self._depth or self._in_flight or len(trees) != 1 or openings or chunks or closings:
            return 1
        if self._sequences[trees[0].sequence].policy:
            return 1
        return self._depth.tree_parts(len(trees[0].tree.tokens))

    def _prompts_fit(self) -> bool:
        """Return whether all prompt tokens that are due fit into another frame of prompts alone: together
        with those frames since the newest frame with trees, it takes at most MAX_SECONDS. So a prefix and the
        prompt that forks it, which cannot share a frame, do not wait for a frame of trees between them.
        Return False without a `PipelineDepth`.
        """
        if self._depth is None:
            return False
        return self._prompt_seconds + self._depth.step_seconds(self.prompt_tokens_due) <= MAX_SECONDS

    def _count_prompt_seconds(self, chunks: Sequence[PromptChunk]) -> None:
        """Add the estimated seconds of a frame of prompts alone to those since the last frame with trees.

        chunks: Prompt chunks of the frame. Empty for a frame with trees, after which the sum starts from 0.

        Without a `PipelineDepth` nothing is added.
        """
        if not chunks:
            self._prompt_seconds = 0.0
        elif self._depth:
            self._prompt_seconds += self._depth.step_seconds(num_tokens_of(chunks))

    def _can_run_ahead(self, segments: Sequence[TreeSegment], passes: int) -> bool:
        """Return whether a frame with these segments may take several forward passes.

        segments: The frame's segments.
        passes: Number of passes.

        Every tree must be a root alone, and every sequence must be able to run ahead within the free pages.
        """
        for one in segments:
            if passes > self._sequences[one.sequence].pass_limit or len(one.tree.tokens) > 1:
                return False
        table = self._table
        missing = table.missing_pages((one.sequence, one.committed + passes) for one in segments)
        return sum([pages for _, pages in missing]) <= table.free

    def _with_passes(self, segment: TreeSegment, passes: int) -> TreeSegment:
        """Return a segment whose root alone is fed as one of a frame of several passes: its tree becomes a
        chain, whose tokens after the root are not known yet. Its pages are reserved.

        segment: The segment.
        passes: Number of passes, which is the number of nodes of the chain.
        """
        self._table.reserve(segment.sequence, segment.committed + passes)
        # The tokens that are not known yet are 0, see `Frame.extra_passes`.
        return segment.with_tree(chain((segment.tree.tokens[0], *(0,) * (passes - 1))))

    def _compose_replay(self, now: float) -> Frame | None:
        """Return the next frame with `replay`, which is then in flight; None if no open sequence, or none
        that can be opened now, has reused tokens that lost layers must compute again.

        now: Time in seconds.

        Sequences come in order of arrival, and share the tokens of a frame of prompts.
        """
        waiting = [state for state in self._unfed.values() if state.num_unreplayed]
        max_tokens = self._budget.alone
        openings = list[Opening]()
        chunks = list[PromptChunk]()
        fed = self._fed_tokens() if waiting else {}
        for state in waiting:
            if max_tokens and (state.opened or self._open(state, fed, openings)):
                due = state.num_unreplayed
                rows = self._depth.chunk_rows(due, self._budget.alone) if self._depth else due
                chunks.append(state.next_replay(min(rows, max_tokens)))
                max_tokens -= len(chunks[-1].tokens)
        if not chunks:
            return None
        self._number += 1
        # Its segments are no trees, and its time says nothing about steps.
        self._record_in_flight((), now)
        timeout = self._draft_timeout
        return Frame(
            self._epoch,
            self._number,
            tuple(openings),
            tuple(chunks),
            paused=timeout.paused,
            catching_up=timeout.catching_up,
            replay=True,
        )

    def deadline(self) -> float | None:
        """Return the earliest deadline among waiting sequences, in seconds.

        A sequence that waits for its tree has two deadlines. Until the family deadline, a few times the usual
        wait, the other sequences wait with it. Until the draft timeout, which is never sooner, the sequence
        itself waits while frames leave without it; then it is fed with its root only.

        Return None if no sequence waits for a draft, or if no frame may be launched before the next result
        arrives. Deadlines that had passed when `compose` was called last are left out, because that call
        already took them into account.

        Both the draft timeout of a sequence and that of its family count. Sequences that cannot decode now,
        for lack of a lease for example, are left out.
        """
        if len(self._in_flight) >= self._max_in_flight():
            return None
        waiting = [
            (state.waiting_since, state.drafter)
            for state in self._sequences.values()
            if state.waiting_since is not None and state.can_decode
        ]
        deadlines = self._draft_timeout.family_deadline, self._draft_timeout.deadline
        times = (
            deadline_of(since, drafter_name) for since, drafter_name in waiting for deadline_of in deadlines
        )
        return min((one for one in times if one > self._composed), default=None)

    def _max_in_flight(self) -> int:
        """Return how many frames may be in flight now: the budget's number, or fewer, but at least 1, if a
        `PipelineDepth` was given and says so.
        """
        limit = self._budget.max_in_flight
        return self._depth.max_frames(limit - 1, limit) if self._depth and limit > 1 else limit

    def _pop_closings(self) -> tuple[int, ...]:
        """Remove and return the ids of the sequences that the next frame closes. Return () if there are none,
        or if all of them are kept back.

        Closed sequences of the previous epoch are kept back while a queued sequence is still to reuse their
        KV.

        The ids that are kept back stay queued.
        """
        reused_kv = (one.opening.reused for one in self._sequences.values() if not one.opened)
        reused_sequences = {kept.sequence for kept in reused_kv if kept}
        closings = self._closings
        self._closings = [one for one in closings if one in reused_sequences]
        return tuple(one for one in closings if one not in reused_sequences)

    def _record_launch(self, frame: Frame, now: float, num_tokens: int) -> None:
        """Apply the frame's closings to the page table and record the frame as in flight.

        frame: The composed frame.
        now: Time in seconds.
        num_tokens: Number of tokens of the frame.

        The frame's number becomes the newest one, and each of its sequences is marked as sent. Counts of
        drafted trees and of tokens are recorded for the draft timeout.
        """
        for sequence in frame.closings:
            self._table.close(sequence)
        self._number = frame.number
        segments = frame.segments
        self._record_in_flight(segments, now, 1 + frame.last_part)
        informed = not (frame.paused or frame.catching_up)
        for one in segments:
            self._sequences[one.sequence].drafter_informed = informed
        # Only a pause counts draft rounds and drafted sequences.
        trees = [one for one in segments if isinstance(one, TreeSegment)] if frame.paused else []
        num_drafted = self._drafted() if frame.paused else 0
        # Every pass stands for a draft round without drafts.
        passes = 1 + frame.extra_passes
        num_rounds = passes * sum([self._sequences[one.sequence].opening.drafted for one in trees])
        self._draft_timeout.record_launch(num_rounds, num_tokens, num_drafted)

    def _drafted(self) -> int:
        """Return the number of sequences of running requests that are to be drafted for; 0 ends a pause of
        drafting. Whether a drafter is present does not matter.

        A request runs once a drafted sequence of its family has finished its prompt, and until a call finds
        none of its sequences. So the branches of a plan count before their prompts are fed, if they are
        opened before a frame without any sequence of their request: a pause goes on between a plan and its
        branches. It ends if all sequences belong to new requests. Each call updates `_running_families`.

            # plan of family 1 decodes -> 1; it has ended, its 3 branches wait for their prompts -> 3;
            # all of them have ended, a sequence of family 2 waits for its prompt -> 0
        """
        drafted = [one for one in self._sequences.values() if one.opening.drafted and one.opening.decodes]
        self._running_families = {
            one.family for one in drafted if one.root is not None or one.family in self._running_families
        }
        return sum([one.family in self._running_families for one in drafted])

    def _record_in_flight(self, segments: tuple[Segment, ...], now: float, parts_sent: int = 1) -> None:
        """Record the newest frame as in flight. If several frames may be in flight, also record which
        families the frame carries, and, for `PipelineDepth`, how long its sequences stayed at stage 0 before
        it was launched.

        segments: The segments of the frame.
        now: Time in seconds at which the frame is launched.
        parts_sent: Number of parts in which it travels.

        Frames that were in flight before no longer count as alone; the new frame counts as alone if none was
        in flight. Without tree segments whose sequences have had a result, no stay is recorded.
        """
        families = frozenset[int]()
        if self._budget.max_in_flight > 1:
            tree_states = [self._sequences[one.sequence] for one in segments if isinstance(one, TreeSegment)]
            for earlier in self._in_flight.values():
                earlier.alone = False
            families = frozenset([state.place[0] for state in tree_states])
            returned = [state.returned_at for state in tree_states if state.returned_at is not None]
            if self._depth and returned:
                self._depth.record_gap(now - max(returned))
        self._in_flight[self._number] = InFlightFrame(now, families, not self._in_flight, parts_sent)

    def _waiting_families(self, now: float) -> set[int]:
        """Return the ids of the families in which a sequence waits for its tree and its family is still to
        wait for it. Return an empty set if no family waits.

        now: Time in seconds.

        A family consists of the sequences of one request, or of the forks of one prefix.
        """
        return {
            state.family
            for state in self._sequences.values()
            if state.waiting_since is not None
            and state.can_decode
            and now < self._draft_timeout.family_deadline(state.waiting_since, state.drafter)
        }

    def _ready_sequences(self, now: float) -> list[SequenceState]:
        """Return the sequences whose trees the next frame carries, sorted by `place`. Return [] if none can
        decode now.

        now: Time in seconds.

        With one frame at a time: every sequence that can decode and does not wait for its tree. With several
        frames in flight: a share of each family, or all its runnable sequences if the family no longer waits
        for a tree.

        One step costs nearly the same for one sequence as for a whole family, so a family usually shares one
        frame. Where that is not so, `PipelineDepth` spreads a family over several frames, which then follow
        each other through the stages.

            # 8 sequences over 2 frames -> share 4: a frame leaves as soon as 4 of them can decode

        With several frames in flight, a family gives nothing while as many of its frames are in flight as it
        may be spread over, or while fewer sequences than its share can decode and the family still waits for
        a tree.
        """
        # Nothing is in flight and no family waits: `compose` has checked both.
        if self._budget.max_in_flight == 1:
            runnable = [
                one
                for one in self._sequences.values()
                if one.can_decode and (one.waiting_since is None or not self._waits_for_tree(one, now))
            ]
            return sorted(runnable, key=attrgetter("place"))
        waiting_families = self._waiting_families(now)
        ready = list[SequenceState]()
        families = self._families()
        for family, members in families.items():
            num_in_flight = sum(family in flown.families for flown in self._in_flight.values())
            parts = self._num_frames_of(members, len(families) - 1)
            share = -(-len(members) // parts)
            runnable = [
                state for state in members if state.can_decode and not self._waits_for_tree(state, now)
            ]
            if num_in_flight < parts and (len(runnable) >= share or family not in waiting_families):
                ready += runnable[:share]
        return sorted(ready, key=attrgetter("place"))

    def _families(self) -> dict[int, list[SequenceState]]:
        """Return the sequences that have finished their prompts, by family id. In each family, the sequence
        whose last result arrived first comes first. Return {} if no prompt is finished.

        A sequence without a result counts as having arrived first.
        """
        families: dict[int, list[SequenceState]] = {}
        decoding = (state for state in self._sequences.values() if state.root is not None)
        for state in sorted(decoding, key=lambda state: state.returned_at or 0.0):
            families.setdefault(state.family, []).append(state)
        return families

    def _waits_for_tree(self, state: SequenceState, now: float) -> bool:
        """Return whether a sequence still waits for its drafter's tree. Return False once its draft timeout
        has passed, and if it waits for nothing.

        state: The sequence.
        now: Time in seconds.
        """
        since = state.waiting_since
        return since is not None and now < self._draft_timeout.deadline(since, state.drafter)

    def _num_frames_of(self, members: list[SequenceState], num_other_families: int) -> int:
        """Return over how many frames a family is spread, at least 1. Return 1 for a single sequence, and
        without a `PipelineDepth`.

        members: The decoding sequences of the family.
        num_other_families: Number of other families. Their frames take precedence over splitting this family
            further.

        A family's number of tokens is estimated from the trees that its sequences have now; a sequence
        without a tree counts as average, and without any tree each counts one token.
        """
        if self._depth is None or len(members) < 2:
            return 1
        sizes = [len(state.tree) for state in members if state.tree]
        rows = round(len(members) * sum(sizes) / len(sizes)) if sizes else len(members)
        return self._depth.frames_per_family(
            rows, len(members), max(self._budget.max_in_flight - 1 - num_other_families, 1)
        )

    def _compose_trees(self, now: float, max_tokens: int) -> list[TreeSegment]:
        """Return the tree segments of the next frame, in the order of `place`. Return [] if no sequence is
        ready or none can have a token.

        now: Time in seconds.
        max_tokens: Maximum number of nodes of all trees together.

        Sequences get their tokens in the order of their turns. Each may take what the sequences after it
        leave, of which every one keeps one token for its root. If pages are short, a tree is also cut to the
        pages that its sequence can have. A sequence whose tree was not truncated moves to the end of the
        order; see the example in the class docstring.

        A sequence that cannot have a token, for lack of tokens or pages, is left out and keeps its turn. A
        sequence that is scheduled without the tree for which it waited counts as a miss of its drafter.
        Pages for the scheduled nodes are reserved, and pages that the KV policy drops are freed.
        """
        ready = self._ready_sequences(now)
        segments = dict[int, TreeSegment]()
        table = self._table
        queue = sorted(ready, key=attrgetter("turn"))
        slots = max(self._budget.max_tree_nodes, 1)
        # True if the free pages hold the largest trees of all sequences. Then no tree has to be cut to the
        # pages that its sequence can have. A tree may begin on any row of a page.
        plenty = table.free >= len(queue) * table.pages_for(table.page_rows - 1 + slots)
        num_later = len(queue)
        has_policies = table.has_policies
        for state in queue:
            num_later -= 1
            sequence = state.opening.sequence
            # Every later sequence keeps one token for its root. With fewer tokens than sequences, the first
            # sequences get one token each.
            share = max_tokens - num_later if max_tokens > num_later else min(max_tokens, 1)
            max_nodes = slots if plenty else min(table.reservable_rows(sequence, state.committed), slots)
            rows = max_nodes if max_nodes < share else share
            if rows < 1:
                continue
            # The sequence's draft timeout has passed.
            if state.waiting_since is not None and state.tree is None:
                self._draft_timeout.record_miss(state.drafter)
            if has_policies:
                self._free_after(sequence, state.committed)
            # The tree was not truncated for lack of room in the frame, so the sequence moves to the end of
            # the order.
            if max_nodes <= share or state.next_tree_size <= share:
                self._turns += 1
                state.turn = self._turns
            segments[sequence] = segment = state.next_tree_segment(rows)
            num_nodes = len(segment.tree.tokens)
            if not plenty:
                table.reserve(sequence, state.committed + num_nodes)
            max_tokens -= num_nodes
        if plenty:
            # Most sequences have enough pages already, so `reserve` is called only for the others.
            ends = {one.sequence: one.committed + len(one.tree.tokens) for one in segments.values()}
            for sequence, _ in table.missing_pages(ends.items()):
                table.reserve(sequence, ends[sequence])
        placed = [segments.get(state.opening.sequence) for state in ready]
        return [segment for segment in placed if segment]

    def _tokens_reserved_for_prompts(self) -> int:
        """Return how many tokens of the next frame the trees leave to prompts. 0 if no prompt can be fed.

        With a budget of one token per frame, prompts may have that token in every second frame.
        """
        rows = self._budget.rows
        share = max(rows // PREFILL_SHARE, 1) if rows > 1 else self._number % 2
        return min(self.prompt_tokens_due, share)

    def _feedable_tokens(self, state: SequenceState) -> int:
        """Return how many tokens of a sequence's prompt the next frame could carry, given its fork source and
        the free pages. Return 0 if the prompt is fed, if the lease of a prefix ends here, if the source is
        not fed far enough, or if pages are short.

        state: The sequence.

        A sequence that is not open yet counts only if its pages fit.
        """
        num_unfed = state.num_unfed
        if not num_unfed:
            return 0
        if state.opened:
            return min(num_unfed, max(self._table.reservable_rows(state.opening.sequence, state.fed), 0))
        fork = state.opening.fork
        source = self._sequences.get(fork.sequence) if fork else None
        source_ready = fork is None or (source is not None and source.opened and source.fed >= fork.length)
        return num_unfed if source_ready and self._fits(state.opening) else 0

    def _compose_prompts(
        self, num_tree_tokens: int, own_pass: bool
    ) -> tuple[list[Opening], list[PromptChunk]]:
        """Open the sequences that can be opened, and feed prompts in order of arrival. Return the frame's
        openings and prompt chunks, two lists, either of which may be empty. A sequence may be opened and fed
        in the same frame.

        num_tree_tokens: Number of tree nodes that the frame carries already.
        own_pass: True if the stage computes the prompts in a forward pass of their own, so that the trees
            leave them more tokens.

        A prompt gets no chunk if no token or page is left for it. The sequence of a plan, and a prefix, wait
        for the next frame if this one completes the prompt of another sequence of their family: the first
        token of that sequence, such as the direct answer, must wait neither for the prompt of the plan nor
        for its grammar.

        A prefix whose lease ends where its prompt has been fed is left out, and not even opened. Pages for
        the chunks are reserved. Sequences that can never be opened are rejected.
        """
        openings = list[Opening]()
        chunks = list[PromptChunk]()
        unfed = [
            state
            for state in self._unfed.values()
            if not state.num_unreplayed and (state.num_unfed or (state.opening.decodes and not state.opened))
        ]
        max_tokens = self._max_prompt_tokens(num_tree_tokens, unfed, own_pass) if unfed else 0
        fed = self._fed_tokens() if unfed else {}
        # Families of sequences whose first tokens follow this frame.
        answered = set[int]()
        for state in unfed:
            if state.family in answered and (state.opening.plan or not state.opening.decodes):
                continue
            was_open = state.opened
            if not was_open and not self._open(state, fed, openings):
                continue
            sequence = state.opening.sequence
            rows = min(
                max_tokens,
                self._max_chunk_tokens(state),
                self._table.reservable_rows(sequence, state.fed),
                state.num_unfed,
            )
            if rows > 0:
                if was_open:
                    self._free_after(sequence, state.fed)
                chunks.append(state.next_chunk(rows))
                self._table.reserve(sequence, state.fed)
                max_tokens -= len(chunks[-1].tokens)
            if state.prefilled:
                del self._unfed[sequence]
                if state.opening.decodes:
                    answered.add(state.family)
        return openings, chunks

    def _fed_tokens(self) -> dict[int, int]:
        """Return by sequence id how many tokens earlier frames have fed. A fork's source must be fed as far
        as the fork reaches before the frame that opens the fork, because stages apply openings before new
        tokens.

        A sequence with reused KV is left out until it was fed a token of its own, because its pages are
        complete only then.
        """
        return {
            id: one.fed
            for id, one in self._sequences.items()
            if not one.opening.reused or one.fed > one.opening.num_computed_tokens
        }

    def _max_prompt_tokens(self, num_tree_tokens: int, unfed: Sequence[SequenceState], own_pass: bool) -> int:
        """Return how many prompt tokens the frame may carry.

        num_tree_tokens: Number of tree nodes in the frame.
        unfed: Sequences that are not open, or whose prompts are not fed completely.
        own_pass: True if the stage computes the prompts in a forward pass of their own.

        For a pass of their own, the result is at least 1, and at most the number of tokens that takes
        MAX_SECONDS. It is also at most `FrameBudget.alone`, or `FrameBudget.rows` if the frame has trees,
        because their results wait for that pass.
        Otherwise, if no sequence decodes, the result is `FrameBudget.alone`. If sequences decode, it is what
        the trees leave of the frame, or less if these sequences would stall for too long; it is 0 if the
        trees fill the frame.

        A sequence with a finished prompt counts as decoding even if it has no tree in this frame. Without
        `PipelineDepth`, `own_pass` makes no difference, and nothing but the budget bounds the number.
        """
        if own_pass and self._depth:
            max_tokens = self._budget.rows if num_tree_tokens else self._budget.alone
            return self._depth.rows_within(MAX_SECONDS, max_tokens)
        num_decode_tokens = max(
            num_tree_tokens, sum(state.root is not None for state in self._sequences.values())
        )
        max_tokens = self._budget.rows - num_tree_tokens if num_decode_tokens else self._budget.alone
        if self._depth is None or not num_decode_tokens:
            return max_tokens
        num_waiting = sum(self._feedable_tokens(state) > 0 for state in unfed)
        return self._depth.prompt_rows(num_decode_tokens, num_waiting, max_tokens)

    def _free_after(self, sequence: int, position: int) -> None:
        """Free or prune pages in the page table, as every stage does before a sequence's next tokens. Nothing
        happens for a sequence that keeps all of its KV.

        sequence: Id of the sequence, which must be open.
        position: Position of the first of the next tokens. Pages before it are freed or pruned as the KV
            policy says.
        """
        if self._table.policy(sequence):
            self._table.trim(sequence, position)
            self._table.prune(sequence, position)

    def _max_chunk_tokens(self, state: SequenceState) -> int:
        """Return the maximum number of tokens of one prompt chunk, at least 1: all that fit into a frame, if
        there is one stage; with several, the size with which the prompt passes the stages soonest. A sequence
        with a KV policy is bounded by `FrameBudget.rows`, even while no sequence decodes.

        state: The sequence of the prompt.
        """
        rows = self._budget.rows if state.policy else self._budget.alone
        return self._depth.chunk_rows(state.num_unfed, rows) if self._depth else rows

    def _open(self, state: SequenceState, fed: dict[int, int], openings: list[Opening]) -> bool:
        """Open one sequence if its fork source is fed far enough and there are pages. Return whether it was
        opened. Return False if it stays queued for a later frame, and if it is rejected.

        state: The sequence, which is not open yet.
        fed: By sequence id, how many tokens earlier frames have fed.
        openings: The openings of the frame that is being composed. The sequence's opening is appended to it.

        A fork of a sequence that has ended, or of a sequence with a grammar, is rejected. So is an opening
        that the page table refuses.

        If it was opened, its state says so, and the page table has it.
        """
        opening = state.opening
        fork = state.opening.fork
        source = self._sequences.get(fork.sequence) if fork else None
        # The last stage may hold back the segments of a sequence with a grammar until that is compiled
        # (`PendingGrammars`), and then does not know the tokens of the source yet.
        source_unusable = source is None or source.opening.plan or source.opening.form
        if fork and source_unusable:
            self._reject(opening.sequence)
            return False
        source_ready = not fork or (fork.sequence in self._table and fed.get(fork.sequence, 0) >= fork.length)
        if not (source_ready and self._fits(opening)):
            return False
        try:
            open_sequence(self._table, opening)
        except SpecsotError:
            self._reject(opening.sequence)
            return False
        # Without a bound on its pages, a sequence gets the pages of its whole prompt at once, so that its
        # chunks cannot run out of pages halfway.
        if self._max_pages_held(opening) is None:
            self._table.reserve(opening.sequence, opening.prompt)
        openings.append(opening)
        if opening.reused and opening.drafted:
            self._draft_timeout.require_catch_up(len(opening.reused.tokens))
        state.opened = True
        return True

    def _fits(self, opening: Opening) -> bool:
        """Return whether there are free pages for the whole prompt and for one tree, less the pages shared
        with the fork source: False if there are too few. A sequence whose KV policy bounds its pages needs no
        more than that bound.

        opening: Opening of the sequence.

        A prefix, which does not decode, needs no pages for a tree. Only whole pages are shared with the fork
        source.
        """
        shared = opening.forked // self._table.page_rows
        slots = self._budget.max_tree_nodes if opening.decodes else 0
        pages = self._table.pages_for(opening.prompt + slots) - shared
        max_pages = self._max_pages_held(opening)
        return (pages if max_pages is None else min(pages, max_pages)) <= self._table.free

    def _max_pages_held(self, opening: Opening) -> int | None:
        """Return how many pages the sequence holds at most, if a KV policy such as a window bounds that.
        Return None if nothing bounds it.

        opening: Opening of the sequence.
        """
        return max_held_pages(policy_of(opening), self._budget.rows, self._table.page_rows)

    def _reject(self, sequence: int) -> None:
        """End a sequence that could not be opened, and keep a FAILED outcome for the master, see
        `rejections`.

        sequence: Id of the sequence.
        """
        self._close(sequence)
        self._rejected.append(Outcome(sequence, 0, (), (), End.FAILED))

    def _close(self, sequence: int) -> None:
        """Remove a sequence, and have the next frame close it if it was opened. An unknown sequence is
        ignored.

        sequence: Id of the sequence.

        If it was not opened, and was to decode from reused KV of the previous epoch, the next frame closes
        that KV instead.

        If it was neither opened nor reuses KV, nothing is left to close.
        """
        state = self._sequences.pop(sequence, None)
        self._unfed.pop(sequence, None)
        if state and state.opened:
            self._closings.append(sequence)
        # No other sequence will reuse this KV.
        elif state and state.opening.reused and state.opening.decodes:
            self._closings.append(state.opening.reused.sequence)
