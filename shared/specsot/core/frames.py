"""Messages of the ring: frames, results, features, drafts, and the orders that start them.

Numbering. The tokens of a sequence have positions 0, 1, .... `committed` = n means that the KV entries of
positions 0..n-1 are final, and that the next token to be fed (the root of the next tree) has position n.
A sequence's KV *rows* have the same numbers: row r holds the KV entry of position r, except that the nodes of
a tree lie in node order in rows n, n + 1, ... until they are verified.

Names. A step is one forward pass of the ring. The field `draft_round` counts the draft rounds of one
sequence: `draft_round` = k belongs to its k-th tree, counted from 1, and `draft_round` = 0 to the last chunk
of its prompt. `paused` means that drafting is paused, and `catching_up` that drafting has resumed while the
drafter still lacks features of some sequences.

Worked example. A prompt of 10 tokens yields the first token, a. Draft round 1 feeds the tree a -> (b, c):

    TreeSegment(draft_round=1, committed=10, keep=())      nodes [a b c] in rows [10 11 12]
    Outcome(draft_round=1, accepted=(0, 2), tokens=(c, d)) the target accepts c, and d is the bonus token
    TreeSegment(draft_round=2, committed=12, keep=(0, 2))  row 12 (c) moves to row 11; root d is in row 12
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specsot.core.skeleton import PlanRules
from specsot.core.soft_end import SoftEnd
from specsot.core.tree import Tree
from specsot.params import DrafterName, Form, HeadImportance, HeadWindows, Pruning, Sampling, Window
from specsot.values import value

# A torch tensor within a process; raw bytes with dtype and shape on the wire.
Payload = Any


class End(enum.Enum):
    """Why a sequence ended, as far as tokens can tell."""

    # An end-of-sequence token or a stop token was generated.
    STOP = "stop"
    # The token limit was reached.
    LENGTH = "length"
    # The constraint allows no further token.
    GRAMMAR = "grammar"
    # The master closed the sequence.
    CANCELLED = "cancelled"
    # The sequence failed, for example because its logits are not finite. Other sequences continue.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Fork:
    """The source of a forked sequence: the sequence starts with the KV of the first `length` tokens of
    another one.

    sequence: id of the source, which must still be open.
    length: number of tokens to share; the source has committed at least as many.
    """

    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class ReusedKV:
    """KV of a closed sequence of the previous epoch that a new sequence reuses instead of computing it again.

    sequence: id of the previous epoch's sequence, whose KV rows every stage still holds.
    tokens: the tokens of the reused rows. They follow the tokens that the new sequence forks, if it forks
        any.
    replay: True if a stage was lost with the KV of its layers. Frames with `replay` then carry these tokens
        before the sequence's own ones, and the layers that were lost compute their KV again.
    """

    sequence: int
    tokens: tuple[int, ...]
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """The opening of a sequence: what every stage and the drafter must know of it before its first token.

    sequence: id of the sequence. Ids are never reused within a fleet's life.
    prompt: length of the whole prompt in tokens, the forked part included.
    fork: the source whose first tokens the sequence shares, or None.
    decodes: False for a prefix, which is prefilled, held and forked, but never generates tokens.
    drafted: False if no drafter may propose tokens for the sequence.
    generated: how many of the prompt's last tokens the sequence itself generated before a repair.
    sampling: how target tokens are drawn from the logits.
    seed: seed of the request's random numbers.
    ordinal: number of the sequence within its request: 0 for the first sequence, PLAN_ORDINAL of the master
        for a speculative skeleton, else the id of a branch's point. With the seed and the position, the
        ordinal determines the random number with which a token is sampled.
    stop_ids: token ids that end the sequence.
    limit: how many tokens the sequence may generate in all, `generated` tokens included.
    plan: the rules of the skeleton if the sequence writes one, or None. At most one of `plan` and `form` is
        set.
    logprobs: how many of the likeliest alternatives to report with the log-probability of each generated
        token. With 0, only the generated token's log-probability is reported. With None, nothing is reported.
    form: the caller's constraint on the output, or None.
    family: sequences with the same family number are scheduled into the same frames if possible. With None,
        the sequences that fork the same source are a family.
    drafter: which of the drafter's proposers drafts for the sequence. With None, the drafter's first.
    trace: the trace context of the request, for spans. None if no spans are collected.
    window: which positions a token attends to; a fork has the window of its source. With None, a token
        attends to all preceding tokens.
    pruning: how keys are pruned by their norm; None if they are not. A sequence with `pruning` or `heads` has
        neither a window nor a fork.
    heads: which positions each KV head attends to, a window per head. With None, all heads attend to the same
        positions.
    importance: importance of each of the model's KV heads, in [0, 1]; the more important a head is, the
        larger the fraction of rows that pruning keeps for it. With None, all heads keep equally many rows.
        Set only with `pruning`.
    min_tokens: no token of `stop_ids` may be generated before so many tokens.
    prompt_logprobs: how many of the likeliest alternatives to report with the log-probability of each token
        of the prompt but the first. With None, nothing is reported. Set only without fork.
    reused: rows of a previous epoch's sequence that are reused, or None.
    soft_end: where a sequence of free text may end before its limit, or None.
    excluded_first: token ids that the first generated token must not be. Later tokens may be any of them.
    """

    sequence: int
    prompt: int
    fork: Fork | None = None
    decodes: bool = True
    drafted: bool = True
    generated: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    ordinal: int = 0
    stop_ids: tuple[int, ...] = ()
    limit: int = 1
    plan: PlanRules | None = None
    logprobs: int | None = None
    form: Form | None = None
    family: int | None = None
    drafter: DrafterName | None = None
    trace: str | None = None
    window: Window | None = None
    pruning: Pruning | None = None
    heads: HeadWindows | None = None
    importance: HeadImportance | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    reused: ReusedKV | None = None
    soft_end: SoftEnd | None = None
    excluded_first: tuple[int, ...] = ()

    @property
    def forked(self) -> int:
        """Number of rows that the sequence shares with the source of its fork; 0 without a fork."""
        return self.fork.length if self.fork else 0

    @property
    def num_computed_tokens(self) -> int:
        """Number of rows that need not be computed: forked rows and reused rows of a previous epoch; 0
        without either.
        """
        return self.forked + (len(self.reused.tokens) if self.reused else 0)


@value
class PromptChunk:
    """Prompt tokens of one sequence, which are committed as soon as they are fed.

    sequence: id of the sequence.
    start: position of the first of the tokens.
    tokens: token ids for the positions start, start + 1, ....
    final: True for the last chunk of the prompt, whose last token yields the first token of a sequence that
        decodes.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    final: bool


