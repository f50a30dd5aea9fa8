"""Messages of the ring: frames, results, features, drafts, and the orders that start them.

Numbering. A sequence's tokens have positions 0, 1, ...; `committed` = n means rows 0..n-1 of its KV
are final, and the next token to be fed (the tree's root) sits at position n.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from specsot.core.skeleton import PlanRules
from specsot.core.tree import Tree
from specsot.params import DrafterName, Form, HeadImportance, HeadWindows, Pruning, Sampling, Window
from specsot.values import value

Payload = Any  # a torch tensor in-process; raw bytes with dtype and shape on the wire


class End(enum.Enum):
    """Why a sequence ended, as far as tokens can tell."""

    STOP = "stop"  # an end-of-sequence or stop id
    LENGTH = "length"  # its token limit
    GRAMMAR = "grammar"  # the constraint's end
    CANCELLED = "cancelled"  # the master closed it
    FAILED = "failed"  # it alone is broken (logits not finite, say)


@dataclass(frozen=True, slots=True)
class Fork:
    """Start as the first `length` tokens of `sequence`, which is committed that far and still open."""

    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Kept:
    """KV rows that every stage has of `sequence`, of an epoch before: of these tokens, behind a fork's."""

    sequence: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Opening:
    """A sequence as every stage must know it. Ids are never reused within a fleet's life.

    prompt:    length of the whole prompt in tokens, the forked part included.
    generated: how many of the prompt's last tokens this sequence itself wrote before a repair.
    decodes:   False for a prefix: it is prefilled, kept, forked, and never writes.
    drafted:   False when no drafter shall propose for it.
    drafter:   who shall, of those the drafter has; None: its first.
    trace:     the context of its request, for spans; None: nobody collects them.
    family:    sequences of one family ride in the same frames; None: those that fork the same are one.
    limit:     how many tokens it may write in all, `generated` ones included.
    plan:      the constraint's specification, or None for free text.
    form:      the same where it is the caller's; never both.
    window:    what its tokens attend to, for a fork as for its source; None: all before them.
    pruning:   how its keys are pruned.
    heads:     what every head attends to. With one of these two it has no window, and no fork.
    importance: of the model's KV heads, by which each keeps its own share of the rows that are pruned; None:
               all keep as many. It is set only with `pruning`.
    min_tokens: none of `stop_ids` may be written before so many tokens.
    prompt_logprobs: the same as `logprobs` of the prompt's tokens but the first; then there is no fork.
    logprobs:  tell how likely each written token was, and the so many likeliest; None: do not.
    kept:      rows that are not computed again, though its epoch is another one.
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
    kept: Kept | None = None

    @property
    def forked(self) -> int:
        """Rows that it shares with its source."""
        return self.fork.length if self.fork else 0

    @property
    def begun(self) -> int:
        """The same with those that were kept: all that it has when it begins."""
        return self.forked + (len(self.kept.tokens) if self.kept else 0)


@value
class PromptChunk:
    """Prompt tokens of one sequence, to be fed at positions start, start + 1, ...; committed at once.

    final: the last of the prompt; a decoding sequence gets its first token from it.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    final: bool


@value
class TreeSegment:
    """The n-th tree of one sequence, to be fed at rows committed .. committed + len(tree) - 1.

    keep: accepted node numbers of the tree before (root first), whose rows move down to end at
          `committed`; empty for the first tree, and where nothing was accepted.
    """

    sequence: int
    step: int
    committed: int
    keep: tuple[int, ...]
    tree: Tree

    @property
    def once_more(self) -> bool:
        """Drafts of the tree before may have spoilt its root: no row behind `committed` may be read."""
        return self.step > 1 and not self.keep


Segment = PromptChunk | TreeSegment


def rows_of(segment: Segment) -> int:
    return len(segment.tokens if isinstance(segment, PromptChunk) else segment.tree.tokens)


def tokens_of(segment: Segment) -> tuple[int, ...]:
    return segment.tokens if isinstance(segment, PromptChunk) else segment.tree.tokens


@value
class Frame:
    """One lap's work. Every stage applies, in this order: openings, keeps and new rows, closings.

    hidden: [rows, H] residual stream before this stage's first layer; None before stage 0.
    fused:  [rows, Hd] running sum of the head's fc over the taps passed so far, or None.
    seconds: compute time of the stages passed so far.
    resting: the drafter rests; what it must know of this frame is kept for a later one.
    waking: its rest is over: it is told what it missed, and asked for no trees until it has caught up.
    trace:  the context of this lap, for spans; None: it is not traced.
    """

    epoch: int
    number: int
    openings: tuple[Opening, ...] = ()
    segments: tuple[Segment, ...] = ()
    closings: tuple[int, ...] = ()
    hidden: Payload | None = None
    fused: Payload | None = None
    seconds: tuple[float, ...] = ()
    resting: bool = False
    trace: str | None = None
    waking: bool = False


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found one written token: natural log-softmax of its own logits.

    top: the likeliest tokens in its place with theirs, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@value
