"""The last stage's verifier: finds target tokens, accepts tree nodes, and makes results and features."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch

from specsot.core.frames import (
    Drafts,
    End,
    Features,
    Frame,
    Opening,
    Outcome,
    Payload,
    PrefixProgress,
    PromptChunk,
    Result,
    Segment,
    TreeSegment,
)
from specsot.core.overlap import OverlapState
from specsot.core.run_ahead import feeds_forced_tokens
from specsot.core.tree import Tree, first_nodes, single
from specsot.core.tree_parts import is_decided, tree_of
from specsot.grammar import Grammar, IsolatedGrammar, SentenceEnds, SpellingHabits
from specsot.members import RowsOf
from specsot_model.captured_tokens import CapturedTokens
from specsot_model.inference import inference_mode
from specsot_model.kv import indices
from specsot_worker.core.accept import DecodeState, TokenCounts, accept_prompt, accept_tree, grammar_masks
from specsot_worker.core.soft_end import make_rule
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.feature_stream import FeatureStream, with_gathered_rows
from specsot_worker.logprobs import add_logprobs
from specsot_worker.migrated_kv import MigratedKV
from specsot_worker.overlap.drafted_step import ColocatedDrafts, OverlapsSteps
from specsot_worker.overlap.next_step import ChooseTokens, ChosenTokens, NextStep
from specsot_worker.penalties import RowBiases
from specsot_worker.pending_grammars import PendingGrammars
from specsot_worker.prompt_scores import PromptScores
from specsot_worker.sampling import (
    DrawRequest,
    TargetQuery,
    Targets,
    choose_on_device,
    end_softly,
    find_targets,
    read_targets,
    takes_argmax,
)

log = structlog.get_logger()

Logits = Callable[[torch.Tensor], torch.Tensor]
Announce = Callable[[Result], None]
FindGrammar = Callable[[Opening], Grammar | Future[Grammar] | None]


@dataclass(frozen=True, slots=True)
class VerifiedFrame:
    """Result of a frame's verification, with the features or trees that follow from it.

    result: The outcomes of the frame's sequences, to be sent to the master and to stage 0.
    features: The feature messages that are to be sent now, in order, by name of the drafter. Empty if no
        drafter is to be sent anything.
    drafts: The trees of a drafter on this thread, which has been given its features already. None if no such
        drafter answered; then `features` is to be sent.
    """

    result: Result
    features: Mapping[str, tuple[Features, ...]]
    drafts: tuple[Drafts, ...] | None = None

    def on_host(self) -> VerifiedFrame:
        """Return the same value, with features that were copied to the host's memory.

        Messages without features are kept as they are.
        """
        features = {
            drafter: tuple(one if one.rows is None else replace(one, rows=one.rows.cpu()) for one in messages)
            for drafter, messages in self.features.items()
        }
        return replace(self, features=features)


class FrameParts:
    """The parts of one frame that have passed every layer so far.

    number: Number of the frame.
    verified: True if the frame has been verified, so that its further parts do not matter.
    frames: The parts, with hidden states and fused features.
    logits: Logits of each part, [num_tokens, vocab].
    """

    def __init__(self, number: int, verified: bool = False) -> None:
        """Start without parts.

        number: Number of the frame.
        verified: True if the frame has been verified.
        """
        self.number = number
        self.verified = verified
        self.frames = list[Frame]()
        self.logits = list[torch.Tensor]()

    def join(self) -> Frame:
        """Return the frame with the rows and compute seconds of all parts so far. Its tree is whole, even if
        it has more nodes than there are rows. `part` is that of the newest part; `last_part` stays as sent,
        so `part` < `last_part` means that parts were not awaited.
        """
        newest = self.frames[-1]
        return replace(
            newest,
            segments=(tree_of(newest),),
            hidden=_joined([part.hidden for part in self.frames]),
            fused=_joined([part.fused for part in self.frames]),
            seconds=tuple(map(sum, zip(*[part.seconds for part in self.frames]))),
        )


def _joined(parts: Sequence[Payload | None]) -> torch.Tensor | None:
    """Return the rows of all parts, one after the other, [num_tokens, width]. None if there are none.
    Payloads that are not torch tensors are left out: the last stage computes tensors only.

    parts: Rows of each part. None: the frame has no such rows.
    """
    rows = [one for one in parts if isinstance(one, torch.Tensor)]
    return torch.cat(rows) if rows else None


class Verifier:
    """Verifier of the last stage: verifies frames that have passed every layer, and remembers the tokens of
    every sequence.

    colocated: The drafter on this worker's compute thread, if there is one, and the launches that need its
        trees.
    quiet: Returns True if no message or prompt has arrived that would change the next frame, so that the next
        step may be launched before its frame is composed. The worker sets it; until then it always returns
        True.
    passes: Returns how many forward passes the next step may take, see `Sequencer.passes_ahead`. The worker
        sets it; until then it always returns 1.
    runs_ahead: True if frames may have several forward passes.
    """

    def __init__(
        self,
        logits: Logits,
        find_grammar: FindGrammar,
        ring: FeatureRing | None = None,
        stage: OverlapsSteps | None = None,
        sentences: SentenceEnds | None = None,
        captured_tokens: CapturedTokens | None = None,
    ) -> None:
        """Start without sequences.

        logits: Maps hidden states [n, hidden_size] to logits [n, vocab].
        find_grammar: Returns the grammar of an opening, or a future of it, or None.
        ring: Keeps features for the drafter. None if the drafter wants none.
        stage: The stage that can launch the next frame speculatively. None if there is none.
        sentences: Finds ends of sentences, for soft ends. None if the model has no tokenizer.
        captured_tokens: CUDA graphs that choose the argmax of what `logits` returns. None if there are none.
        """
        self._logits = logits
        self._captured_tokens = captured_tokens
        self._find_grammar = find_grammar
        self._sentences = sentences
        # State of the decoding sequences, by id.
        self._decoding: dict[int, DecodeState] = {}
        # Tokens of every open sequence by id, prompt and generated ones, including tokens that were not fed
        # yet.
        self._tokens: dict[int, list[int]] = {}
        self._habits = SpellingHabits()
        self._features = FeatureStream(self._tokens, ring)
        self._pending = PendingGrammars()
        self._scores = PromptScores(logits)
        # Parts of the newest frame that travels in parts.
        self._parts = FrameParts(0)
        self._stage = stage
        self.colocated = ColocatedDrafts(stage, self._places, lambda: self.quiet())
        # Returns whether no message has arrived that would change the next frame.
        self.quiet = lambda: True
        # Returns how many forward passes the next step may take.
        self.passes: Callable[[], int] = lambda: 1
        # Time in seconds at which `_launch_next` began to launch its newest step. -infinity before the first.
        self._launched_at = float("-inf")

    @property
    def next_confirmed(self) -> bool:
        """True if the next step has been launched with the tokens of the results, and waits for its frame."""
        step = self._next_step
        return step is not None and step.state is OverlapState.CONFIRMED

    @property
    def runs_ahead(self) -> bool:
        """True if frames may have several forward passes: on a GPU that runs the whole model."""
        step = self._next_step
        return step is not None and step.accepts_device_tokens

    @property
    def launched_passes(self) -> int:
        """Number of forward passes of the step that waits for its frame; 0 without such a step."""
        step = self._next_step
        return step.launched_passes if step else 0

    @property
    def _next_step(self) -> NextStep | None:
        """The stage's next step. None if there is no stage that launches steps speculatively."""
        return self._stage.next_step if self._stage else None

    @property
    def has_pending(self) -> bool:
        """True if segments wait for their grammar to be compiled."""
        return len(self._pending) > 0

    @property
    def pending_ready(self) -> bool:
        """True if the grammar of some waiting segments has been compiled."""
        return bool(self._pending.ready)

    @inference_mode
    def verify(
        self, frame: Frame, logits: torch.Tensor | None = None, announce: Announce | None = None
    ) -> VerifiedFrame:
        """Verify a frame: return the outcomes of its decoding segments, and the features of what was
        committed.

        frame: A frame that has passed every layer, with the hidden states of the last layer.
        logits: Logits [n, vocab] of the first n tokens. They may leave out the last nodes of a tree, if
            acceptance cannot reach these. None: computed here.
        announce: Called with the result before a drafter on this thread drafts, so that the result's tokens
            do not wait for the next trees. None: nothing is called.

        Segments of sequences whose grammar is still being compiled are held back; `verify_pending` verifies
        them.

        Of the returned frame, `features` is {} and `drafts` is set if a drafter on this worker's thread has
        drafted already. Sequences that the frame closes are forgotten.

        The seconds of this verification are added to the last stage's compute seconds, up to the launch of
        the next step if `_launch_next` launches one.
        """
        began = time.perf_counter()
        if frame.replay:
            # The tokens are known from the openings, and nothing follows from their hidden states.
            frame = replace(frame, segments=())
        for opening in frame.openings:
            self._open(opening)
        frame = self._run_passes(frame)
        verifiable = self._pending.hold_back(frame)
        # The device is still computing this frame, so the host has time for this.
        self._features.catch_up()
        outcomes = self._outcomes(verifiable, logits)
        predicted_step = (
            None if self._pending or self.next_confirmed else self.colocated.predict(frame, outcomes)
        )
        now = time.perf_counter()
        # The time of a step that `_launch_next` has launched begins with its launch, so it is not counted for
        # this frame, too. Launching several passes takes about as long as the device computes them, because
        # the host is at most a few passes ahead of the device.
        ended = self._launched_at if self._launched_at >= began else now
        spent = _add_verify_time(frame, ended - began)
        result = _result(spent, tuple(outcomes.values()), self._prefix_progress(frame))
        if announce:
            announce(result)
        features = self._features.advance(spent if verifiable is frame else verifiable, outcomes, now)
        drafts = self.colocated.draft(_for_sole_drafter(features), predicted_step)
        self._forget(frame, outcomes)
        return VerifiedFrame(result, with_gathered_rows(features) if drafts is None else {}, drafts)

    def is_verified(self, frame: Frame) -> bool:
        """Return whether a part of a frame does not matter any more, because earlier parts have decided the
        frame's result.

        frame: Any part of a frame, as it arrived.
        """
        return self._parts.verified and self._parts.number == frame.number

    @inference_mode
    def verify_part(self, frame: Frame) -> tuple[float, VerifiedFrame | None]:
        """Verify a frame that travels in parts, as soon as its parts so far decide the result. Return the
        seconds that this stage computed for the part, and the verified frame, or None if further parts are
        awaited.

        frame: The next part of the frame, which has passed every layer. The frame was not verified before.

        Raises WireError if the frame does not carry exactly one tree segment and its hidden states.

        All parts are awaited where `_is_decided` returns False for every part.
        """
        began = time.perf_counter()
        if self._parts.number != frame.number:
            self._parts = FrameParts(frame.number)
        parts = self._parts
        segment = tree_of(frame)
        assert frame.hidden is not None, "tree_of has checked it"
        parts.logits.append(self._logits(frame.hidden))
        parts.frames.append(frame)
        if frame.part < frame.last_part and not self._is_decided(segment, parts.logits):
            frame = parts.frames[-1] = _add_verify_time(frame, time.perf_counter() - began)
            return frame.seconds[-1], None
        # The rows of all parts are needed once more, and then no longer.
        self._parts = FrameParts(frame.number, verified=True)
        whole = _add_verify_time(parts.join(), time.perf_counter() - began)
        verified = self.verify(whole, torch.cat(parts.logits))
        earlier_seconds = sum(part.seconds[-1] for part in parts.frames[:-1])
        return verified.result.seconds[-1] - earlier_seconds, verified

    def _is_decided(self, segment: TreeSegment, parts: Sequence[torch.Tensor]) -> bool:
        """Return whether the parts of a frame so far decide which nodes of its tree are accepted. False on a
        GPU, where the host would wait for the device once more per part; for a soft end, which may change a
        target; and for a sequence that does not decode.

        segment: The whole tree.
        parts: Logits of each part so far, [num_tokens, vocab].

        Nothing is recorded: the targets are found again for the result.
        """
        state = self._decoding.get(segment.sequence)
        if state is None or state.soft_end or parts[0].is_cuda:
            return False
        logits = torch.cat([*parts])
        known = first_nodes(segment.tree, len(logits))
        masks = grammar_masks(known, state) if state.grammar else ()
        (targets,) = find_targets(logits, [TargetQuery(state, 0, known, segment.committed + 1, masks)])
        return is_decided(segment.tree, targets)

    def _run_passes(self, frame: Frame) -> Frame:
        """Launch all passes but the first of a frame of several passes, unless that was done before the frame
        was composed. Return the frame with the outputs of all its passes.

        frame: A frame whose first pass is running.
        """
        step = self._next_step
        if not frame.extra_passes or step is None or step.chosen:
            return frame
        states = [self._decoding[one.sequence] for one in frame.segments]
        positions = [one.committed + 1 for one in frame.segments if isinstance(one, TreeSegment)]
        return step.run_passes(frame, self._chooser(states, positions))

    def _chooser(self, states: Sequence[DecodeState], positions: Sequence[int]) -> ChooseTokens:
        """Return a function that chooses the tokens after each of several passes, on the device.

        states: What is remembered of the sequences, in the order of their rows.
        positions: Position of the token that follows each sequence's first pass.
        """
        openings = [state.opening for state in states]
        draws = any(opening.sampling.temperature > 0 for opening in openings)
        biases = RowBiases([opening.sampling for opening in openings])
        # The captured graphs choose the argmax of unchanged logits.
        needs_logits = draws or any(opening.sampling.logit_bias for opening in openings)

        def choose(hidden: torch.Tensor, number: int) -> torch.Tensor:
            """Return the tokens that follow one pass, int32 [num_sequences] on the device.

            hidden: Hidden states after the pass, [num_sequences, hidden_size].
            number: Number of the pass, from 0 on.
            """
            captured = None if needs_logits else self._captured_tokens
            if captured and (tokens := captured(hidden)) is not None:
                # The tokens of all passes are read after the last one, but the next call overwrites these.
                return tokens.clone()
            requests = list[DrawRequest]()
            if draws:
                requests = [
                    DrawRequest(opening.sampling, opening.seed, opening.ordinal, position + number)
                    for opening, position in zip(openings, positions)
                ]
            return choose_on_device(biases.add_to(self._logits(hidden)), requests)

        return choose

    def set_drafters(self, drafters: Collection[str]) -> None:
        """Use these drafters from now on. Drafters that were not present before know no sequence.

        drafters: Names of the drafters that are present. Empty: no features are sent.
        """
        self._features.set_drafters(drafters)

    def take_features_from(self, migrated: MigratedKV) -> None:
        """Use migrated features for sequences that continue from the previous epoch.

        migrated: Features that were received during the previous epoch.
        """
        self._features.migrated = migrated

    @inference_mode
    def feature_rows(self, asked: Sequence[RowsOf]) -> list[torch.Tensor | None]:
        """Return copies of features on the host, for the last stage of the next epoch: [num_positions,
        feature_size] for each request. None for a sequence of which some of these features were overwritten.

        asked: The requests: a sequence and a range of its positions each.
        """
        return self._features.copies(asked)

    @inference_mode
    def verify_pending(self, announce: Announce | None = None) -> VerifiedFrame:
        """Verify the held-back segments whose grammar has been compiled, and return their outcomes and
        features. Call it only while `pending_ready` is True.

        announce: Called with the result before a drafter on this thread drafts. None: nothing is called.

        The result has frame number 0, because no step belongs to it.

        A sequence whose grammar could not be compiled ends with an error of its own. The sequences that
        ended are forgotten.
        """
        grammars, frame = self._pending.take_ready()
        for sequence, found in grammars.items():
            self._decoding[sequence].set_grammar(IsolatedGrammar(found.result))
        outcomes = self._outcomes(frame)
        result = Result(frame.epoch, frame.number, tuple(outcomes.values()))
        if announce:
            announce(result)
        features = self._features.advance(frame, outcomes, time.perf_counter())
        drafts = self.colocated.draft(_for_sole_drafter(features))
        self._forget(frame, outcomes)
        return VerifiedFrame(result, with_gathered_rows(features) if drafts is None else {}, drafts)

    def _open(self, opening: Opening) -> None:
        """Open a sequence: remember its tokens so far, and, if it decodes, its grammar and state. A grammar
        that is still being compiled is added to the pending ones.

        opening: What every stage knows about the sequence.

        A prefix, which does not decode, has only its tokens remembered. The tokens of a fork begin with
        those of its source up to the fork's length, followed by reused tokens of the previous epoch.
        """
        fork = opening.fork
        tokens = self._tokens[fork.sequence][: fork.length] if fork else []
        kept = opening.reused.tokens if opening.reused else ()
        self._tokens[opening.sequence] = [*tokens, *kept]
        self._scores.open(opening)
        if opening.decodes:
            found = self._start_grammar(opening)
            grammar = None
            if found and found.done():
                grammar = IsolatedGrammar(found.result)
            elif found:
                self._pending.add(opening.sequence, found)
            history = TokenCounts(tokens) if opening.sampling.penalises else None
            state = DecodeState(opening, grammar, self._habits, history)
            state.soft_end = make_rule(opening, self._sentences)
            self._decoding[opening.sequence] = state
            state.read_prompt(len(tokens), kept)

    def _start_grammar(self, opening: Opening) -> Future[Grammar] | None:
        """Return a future of the sequence's grammar. Return None if it has none.

        opening: What every stage knows about the sequence, including the grammar that its request asks for.

        An error of `find_grammar` becomes the future's error, so that it ends this sequence alone.

        A grammar that is compiled already gives a future that is done.
        """
        compiling: Future[Grammar] = Future()
        try:
            found = self._find_grammar(opening)
        except Exception as error:
            compiling.set_exception(error)
            return compiling
        if found is None or isinstance(found, Future):
            return found
        compiling.set_result(found)
        return compiling

    def _outcomes(self, frame: Frame, logits: torch.Tensor | None = None) -> dict[int, Outcome]:
        """Return the outcome of each decoding segment, by sequence. Return {} if no segment decodes. If
        possible, launch the next frame meanwhile.

        frame: A frame that has passed every layer, without held-back segments.
        logits: Logits of its tokens, if they have been computed already, see `verify`.

        Logits are computed for tree nodes and for the last token of each final prompt chunk.

            # a tree of 3 nodes, a final prompt chunk of 4 tokens, and one of 2 tokens that is not final:
            # tokens of the frame [t0 t1 t2 | p0 p1 p2 p3 | q0 q1] -> logits of tokens [0, 1, 2, 6]

        Tokens of prompt chunks are recorded first: appended to the tokens of their sequences, and for
        decoding sequences also in their states, see `DecodeState.read_prompt`. Targets are those of
        `find_targets`; log-probabilities are added for sequences that ask for them. If `takes_argmax` returns
        True for every query, and a graph of `captured_tokens` has room, that graph chooses the tokens, and
        logits are computed only if `read_targets` needs them. The next step is launched here only if every
        sequence certainly feeds its one new token and `quiet` returns True.
        """
        self._scores.read(frame)
        # Segments after which a token is chosen, and their queries.
        decoding = list[Segment]()
        queries = list[TargetQuery]()
        # Numbers of the tokens of the frame whose logits are not needed.
        unneeded = list[int]()
        # Number of the segment's first token, then of the token after its last one.
        first = 0
        find_state = self._decoding.get
        for segment in frame.segments:
            state = find_state(segment.sequence)
            if isinstance(segment, TreeSegment):
                tree = segment.tree
                position = segment.committed + 1
                start = first
                first += len(tree.tokens)
            else:
                self._tokens[segment.sequence] += segment.tokens
                if state:
                    state.read_prompt(segment.start, segment.tokens)
                # After another chunk than the final one, no token is chosen.
                state = state if segment.final else None
                tree = single(segment.tokens[-1])
                position = segment.start + len(segment.tokens)
                unneeded += range(first, first + len(segment.tokens) - 1)
                first += len(segment.tokens)
                start = first - 1
            if state is None:
                unneeded += range(start, first)
                continue
            masks = grammar_masks(tree, state) if state.grammar else ()
            decoding.append(segment)
            # All tokens in `unneeded` come before `start`, and have no row among the logits.
            queries.append(TargetQuery(state, start - len(unneeded), tree, position, masks))
        if not queries:
            return {}
        next_step = self._next_step
        if frame.extra_passes and next_step and next_step.chosen:
            return self._outcomes_of_passes(frame, decoding, queries, next_step, next_step.chosen)
        tokens = None
        compute_logits = None
        if logits is None:
            hidden = frame.hidden
            assert hidden is not None
            if unneeded:
                needed = sorted({*range(first)}.difference(unneeded))
                hidden = hidden[indices(needed, hidden.device)]
            compute_logits = partial(self._logits, hidden)
            if self._captured_tokens and all(map(takes_argmax, queries)):
                tokens = self._captured_tokens(hidden)
            if tokens is None:
                logits = compute_logits()
        # The host prepares the following while the device computes the tokens.
        steady = next_step is not None and self._steady(frame, queries)
        meanwhile = None if self._pending else partial(self.colocated.start, frame)
        mispredicted = self.colocated.discard
        if logits is not None:
            found = find_targets(logits, queries, meanwhile=meanwhile, mispredicted=mispredicted)
        else:
            assert tokens is not None
            assert compute_logits is not None
            found = read_targets(tokens, queries, compute_logits, meanwhile, mispredicted)
        if next_step and steady and self.quiet() and not self._feeds_forced(queries, found):
            # A first token does not wait until several passes have been launched.
            has_first_tokens = any(isinstance(one, PromptChunk) for one in frame.segments)
            self._launch_next(next_step, queries, found, 1 if has_first_tokens else self.passes())
        draft_paused = frame.paused or frame.catching_up
        outcomes = [
            self._outcome(segment, query.state, targets, draft_paused)
            for segment, query, targets in zip(decoding, queries, found)
        ]
        if logits is not None:
            outcomes = add_logprobs(outcomes, queries, logits)
        return {one.sequence: one for one in outcomes}

    def _outcomes_of_passes(
        self,
        frame: Frame,
        decoding: Sequence[Segment],
        roots: Sequence[TargetQuery],
        step: NextStep,
        chosen: ChosenTokens,
    ) -> dict[int, Outcome]:
        """Return the outcome of each sequence of a frame of several passes, by sequence. Before that, launch
        the next step if the frame is steady, `quiet` returns True and no grammar forces a token.

        frame: The frame, see `Frame.extra_passes`. All of its segments decode.
        decoding: The segments of the frame.
        roots: Queries of the segments. Only the root of each query's tree is a known token, see
            `unknown_chain`.
        step: Launches the next step.
        chosen: The target tokens that the device has chosen.

        Each tree becomes the chain of the tokens that were fed, so that it is accepted like a drafted one.

            # root a, chosen [b c d] -> tree a -> b -> c with the targets [b c d]

        The device does not know what a grammar allows. So the chain of a sequence with a grammar is verified
        like a drafted one too, see `_verified_chains`.

            # root a, chosen [b c d], and the grammar forces x after b -> accepted a -> b, targets [b x None]
        """
        # The number of passes does not depend on the tokens, and the device is still computing, so the host
        # has time to find the number now.
        passes = self.passes()
        found: list[Targets] = chosen.read()
        queries = list[TargetQuery]()
        for root, targets in zip(roots, found):
            state = root.state
            tokens = root.tree.tokens[0], *[token or 0 for token in targets[:-1]]
            fed = Tree.of_ordered(tokens, root.tree.parents)
            masks = grammar_masks(fed, state) if state.grammar else ()
            queries.append(TargetQuery(state, root.row, fed, root.position, masks))
        found = [*map(end_softly, queries, found)]
        found = self._verified_chains(frame, queries, found)
        draft_paused = frame.paused or frame.catching_up
        if self._steady(frame, queries) and self.quiet() and not self._feeds_forced(queries, found):
            self._launch_next(step, queries, found, passes)
        outcomes = list[Outcome]()
        for segment, query, targets in zip(decoding, queries, found):
            assert isinstance(segment, TreeSegment)
            outcome = self._outcome(segment.with_tree(query.tree), query.state, targets, draft_paused)
            outcomes.append(replace(outcome, extra_passes=frame.extra_passes))
        return {one.sequence: one for one in outcomes}

    def _verified_chains(
        self, frame: Frame, queries: Sequence[TargetQuery], found: Sequence[Targets]
    ) -> list[Targets]:
        """Return the targets of a frame of several passes: those of sequences with a grammar from logits and
        masks, as for drafted trees; those of the others as the device has chosen them.

        frame: The frame, with the hidden states of all passes.
        queries: Queries of its segments. Each tree is the chain of the tokens that were fed.
        found: Targets of each query, as the device has chosen them, soft ends included.
        """
        masked = [number for number, one in enumerate(queries) if one.masks]
        verified = list(found)
        hidden = frame.hidden
        if masked:
            assert hidden is not None
            length = 1 + frame.extra_passes
            rows = [
                row for number in masked for row in range(queries[number].row, queries[number].row + length)
            ]
            asked = [queries[number]._replace(row=place * length) for place, number in enumerate(masked)]
            logits = self._logits(hidden[indices(rows, hidden.device)])
            for number, targets in zip(masked, find_targets(logits, asked)):
                verified[number] = targets
        return verified

    def _steady(self, frame: Frame, queries: list[TargetQuery]) -> bool:
        """Return whether every sequence of a frame feeds exactly its one new token in the next frame, unless
        that token ends it, and the sequences are in the order of the next frame's trees. Return False for the
        frame of `verify_pending`, and while segments wait for a grammar.

        frame: The frame that is being verified.
        queries: Queries of its decoding segments, in the order of the segments.

        Return False, too, if a segment does not decode, or if a tree has more nodes than its root and is no
        chain of a frame of several passes.
        """
        if not frame.number or len(queries) < len(frame.segments) or self._pending:
            return False
        draft_paused = frame.paused or frame.catching_up
        for one in queries:
            drafted = len(one.tree.tokens) > 1 + frame.extra_passes
            if drafted or not one.state.will_continue(draft_paused):
                return False
        places = [one.state.order for one in queries]
        return places == sorted(places)

    def _feeds_forced(self, queries: Sequence[TargetQuery], found: Sequence[Targets]) -> bool:
        """Return whether a grammar forces the token after the last target of a query, and the next step feeds
        both together.

        queries: Queries whose trees are roots alone, or chains of a frame of several passes.
        found: Targets of each query, one for each node.
        """
        return any(
            one.state.is_forced_after(targets)
            for one, targets in zip(queries, found)
            if one.state.grammar and (not self.runs_ahead or feeds_forced_tokens(one.state.opening))
        )

    def _launch_next(
        self, step: NextStep, queries: list[TargetQuery], found: list[Targets], passes: int
    ) -> None:
        """Launch the next step before results are made, because every sequence waits for it.

        step: Launches the step.
        queries: One for each sequence of the frame.
        found: Targets of each query, one token per pass of the frame. None: the logits are not finite.
        passes: Number of passes of the step.

        Nothing is launched if any logits are not finite, or if every sequence ends with its tokens.

        The step may refuse to launch, for example for token ids beyond the vocabulary; nothing happens then.
        If it is launched, its further passes follow.
        """
        if any(None in targets for targets in found):
            return
        continues = any(
            one.state.remaining > len(targets) and one.state.stop_ids.isdisjoint(targets)
            for one, targets in zip(queries, found)
        )
        tokens = [token for targets in found if (token := targets[-1]) is not None]
        began = time.perf_counter()
        if not (continues and step.launch(tokens)):
            return
        self._launched_at = began
        if passes > 1:
            states = [one.state for one in queries]
            step.run_ahead(self._chooser(states, [one.position + len(one.tree) for one in queries]), passes)

    def _places(self, segments: Sequence[Segment]) -> list[tuple[int, int] | None]:
        """Return the place of each segment's sequence among a frame's trees, if its next tree is always the
        drafter's; otherwise None. See `DecodeState.place`.

        segments: Segments of the frame that is being verified.
        """
        find = self._decoding.get
        return [state.place if (state := find(one.sequence)) else None for one in segments]

    def _prefix_progress(self, frame: Frame) -> tuple[PrefixProgress, ...]:
        """Return how far each prefix of a frame has been computed: one value per prompt chunk of a sequence
        that does not decode. Return () if the frame has no such chunk.

        frame: The verified frame.
        """
        chunks = [one for one in frame.segments if isinstance(one, PromptChunk)]
        return tuple(
            PrefixProgress(chunk.sequence, chunk.start + len(chunk.tokens))
            for chunk in chunks
            if chunk.sequence not in self._decoding
        )

    def _outcome(self, segment: Segment, state: DecodeState, targets: Targets, paused: bool) -> Outcome:
        """Accept along the targets of one segment, record the tokens and return the outcome.

        segment: A tree, or a final prompt chunk, of a decoding sequence.
        state: What is remembered of the sequence.
        targets: Target token id at each node, from `find_targets`.
        paused: True if drafting is paused or resuming for the segment's frame.

        If the sequence's grammar has failed, the outcome is FAILED and has no tokens.

        The outcome of a final prompt chunk also has the log-probabilities of the prompt's tokens, if they
        were asked for. The failure of a grammar is logged as an error.
        """
        if isinstance(segment, PromptChunk):
            prompt_chances = self._scores.take(segment.sequence)
            outcome = replace(accept_prompt(state, targets[0]), prompt_chances=prompt_chances)
        else:
            draft_paused = paused and state.opening.drafted
            outcome = accept_tree(state, segment.draft_round, segment.tree, targets, draft_paused)
        if state.grammar is not None and state.failure:
            outcome = Outcome(outcome.sequence, outcome.draft_round, outcome.accepted[:1], (), End.FAILED)
            log.error("a sequence failed", sequence=segment.sequence, reason=state.failure)
        self._tokens[segment.sequence] += outcome.tokens
        return outcome

    def _forget(self, frame: Frame, outcomes: dict[int, Outcome]) -> None:
        """Drop the state of sequences that have ended or that the frame closes.

        frame: The verified frame.
        outcomes: Its outcomes by sequence.

        Tokens, pending grammars and prompt scores are dropped only for sequences that the frame closes,
        because forks of an ended sequence may still need its tokens.
        """
        ended = [sequence for sequence, outcome in outcomes.items() if outcome.end]
        for sequence in (*frame.closings, *ended):
            self._decoding.pop(sequence, None)
        for sequence in frame.closings:
            self._tokens.pop(sequence, None)
            self._pending.forget(sequence)
            self._scores.forget(sequence)


