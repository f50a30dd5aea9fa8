"""What a client sees of a request, in order; the same values behind gRPC, Python API and terminal."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from specsot.core.skeleton import Point


class Reason(enum.Enum):
    """Why a branch or a request finished."""

    STOP = "stop"  # the model said so, or a stop string came
    LENGTH = "length"  # a token limit
    CANCELLED = "cancelled"
    FAILED = "failed"
    PARENT_FAILED = "parent_failed"  # a branch it depends on did not finish well


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from the request's arrival to its end, by either way; None: not measured yet.

    direct_least, direct_most, planned_least, planned_most: eight of ten such answers ended between them;
    None while few are known.
    """

    direct: float | None = None
    planned: float | None = None
    direct_least: float | None = None
    direct_most: float | None = None
    planned_least: float | None = None
    planned_most: float | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """Admitted. `mode` is what was asked; `seed` what was asked or drawn; `forecast` is of both ways."""

    request: str
    model: str
    mode: str
    seed: int
    prompt_tokens: int
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token the model might have written.

    raw:     its bytes, perhaps a part of a character; none for tokens that are no text.
    logprob: natural log-softmax of the model's own logits, before constraint, penalties, temperature.
    """

    token: int
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token that was written, and the likeliest ones in its place, best first."""

    chosen: Candidate
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the next tokens of the prompt, sent before any text, if the request asks for them.

    position: of the first of these tokens in the prompt, counted from 0. The prompt's very first token has no
    log-probability. `chosen` of each entry is the prompt's own token.
    """

    position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class SkeletonText:
    """Raw text of the skeleton as it is written, markers included.

    logprobs: of the tokens that wrote it; here as below only where they were asked for.
    """

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan is complete. `points` is empty when the model chose to answer directly. `forecast`: anew."""

    points: tuple[Point, ...]
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True)
class BranchStarted:
    """A branch's prompt is in the ring. `branch` is its point's id; `budget` its token limit."""

    branch: int
    title: str
    budget: int


@dataclass(frozen=True, slots=True)
class BranchText:
    """Text of a branch, at `offset` characters into its body. `lap_tokens`: tokens this lap brought.

    logprobs: of the tokens of its text; a token whose text is held back comes later.
    """

    branch: int
    offset: int
    text: str
    lap_tokens: int = 1
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class BranchFinished:
    """A branch is done; `tokens` it wrote."""

    branch: int
    reason: Reason
    tokens: int


@dataclass(frozen=True, slots=True)
class MergedText:
    """The next stretch of the merged answer, at `offset` characters into it.

    logprobs: of the tokens of its text; over all stretches, of `Finished.tokens`.
    lap_tokens: tokens this lap brought to a direct answer; 0 where branches write it.
    """

    offset: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    lap_tokens: int = 0


NO_PLAN = "the plan had no two points to write"  # a decision's reason, where a plan was tried


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of one finished request. Seconds are wall time in the master.

    prompt_tokens: of the messages through the chat template, as a direct answer's prompt; what the model is
    told besides, to plan and to write a point, is not counted.
    cached_tokens: those of the prompt that were not computed again, because the ring had them already.
    completion_tokens: everything that max_new_tokens bounds: plan_tokens (of the plan, or of the markers
    around a direct answer), merged_tokens (of the answer's own text), heading_tokens (of its headings, which
    the model does not write), polish_tokens (of the turn that joined the branches, whose text is the answer
    then, in the place of theirs), and what no text shows: end tokens, white space around a branch.
    mean_accepted: tokens per tree verified, bonus included (tau); 1.0 is plain.
    rested: share of the trees for which nothing was drafted, as the drafter had found that it does not pay.
    phases: seconds of queue, decision, skeleton, branches, polish (or direct); skeleton_prefill: its prompt.
    decision: which way was taken, and why: "direct: arithmetic".
    in_time: `finish_within_s` ended a text, so what is there is whole, and might have gone on.
    """

    mode: str = "direct"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    merged_tokens: int = 0
    seconds: float = 0.0
    seconds_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    laps: int = 0
    mean_accepted: float = 1.0
    branches: int = 0
    cached_tokens: int = 0
    plan_tokens: int = 0
    heading_tokens: int = 0
    polish_tokens: int = 0
    rested: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    decision: str = ""
    in_time: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `text` is the merged answer, `tokens` its token ids in order.

    stop_string, stop_token: which of those that were asked for ended a direct answer, or a polished one.
    """

    reason: Reason
    text: str
    tokens: tuple[int, ...]
    statistics: Statistics
    stop_string: str | None = None
    stop_token: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """vLLM's: the stop string or stop token; None for the model's own end, and for a limit."""
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
    """An event with its number in the request's stream: 0, 1, 2, ..."""

    number: int
    event: Event