@value
class ParentNode:
    """The unverified node that a tree grows from; see `specsot.core.tree_frames`.

    draft_round: draft round of the tree that has the node.
    node: number of the node in that tree. Its target token is expected to be the root of the growing tree.
    """

    draft_round: int
    node: int


@value
class TreeSegment:
    """The tree of one draft round of a sequence, to be fed at rows committed .. committed + len(tree) - 1.

    sequence: id of the sequence.
    draft_round: number of the draft round, counted from 1.
    committed: number of committed positions, the nodes of `keep` included; the row of this tree's root.
    keep: accepted nodes of the preceding tree, by number, root first. Empty in draft round 1, which follows
        the prompt, and if nothing was accepted; (0,) if only the root was accepted, which is so in every
        round without drafts. Node i lies in scratch slot i, and the rows of the accepted nodes move down to
        the rows that end before `committed`. Example: the preceding tree had its nodes in rows 10..14 and
        keep is (0, 2, 3), so row 12 moves to row 11, row 13 moves to row 12, and committed is 13.
    tree: the root and the drafted nodes.
    parent: the unverified node that the tree grows from. None: the verified root, which is the newest token
        of the sequence. Always None as long as one tree frame of a sequence is in flight.
    scratch: the first scratch slot of the tree's nodes: node i is in slot scratch + i. Slot 0 is row
        `committed`. Always 0 as long as one tree frame of a sequence is in flight.
    freed: draft rounds that were verified or dropped, and whose scratch slots every stage frees before it
        writes this tree. A tree that grows from the verified root while no other is in flight frees those of
        all earlier rounds, which are not named.
    earlier: number of first nodes of the tree that earlier parts of the frame feed. 0 unless the frame is cut
        (`specsot.core.tree_parts`), and in its first part, which alone applies `keep`.
    later: number of last nodes of the tree that later parts of the frame feed; this frame feeds the nodes
        between. 0 unless the frame is cut, and in its last part.
    """

    sequence: int
    draft_round: int
    committed: int
    keep: tuple[int, ...]
    tree: Tree
    parent: ParentNode | None = None
    scratch: int = 0
    freed: tuple[int, ...] = ()
    earlier: int = 0
    later: int = 0

    @property
    def nodes(self) -> range:
        """Numbers of the nodes that this frame feeds: all nodes of the tree, unless the frame is cut."""
        return range(self.earlier, len(self.tree.tokens) - self.later)

    @property
    def once_more(self) -> bool:
        """True if this draft round feeds the root of the preceding one again, because the logits at that root
        were not finite. The preceding tree's drafts may have caused that through the rows that they wrote, so
        the stages clear all rows from `committed` on before they compute this tree. False in every part but
        the first, because the first part has cleared the rows.
        """
        return self.draft_round > 1 and not (self.keep or self.earlier)

    def with_tree(self, tree: Tree) -> TreeSegment:
        """Return the same segment with another tree. `earlier` and `later` are kept, so they must fit the
        other tree. `dataclasses.replace` takes three times as long, for each sequence of each step.

        tree: the other tree. The number of its nodes is not limited by this segment's scratch slots.
        """
        return TreeSegment(
            self.sequence,
            self.draft_round,
            self.committed,
            self.keep,
            tree,
            self.parent,
            self.scratch,
            self.freed,
            self.earlier,
            self.later,
        )


