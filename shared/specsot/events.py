"""Events that a client receives of a request, in order; the same for gRPC, the Python API and the
terminal.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from specsot.core.skeleton import Point


class Reason(enum.Enum):
    """Why a branch or a request finished."""

    # The model generated an end token, or a stop string was reached.
    STOP = "stop"
    # A token limit was reached.
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    # A branch on which this branch depends did not finish successfully.
    PARENT_FAILED = "parent_failed"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted seconds from a request's arrival to its end, for a direct and for a planned answer.

    A value is None while too little was measured to predict it. Eight of ten answers ended between the
    bounds.

    direct: predicted seconds of a direct answer.
    planned: predicted seconds of a planned answer.
    direct_min: lower bound of the seconds of a direct answer.
    direct_max: upper bound of the seconds of a direct answer.
    planned_min: lower bound of the seconds of a planned answer.
    planned_max: upper bound of the seconds of a planned answer.
    """

    direct: float | None = None
    planned: float | None = None
    direct_min: float | None = None
    direct_max: float | None = None
    planned_min: float | None = None
    planned_max: float | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a request: the request was admitted.

    request: id of the request.
    model: name of the model that answers.
    mode: the mode that was requested.
    seed: the seed that was requested, or the one that the master drew.
    prompt_tokens: tokens of the prompt.
    forecast: predicted seconds of a direct and of a planned answer, or None.
    """

    request: str
    model: str
    mode: str
    seed: int
    prompt_tokens: int
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that the model might have generated.

    token: token id.
    raw: the token's bytes, perhaps a part of a character. Empty for tokens without text.
    logprob: natural log-softmax of the model's own logits, before constraint, penalties, temperature.
    """

    token: int
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token and of the likeliest ones.

    chosen: the token that was generated.
    top: the likeliest tokens at the position, likeliest first.
    """

    chosen: Candidate
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """An event with log-probabilities of the next tokens of the prompt, sent before any text, if the request
    asks for them.

    position: position of the first of these tokens in the prompt, counted from 0. The prompt's very first
        token has no log-probability.
    logprobs: one entry per token. `chosen` of each entry is the prompt's own token.
    """

    position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class SkeletonText:
    """An event with the next piece of the skeleton's raw text as it is generated, markers included.

    If the master writes the markers around the titles of a list, all of the text is sent at once, without
    `logprobs`, before the plan.

    text: the next piece of the skeleton.
    logprobs: log-probabilities of the tokens of this piece. As in the other events, empty if the request does
        not ask for log-probabilities.
    """

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    """The event that the plan is complete.

    points: the points of the plan. Empty if the model chose to answer directly.
    forecast: a new forecast, or None.
    """

    points: tuple[Point, ...]
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True)
class BranchStarted:
    """The event that a branch was opened: the order that opens it is queued for stage 0. Its prompt has not
    been computed yet.

    branch: id of the branch's point.
    title: title of the point.
    budget: the branch's limit, in tokens.
    """

    branch: int
    title: str
    budget: int


@dataclass(frozen=True, slots=True)
class BranchText:
    """An event with the next piece of a branch's text.

    branch: id of the branch's point.
    offset: place of the text in the branch's body, in characters.
    text: the next piece of text.
    step_tokens: number of tokens that the branch got from this step.
    logprobs: log-probabilities of the tokens of this text. A token whose text is held back comes with a later
        event.
    """

    branch: int
    offset: int
    text: str
    step_tokens: int = 1
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchFinished:
    """The event that a branch has finished.

    branch: id of the branch's point.
    reason: why the branch finished.
    tokens: number of tokens that the branch generated.
    """

    branch: int
    reason: Reason
    tokens: int


@dataclass(frozen=True, slots=True)
class MergedText:
    """An event with the next piece of the merged answer.

    offset: place of the piece in the merged answer, in characters.
    text: the piece.
    logprobs: log-probabilities of the piece's tokens. Over all pieces, those of `Finished.tokens`.
    step_tokens: number of tokens that a direct answer got from this step. 0 if branches make up the answer.
    """

    offset: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    step_tokens: int = 0


# The reason in `Statistics.decision` if a plan was tried and had fewer than two points.
NO_PLAN = "the plan had no two points to write"


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of one finished request. Seconds are wall-clock time in the master.

    mode: the mode in which the request was answered.
    prompt_tokens: tokens of the messages rendered through the chat template, as for a direct answer. The
        instructions to plan and to write a point are not counted.
    completion_tokens: all tokens that max_new_tokens bounds: plan_tokens, merged_tokens, heading_tokens,
        polish_tokens, and tokens without visible text, such as end tokens and white space around a branch.
    merged_tokens: tokens of the answer's own text.
    seconds: from the request's arrival to its end.
    seconds_to_first_token: from the request's arrival to its first token; the router's tokens do not count.
    tokens_per_second: merged_tokens / seconds.
    steps: number of steps (forward passes of the ring) of the request.
    mean_accepted: tokens per verified tree, the bonus token included (tau). 1.0 without speculation.
    branches: number of branches.
    cached_tokens: tokens of the prompt that were not computed, because the ring had their KV already.
    plan_tokens: tokens of the plan, or of the markers around a direct answer.
    heading_tokens: tokens of the answer's headings, which the model does not generate.
    polish_tokens: tokens of the turn that joined the branches. Its text is then the answer.
    paused_share: fraction of the trees for which nothing was drafted, because drafting was paused as
    unprofitable.
    phases: seconds by phase: queue, decision, and skeleton, branches, polish, or direct. A name with
        `_prefill`, such as `skeleton_prefill`, has the seconds from the beginning of that phase to its first
        result.
    decision: how the request was answered, and why: "direct: arithmetic".
    in_time: True if `finish_within_s` ended a text. The text is complete, but might have continued.
    discarded_tokens: tokens that the model wrote in addition to completion_tokens, and that the answer does
        not use: those of a direct answer that a plan replaced, of a plan that was not used, or of the
        beginning of a branch that was opened again. Their number depends on the drafter.
    """

    mode: str = "direct"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    merged_tokens: int = 0
    seconds: float = 0.0
    seconds_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    steps: int = 0
    mean_accepted: float = 1.0
    branches: int = 0
    cached_tokens: int = 0
    plan_tokens: int = 0
    heading_tokens: int = 0
    polish_tokens: int = 0
    paused_share: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    decision: str = ""
    in_time: bool = False
    discarded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request.

    reason: why the request finished.
    text: the merged answer.
    tokens: token ids of the merged answer, in order.
    statistics: figures of the request.
    stop_string: the requested stop string that ended a direct or a polished answer, or None.
    stop_token: the requested stop token that ended a direct or a polished answer, or None.
    """

    reason: Reason
    text: str
    tokens: tuple[int, ...]
    statistics: Statistics
    stop_string: str | None = None
    stop_token: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """vLLM's `stop_reason`: the stop string or stop token that ended the answer.

        None if the model's own end token or a limit ended it.
        """
        return self.stop_token if self.stop_string is None else self.stop_string


Event = (
    Started
    | PromptScored
    | SkeletonText
    | Planned
    | BranchStarted
    | BranchText
    | BranchFinished
    | MergedText
    | Finished
)


@dataclass(frozen=True, slots=True)
class Numbered:
    """An event of a request's stream, with its number.

    number: number of the event in the stream: 0, 1, 2, ....
    event: the event.
    """

    number: int
    event: Event