def _for_sole_drafter(features: Mapping[str, tuple[Features, ...]]) -> tuple[Features, ...]:
    """Return the messages for the only drafter, in order. Return () if there are none. A drafter on the
    verifier's own thread is always the only one.

    features: Messages by name of the drafter.
    """
    return next(iter(features.values()), ())


def _add_verify_time(frame: Frame, seconds: float) -> Frame:
    """Return the frame with the time of verification added to the last stage's compute time.

    frame: The verified frame, with the compute seconds of its stages.
    seconds: Seconds that the verification took.

    A frame without compute seconds is treated as one whose only stage took 0 seconds.
    """
    *before, last = frame.seconds or (0.0,)
    return frame.with_outputs(frame.hidden, frame.fused, (*before, last + seconds))


def _result(frame: Frame, outcomes: tuple[Outcome, ...], prefixes: tuple[PrefixProgress, ...]) -> Result:
    """Return the result message of a frame, for stage 0 and the master.

    frame: The verified frame.
    outcomes: Outcomes of its decoding segments. May be empty.
    prefixes: How far its prefixes have been computed. May be empty.

    The result also has the frame's compute seconds, the number of tokens of each pass, the number of trees
    with more nodes than the root, and the number of drafted nodes, roots excluded. In a frame of several
    passes nothing is drafted. Of a frame in parts, the counts are those of the whole tree, and
    `verified_part` is `frame.part`, with which the frame was verified.
    """
    passes = 1 + frame.extra_passes
    sizes = [len(one.tree.tokens) for one in frame.segments if isinstance(one, TreeSegment)]
    drafts = len(sizes) - sizes.count(passes)
    counts = frame.num_tokens // passes, drafts, sum(sizes) - passes * len(sizes)
    return Result(frame.epoch, frame.number, outcomes, frame.seconds, *counts, prefixes, frame.part)