Segment = PromptChunk | TreeSegment


def rows_of(segment: Segment) -> int:
    """Return the number of tokens that a segment adds to the batch, which is at least 1.

    segment: a prompt chunk, or the tree of one draft round.
    """
    if isinstance(segment, PromptChunk):
        return len(segment.tokens)
    return len(segment.tree.tokens) - segment.earlier - segment.later


def num_tokens_of(segments: Iterable[Segment]) -> int:
    """Return the number of tokens that segments add to the batch together, 0 for none.

    segments: the segments of a frame, or some of them.
    """
    # One pass without a call for each segment: every step counts the tokens of 64 segments several times.
    return sum(
        [
            len(one.tokens)
            if isinstance(one, PromptChunk)
            else len(one.tree.tokens) - one.earlier - one.later
            for one in segments
        ]
    )


def tokens_of(segment: Segment) -> tuple[int, ...]:
    """Return the token ids of a segment, in batch order.

    segment: a prompt chunk, or the tree of one draft round.
    """
    if isinstance(segment, PromptChunk):
        return segment.tokens
    nodes = segment.nodes
    return segment.tree.tokens[nodes.start : nodes.stop]


@value
class Frame:
    """The work of one forward pass of the ring, passed from stage to stage.

    Every stage applies the header in this order: openings; then, segment by segment, the moves of accepted
    rows (`TreeSegment.keep`) and the new rows; then closings. The batch is the concatenation of the segments:
    segments of 3, 1 and 4 tokens are the rows [0 1 2 | 3 | 4 5 6 7] of `hidden`.

    epoch: the epoch in which the frame was composed.
    number: number of the frame within its epoch.
    openings: sequences that begin with this frame.
    segments: prompt chunks and trees, in batch order.
    closings: ids of sequences that end with this frame.
    hidden: [num_tokens, hidden_size] residual stream before this stage's first layer. None before stage 0.
    fused: [num_tokens, head_hidden_size] running sum of the draft head's `fc` projection over the tapped
        layers passed so far. None if no head needs it.
    seconds: compute time of each stage passed so far, in stage order.
    paused: True while drafting is paused. The last stage then keeps what the drafter must learn of this
        frame for a later frame.
    trace: the trace context of this step, for spans. None if the step is not traced.
    catching_up: True while drafting resumes: the drafter is sent what it missed, and asked for no trees until
        it has caught up.
    extra_passes: number of forward passes that the frame takes in addition to the first. Each tree is then a
        chain of `extra_passes` nodes after its root, and each pass feeds one node of every chain. Only the
        root's token is known; the others are 0 in the frame, because the stage itself chooses each of them
        after the pass before. Always 0 in a ring of several stages.
    replay: True if the segments are chunks of reused rows (`ReusedKV.replay`). Every stage puts the KV that
        it kept into its pages, computes that of the lost layers, and passes hidden states on only as far as
        lost layers reach; the last stage verifies nothing.
    part: number of this part of the frame, counted from 0. 0 for a frame that travels whole.
    last_part: number of the frame's last part. 0 for a frame that travels whole. The parts of a frame have
        the same number and follow each other. See `specsot.core.tree_parts`.
    """

    epoch: int
    number: int
    openings: tuple[Opening, ...] = ()
    segments: tuple[Segment, ...] = ()
    closings: tuple[int, ...] = ()
    hidden: Payload | None = None
    fused: Payload | None = None
    seconds: tuple[float, ...] = ()
    paused: bool = False
    trace: str | None = None
    catching_up: bool = False
    extra_passes: int = 0
    replay: bool = False
    part: int = 0
    last_part: int = 0
    # The value of `num_tokens`, or None until it is read for the first time. `dataclasses.replace` does not
    # copy it, so that a frame with other segments counts its own tokens.
    _num_tokens: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the batch, those of all passes included. The number is cached, because every
        step reads it several times.
        """
        if (counted := self._num_tokens) is None:
            counted = num_tokens_of(self.segments)
            object.__setattr__(self, "_num_tokens", counted)
        return counted

    def with_outputs(
        self, hidden: Payload | None, fused: Payload | None, seconds: tuple[float, ...]
    ) -> Frame:
        """Return the same frame with other outputs. Every step calls this twice, and `dataclasses.replace`
        takes three times as long. A cached number of tokens is copied, because the segments stay the same.

        hidden: residual stream, see `hidden`.
        fused: features, see `fused`.
        seconds: compute time of each stage.
        """
        frame = Frame(
            self.epoch,
            self.number,
            self.openings,
            self.segments,
            self.closings,
            hidden,
            fused,
            seconds,
            self.paused,
            self.trace,
            self.catching_up,
            self.extra_passes,
            self.replay,
            self.part,
            self.last_part,
        )
        object.__setattr__(frame, "_num_tokens", self._num_tokens)
        return frame


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, and of the likeliest alternatives at its position.

    logprob: natural log-softmax of the model's own logits at the token.
    top: (token id, log-probability) of the likeliest tokens at the same position, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@value
class Outcome:
    """The verification result of one segment.

    sequence: id of the sequence.
    draft_round: draft round of the verified tree; 0 for the final chunk of a prompt.
    accepted: accepted node numbers, root first. Empty for a prompt chunk. Empty also if the logits at the
        root are not finite; then the next draft round feeds the same root again, without drafts.
    tokens: newly generated tokens: the tokens of the accepted nodes except the root, then the bonus token,
        cut after the first token that ends the sequence. Empty if a tree's `accepted` is empty.
    end: why the sequence ended, or None while it continues.
    chances: the log-probability of each of `tokens`, -inf to 0, with alternatives; empty if the sequence does
        not ask for log-probabilities.
    forced: the tokens after `tokens` that the constraint determines alone.
    draft_paused: True if nothing was drafted for a drafted sequence, because drafting was paused or resuming.
    prompt_chances: the log-probability of each token of the prompt but the first, if the sequence asks for
        these. Set only where `draft_round` is 0.
    dropped: draft rounds of the sequence's tree frames in flight that this result drops, because they grow
        from nodes that were not accepted. Always empty as long as one tree frame of a sequence is in flight.
    extra_passes: `Frame.extra_passes` of the verified frame. Without drafts, every pass adds one token.
    """

    sequence: int
    draft_round: int
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    end: End | None = None
    chances: tuple[Logprob, ...] = ()
    forced: tuple[int, ...] = ()
    draft_paused: bool = False
    prompt_chances: tuple[Logprob, ...] = ()
    dropped: tuple[int, ...] = ()
    extra_passes: int = 0


@value
class PrefixProgress:
    """How much of a prefix has been computed, after a frame with a chunk of its prompt.

    sequence: id of the prefix's sequence.
    num_computed: number of its first tokens whose KV every stage has.
    """

    sequence: int
    num_computed: int


@value
class Result:
    """The outcomes of one frame, which the last stage sends to the master and to stage 0.

    For stage 0, the result of a frame also means that another frame may be launched.

    epoch: epoch of the frame.
    number: number of the frame.
    outcomes: one per tree, and one per final prompt chunk of a sequence that decodes.
    seconds: compute time of each stage for this frame, in stage order.
    rows: number of tokens in the batch of each forward pass of the frame. For a frame in parts, the nodes of
        all parts.
    drafts: number of trees in the frame that have more than their root.
    drafted: number of nodes beyond the roots, over all trees of the frame.
    prefixes: one per prompt chunk of a sequence that does not decode.
    verified_part: number of the newest part that the verification used; 0 if the frame travelled whole, or if
        its first part sufficed. `seconds` are those of the parts up to this one. See
        `specsot.core.tree_parts`.
    """

    epoch: int
    number: int
    outcomes: tuple[Outcome, ...] = ()
    seconds: tuple[float, ...] = ()
    rows: int = 0
    drafts: int = 0
    drafted: int = 0
    prefixes: tuple[PrefixProgress, ...] = ()
    verified_part: int = 0

    @property
    def passes(self) -> int:
        """Number of forward passes that the frame took, see `Frame.extra_passes`."""
        return 1 + max([outcome.extra_passes for outcome in self.outcomes], default=0)


@value
class FeatureBatch:
    """Committed tokens of one sequence, whose features, if there are any, travel in `Features.rows`.

    sequence: id of the sequence.
    start: position of the first of the tokens.
    tokens: token ids at the positions start, start + 1, ....
    bonus: the token after `tokens`, which is not fed yet. None if more of the prompt follows, or if the
        sequence has ended or never decodes.
    draft_round: the draft round for which a tree is requested (1 after the prompt), or None if no tree is
        requested.
    forced: the tokens after `bonus` that the constraint determines alone.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    bonus: int | None
    draft_round: int | None
    forced: tuple[int, ...] = ()