class Outcome:
    """What one segment led to.

    step:     the tree's step, 0 for a final prompt chunk.
    accepted: accepted node numbers, root first; empty for a prompt chunk, and where the root's logits are
              not numbers: it is fed once more, without drafts.
    tokens:   tokens newly written: those of the accepted nodes but the root, then the bonus token;
              cut behind the first token that ends the sequence. None where nothing was accepted.
    end:      why the sequence is over, or None.
    chances:  one for each of `tokens`, or none where nobody asked.
    forced:   tokens the constraint leaves no choice about, behind `tokens`; of drafted sequences alone.
    rested:   nothing was drafted for it, because the drafter had found that it does not pay.
    prompt_chances: one for each token of the prompt but the first, where they are asked for; of step 0.
    """

    sequence: int
    step: int
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    end: End | None = None
    chances: tuple[Logprob, ...] = ()
    forced: tuple[int, ...] = ()
    rested: bool = False
    prompt_chances: tuple[Logprob, ...] = ()


@value
class Result:
    """What the last stage tells master and stage 0 about one frame; it also returns the credit.

    seconds: compute time of each stage for this frame, in stage order.
    rows:    rows of the frame.
    drafts:  trees in it with more than a root; `drafted`: their nodes beyond the roots.
    """

    epoch: int
    number: int
    outcomes: tuple[Outcome, ...] = ()
    seconds: tuple[float, ...] = ()
    rows: int = 0
    drafts: int = 0
    drafted: int = 0


@value
class FeatureBatch:
    """Committed tokens of one sequence with their features, for the drafter.

    tokens sit at positions start, start + 1, ...; `bonus` is the token behind them, not yet fed, or
    None when more prompt follows or the sequence is over or never decodes.
    step: the tree that is wanted next (1 after the prompt), or None when none is.
    forced: tokens the constraint leaves no choice about, behind `bonus`.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    bonus: int | None
    step: int | None
    forced: tuple[int, ...] = ()


@value
class Features:
    """What the last stage tells the drafter: a frame's operations, and true features of what it committed;
    after a rest, those of all frames since the last that was told.

    rows: [sum of tokens over lessons, Hd], the lessons' rows one after the other.
    fed, seconds: rows of the newest frame and the compute time of all stages for them, which keeps
                  the tuner's curve honest.
    wall:   seconds that such a lap takes by the clock, with all that lies between; 0 when not known.
    rested: trees judged since the features before, about which nothing but their tokens is told.
    trace:  the context of the newest frame's lap, for spans; None: it is not traced.
    must_answer: the drafter answers every request with a tree, if only with its root, and does not pause:
            other drafters draft for other sequences of the ring, which a pause would stop.
    """

    epoch: int
    number: int
    openings: tuple[Opening, ...] = ()
    lessons: tuple[FeatureBatch, ...] = ()
    closings: tuple[int, ...] = ()
    rows: Payload | None = None
    fed: int = 0
    seconds: float = 0.0
    wall: float = 0.0
    rested: int = 0
    trace: str | None = None
    must_answer: bool = False


@value
class Draft:
    """A tree for one (sequence, step); its root is the bonus token of step - 1."""

    sequence: int
    step: int
    tree: Tree


@value
class Drafts:
    """What a drafter tells stage 0.

    rest: for how many trees, of any sequences, nothing will be drafted, because it does not pay now.
    drafter: name of the drafter that sends these. Empty: unknown.
    """

    epoch: int
    drafts: tuple[Draft, ...] = ()
    rest: int = 0
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class Open:
    """Order to stage 0: this sequence, these prompt tokens (the forked part left out).

    lease: the sequence may be fed up to this position.
    """

    opening: Opening
    tokens: tuple[int, ...]
    lease: int


@dataclass(frozen=True, slots=True)
class Close:
    """Order to stage 0: end this sequence, whatever it is doing.

    kept: it is of an epoch before, of which rows were kept: nobody will begin with them.
    """

    sequence: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    """Order to stage 0: this sequence may now be fed up to `position`."""

    sequence: int
    position: int


Order = Open | Close | Lease