@value
class Features:
    """What the last stage sends to a drafter: a frame's operations, and the features of committed tokens.

    After a pause of drafting, the batches cover all frames since the last one that the drafter was sent.

    epoch: epoch of the newest frame.
    number: number of the newest frame.
    openings: sequences that the drafter must open first.
    feature_batches: one batch of committed tokens per sequence.
    closings: ids of sequences that the drafter must close last.
    rows: [num_tokens, head_hidden_size] features of the tokens of all batches, one batch after the other:
        batches with 2 and 3 tokens are the rows [0 1 | 2 3 4]. None if the drafter reads no features, or if
        those of these tokens were overwritten or lost: then the drafter skips the tokens.
    fed: number of tokens in the newest frame, by which the drafter corrects its curve of step times. If
        several drafters share a ring, only the tokens of this drafter's trees count, unless the frame also
        carries prompt chunks.
    seconds: compute time of all stages for the newest frame.
    wall: wall-clock seconds of such a step, transfers and waiting included. 0 if unknown.
    paused_trees: number of trees verified since the preceding message while drafting was paused or resuming.
        The drafter learns only the tokens of these trees. If there are any, `fed`, `seconds` and `wall` are
        those of a typical step of the pause, not those of the newest frame.
    trace: the trace context of the newest frame's step, for spans. None if the step is not traced.
    must_answer: True if the drafter must answer every request with a tree, if only with its root, and must
        not pause, because other drafters draft for other sequences of the ring and a pause would stop all.
    """

    epoch: int
    number: int
    openings: tuple[Opening, ...] = ()
    feature_batches: tuple[FeatureBatch, ...] = ()
    closings: tuple[int, ...] = ()
    rows: Payload | None = None
    fed: int = 0
    seconds: float = 0.0
    wall: float = 0.0
    paused_trees: int = 0
    trace: str | None = None
    must_answer: bool = False


@value
class Draft:
    """A tree that the drafter proposes for one draft round of a sequence.

    sequence: id of the sequence.
    draft_round: number of the draft round.
    tree: the root, which is the bonus token of draft round `draft_round` - 1, and the drafted nodes.
    parent: the unverified node that the tree grows from. None: the verified root.
    """

    sequence: int
    draft_round: int
    tree: Tree
    parent: ParentNode | None = None


@value
class Drafts:
    """A drafter's message to stage 0.

    epoch: epoch of the drafts.
    drafts: one tree per sequence.
    paused_trees: length of a pause of drafting: the number of trees, over all sequences, for which the
        drafter will propose nothing because drafting is not profitable now. 0 if drafting continues.
    drafter: name of the drafter that sends the message. Empty if unknown.
    """

    epoch: int
    drafts: tuple[Draft, ...] = ()
    paused_trees: int = 0
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class Open:
    """The master's order to stage 0 to open a sequence: its opening, its prompt and its lease.

    opening: the description that every stage gets.
    tokens: the prompt's token ids, without the forked ones.
    lease: while the sequence decodes, it gets a next tree only if fewer positions than this are committed.
        The newest token is not committed yet, so the sequence may have up to `lease` tokens when it gets a
        tree. Of a prefix, which does not decode, only so many tokens are fed.
    """

    opening: Opening
    tokens: tuple[int, ...]
    lease: int


@dataclass(frozen=True, slots=True)
class Close:
    """The master's order to stage 0 to end a sequence, whatever the sequence is doing.

    sequence: id of the sequence.
    kept: True if the sequence belongs to the previous epoch and its rows were held for reuse. No sequence
        will reuse these rows, so the stages may free them.
    """

    sequence: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    """The master's order to stage 0 to let a sequence be fed up to `position`.

    sequence: id of the sequence.
    position: the new end of the lease. For a sequence that decodes, a position before the present end changes
        nothing. A prefix is fed no further than this, so an earlier position interrupts its prefill, and a
        later one resumes it; its KV stays as it is.
    """

    sequence: int
    position: int


Order = Open | Close | Lease
