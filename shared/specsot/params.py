"""Request parameters and answer forms as frozen values that refuse invalid numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, cast

from specsot.errors import ContextLengthExceeded, InvalidRequest

Mode = Literal["auto", "sot", "direct"]
PlanStyle = Literal["auto", "list", "markers", "tags"]
DrafterName = Literal["eagle", "model", "suffix", "ngram", "none"]

MODES: tuple[Mode, ...] = ("auto", "sot", "direct")
DRAFTERS: tuple[DrafterName, ...] = ("eagle", "model", "suffix", "ngram", "none")
MODELLESS: tuple[DrafterName, ...] = ("suffix", "ngram", "none")  # those that need no model of their own
MAX_BIASES = 1024  # biases of a request: they travel with every sequence that it opens
MAX_LOGPROBS = 20  # alternatives per token, as in OpenAI's API
MAX_TOKENS = 1 << 20  # tokens of a prompt, whatever the model; bounds a message
MAX_TOKEN_ID = 2**31 - 1  # whatever the model
MAX_MESSAGES = 4096  # messages of a conversation; bounds a request
MAX_SEED = 2**63 - 1
# stop strings and tools of a request; bounds a request
MAX_STOPS = 16
MAX_TOOLS = 64
MAX_STOP_IDS = 128  # stop tokens of a request: they travel with every sequence that it opens
LONGEST_TOKEN = 256  # characters; no tokenizer squeezes more text into one token
MOST_PRIORITY = 10  # from -10 to 10
MOST_SHOWN = 100  # characters of a wrong value that an error repeats
MAX_SINKS = 1024  # rows; bounds a request
LEAST_RECENT = 16  # rows of a window; fewer than a tree is deep would make little sense
LEAST_EVERY = 16  # tokens between two prunings; trees and prompt chunks end there
MOST_SKIPPED = 1024  # layers; more than any model has


def require_field(holds: bool, name: str, rule: str, value: object) -> None:
    """Raises InvalidRequest, which names the field, the rule and the value."""
    if not holds:
        raise InvalidRequest(f"{name} must be {rule}, got {brief(value)}", field=name)


def brief(value: object) -> str:
    """A stranger's value as a message may repeat it."""
    shown = repr(value)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def _require_number(holds: Callable[[float], bool], name: str, rule: str, value: object) -> None:
    """Words in a number's place are refused like numbers that do not hold; so is NaN."""
    require_field(isinstance(value, int | float) and holds(value), name, rule, value)


def _require_within(low: float, high: float, name: str, value: object) -> None:
    _require_number(lambda number: low <= number <= high, name, f"in [{low:g}, {high:g}]", value)


def _is_whole(low: float, high: float, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _require_whole(low: int, high: int, name: str, value: object) -> None:
    require_field(_is_whole(low, high, value), name, f"whole, in [{low}, {high}]", value)


def _require_ids(tokens: tuple[int, ...]) -> None:
    """Every loop over them is one of C: there may be a million, and everybody waits meanwhile."""
    kinds = set(map(type, tokens))
    require_field(kinds <= {int}, "tokens", "whole numbers", sorted(kind.__name__ for kind in kinds))
    for token in (min(tokens), max(tokens)):
        _require_whole(0, MAX_TOKEN_ID, "tokens", token)


def check_length(positions: int, tokens: int = 0, characters: int = 0, completion: int = 0) -> None:
    """Whether a prompt can fit a context of so many positions, by its length alone: before anything of it is
    looked at, and before it is copied.

    completion: tokens wanted behind it, for the refusal's words. Raises ContextLengthExceeded.
    """
    if tokens >= positions:
        raise ContextLengthExceeded.of(positions, tokens, completion)
    if characters > LONGEST_TOKEN * positions:
        raise ContextLengthExceeded.of_text(positions, characters)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a target token is drawn from logits.

    temperature 0 means argmax. top_k 0, top_p 1 and min_p 0 mean no cut; min_p is a share of the
    likeliest token's probability. top_p 0 leaves the likeliest token alone, so it becomes temperature 0.
    repetition_penalty: 1 means none; divides the logits of tokens in the sequence, prompt included.
    presence_penalty, frequency_penalty: taken off the logit of what the sequence has written itself,
                once, and once for each time.
    logit_bias: (token id, what its logit gains), by ascending id.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _require_number(lambda t: 0 <= t < math.inf, "temperature", "a number >= 0", self.temperature)
        _require_within(0, 1, "top_p", self.top_p)
        _require_whole(0, 2**31 - 1, "top_k", self.top_k)
        _require_within(0, 1, "min_p", self.min_p)
        _require_within(0.01, 100, "repetition_penalty", self.repetition_penalty)
        _require_within(-2, 2, "presence_penalty", self.presence_penalty)
        _require_within(-2, 2, "frequency_penalty", self.frequency_penalty)
        _require_bias(self.logit_bias)
        if self.top_p == 0:
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)

    @property
    def penalises(self) -> bool:
        """A token's chance depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _require_bias(bias: tuple[tuple[int, float], ...]) -> None:
    require_field(len(bias) <= MAX_BIASES, "logit_bias", f"of at most {MAX_BIASES} tokens", len(bias))
    before = -1
    for token, gain in bias:
        _require_whole(0, 2**31 - 1, "logit_bias", token)
        require_field(token > before, "logit_bias", "by ascending token id, each once", token)
        _require_within(-100, 100, "logit_bias", gain)
        before = token


def _require_text(field: str, *texts: str) -> None:
    """Half of a surrogate pair is none; bytes of a command line that are not UTF-8 come as such halves."""
    try:
        "".join(texts).encode()
    except (TypeError, UnicodeEncodeError):
        raise InvalidRequest(f"{field} must be Unicode text, encoded as UTF-8", field) from None


MAX_NEW_TOKENS = 1024  # where nobody says how many


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be written. Counts are tokens; `max_parallel` counts live branches.

    max_new_tokens: everything that is written for a request: a plan, which takes at most half of it and at
    most `max_skeleton_tokens`, the headings and all branches, each at most `max_branch_tokens`; or a direct
    answer. None, for which many clients send -1: `default_new_tokens`, or as many as the model's context and
    the ring's KV pages hold after the prompt.
    default_new_tokens: what an endpoint grants a request that names no limit.
    """

    max_new_tokens: int | None = None
    max_branch_tokens: int | None = None
    max_skeleton_tokens: int = 512
    max_parallel: int = 8
    default_new_tokens: int = MAX_NEW_TOKENS

    def __post_init__(self) -> None:
        if self.max_new_tokens == -1:
            object.__setattr__(self, "max_new_tokens", None)
        for each in fields(self):
            count = getattr(self, each.name)
            holds = (count is None and each.default is None) or _is_whole(1, math.inf, count)
            require_field(holds, each.name, "whole, > 0", count)

    @property
    def new_tokens(self) -> int:
        return self.default_new_tokens if self.max_new_tokens is None else self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Window:
    """What of its text a token attends to: the first `sinks` tokens, and `recent` ones before its own.

    As in StreamingLLM (arXiv:2309.17453) it meets the sinks as if nothing else were kept: from position
    sinks + recent, where its own is beyond that. sinks 0: recent tokens alone.
    """

    sinks: int = 4
    recent: int = 508

    def __post_init__(self) -> None:
        _require_whole(0, MAX_SINKS, "sinks", self.sinks)
        _require_whole(LEAST_RECENT, MAX_TOKENS, "recent", self.recent)


@dataclass(frozen=True, slots=True)
class Pruning:
    """What of its text a token attends to where keys are pruned by their norm (arXiv:2406.11430).

    Each time a multiple of `prune_every` tokens is committed, every KV head keeps the share `keep_ratio` of
    its rows, rounded up: those whose keys have the least L2 norm. The model's first `skip_layers` keep all.
    """

    keep_ratio: float = 0.8
    prune_every: int = 50
    skip_layers: int = 2

    def __post_init__(self) -> None:
        _require_number(lambda ratio: 0 < ratio <= 1, "keep_ratio", "in (0, 1]", self.keep_ratio)
        _require_whole(LEAST_EVERY, MAX_TOKENS, "prune_every", self.prune_every)
        _require_whole(0, MOST_SKIPPED, "skip_layers", self.skip_layers)

    def kept(self, rows: int) -> int:
        """How many of so many rows a pruning leaves."""
        return math.ceil(self.keep_ratio * rows)

    @property
    def most(self) -> int | None:
        """Rows that a pruning leaves at most; None: there is no such number for all layers.

        m rows left become ceil(ratio (m + every)) < ratio (m + every) + 1 at the next pruning.
        """
        if self.skip_layers or self.keep_ratio == 1:
            return None
        return math.ceil((self.keep_ratio * self.prune_every + 1) / (1 - self.keep_ratio))

    def due(self, position: int) -> int:
        """The last position at which was pruned, or is to be, once so many tokens are committed."""
        return position - position % self.prune_every


@dataclass(frozen=True, slots=True)
class HeadImportance:
    """How important the rows that pruning may evict are to each KV head: layers[layer][head], in [0, 1]."""

    layers: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        widths = {len(heads) for heads in self.layers}
        require_field(
            len(widths) == 1 and 0 not in widths, "importance", "as many heads in every layer, some", widths
        )
        for importance in (one for heads in self.layers for one in heads):
            _require_number(lambda one: 0 <= one <= 1, "importance", "in [0, 1]", importance)


HeadCounts = tuple[tuple[int, ...], ...]  # [layers][KV heads]: a number of rows


@dataclass(frozen=True, slots=True)
class HeadPruning(Pruning):
    """Pruning by the norm of keys in which every KV head keeps a share of its own: a head of importance i
    keeps keep_ratio * (0.5 + 0.5 * i) of its rows, rounded up.

    importance: of the model's KV heads by layer, see `HeadImportance`.
    """

    importance: tuple[tuple[float, ...], ...] = ()

    def kept_by_head(self, kept: HeadCounts | None, fresh: int) -> HeadCounts:
        """How many rows every head keeps of the `kept` rows that the pruning before left it (None if there
        was none) and of `fresh` rows since.

        >>> HeadPruning(1.0, 16, 0, ((0.0, 1.0),)).kept_by_head(((8, 16),), 16)
        ((12, 32),)
        """
        before = kept or self.none_kept
        return tuple(
            tuple(
                math.ceil(self.keep_ratio * (0.5 + 0.5 * importance) * (rows + fresh))
                for importance, rows in zip(importances, counts)
            )
            for importances, counts in zip(self.importance, before)
        )

    @property
    def none_kept(self) -> HeadCounts:
        """What every head has kept before the first pruning: nothing."""
        return tuple((0,) * len(heads) for heads in self.importance)


@dataclass(frozen=True, slots=True)
class HeadWindows:
    """What of its text a token attends to head by head: (sinks, recent) of each layer's KV heads, true
    positions throughout."""

    layers: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        widths = {len(heads) for heads in self.layers}
        require_field(len(widths) == 1 and 0 not in widths, "heads", "as many in every layer, some", widths)
        for sinks, recent in (pair for heads in self.layers for pair in heads):
            _require_whole(0, MAX_SINKS, "sinks", sinks)
            _require_whole(0, MAX_TOKENS, "recent", recent)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. role: "system", "user", "assistant" or what the chat template knows."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, whole. Exactly one of `prompt`, `messages` and `tokens` is given.

    tokens: a prompt in the model's own token ids, taken as it is, to be gone on with; `mode` is "direct",
            or "auto", by which a model that forks by tags may do so.
    drafter: who proposes tokens; None: whom the fleet prefers.
    seed: None, for which many clients send a negative number: the master draws a seed and logs it.
    logprobs: tell how likely the model found every token, and the so many likeliest; None: do not.
    tools: names a plan line may carry as a label.
    ignore_eos: write on to the token limits, whatever end-of-sequence tokens come (for benchmarks).
    priority: whose turn comes first where requests wait; the higher one, in [-10, 10].
    resumable: it outlives its reader for a while, and may be read again from any event on.
    form: what the answer must look like; there is no plan then, so mode "auto" becomes "direct".
    window: what every token of it attends to; None: all before it. Behind one, answers may be longer than the
            model's context.
    pruning: how its keys are pruned; None: not at all.
    head_aware: every head attends to what was measured for the model's heads; with `pruning`, every head
            keeps a share of its rows by its measured importance (`HeadPruning`). A window excludes both; with
            either of them `mode` is "direct".
    finish_within_s: seconds from its arrival in which it ends, at the end of a sentence; not resumable then.
    polish: a last turn writes what the branches wrote anew, as one text; where there is a plan.
    min_tokens: no end token, no stop string before so many; branches have their shares, a plan has none.
    stop_token_ids: further end tokens of a direct answer or a branch, whatever `ignore_eos` says.
    include_stop_str_in_output: the stop string, or the text of the end token, is part of the answer.
    skip_special_tokens: they are left out of the text.
    prompt_logprobs: as `logprobs`, of the prompt's tokens.
            With this, min_tokens or stop_token_ids mode "auto" is "direct".
    """

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()
    model: str = ""
    mode: Mode = "auto"
    drafter: DrafterName | None = None
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    constraint: bool = True
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    priority: int = 0
    resumable: bool = False
    form: Form | None = None
    window: Window | None = None
    pruning: Pruning | None = None
    head_aware: bool = False
    finish_within_s: float | None = None
    polish: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        token_level = self.min_tokens or self.stop_token_ids or self.prompt_logprobs is not None
        if (self.form or token_level) and self.mode == "auto":
            object.__setattr__(self, "mode", "direct")
        if _is_whole(-math.inf, -1, self.seed):
            object.__setattr__(self, "seed", None)
        _require_whole(-MOST_PRIORITY, MOST_PRIORITY, "priority", self.priority)
        require_field(self.mode in MODES, "mode", f"one of {', '.join(MODES)}", self.mode)
        if self.finish_within_s is not None:
            _require_number(lambda s: 0 < s < math.inf, "finish_within_s", "> 0", self.finish_within_s)
            require_field(not self.resumable, "resumable", "false with finish_within_s", self.resumable)
        if self.polish and (self.form or self.mode == "direct"):
            why = f"{self.form.kind} holds one answer" if self.form else "mode direct writes one text"
            raise InvalidRequest(f"polish joins the branches of a plan; {why}", field="polish")
        known = self.drafter is None or self.drafter in DRAFTERS
        require_field(known, "drafter", f"one of {', '.join(DRAFTERS)}", self.drafter)
        said = (self.prompt if self.prompt is not None else "", *(one.content for one in self.messages))
        _require_text("prompt", *said)
        _require_text("stop", *self.stop)
        self._check_prompt()
        self._check_policy()
        if self.form and self.mode == "sot":
            raise refuse(f"{self.form.kind} holds one answer, not a plan; mode must be direct or auto")
        few = len(self.stop) <= MAX_STOPS
        require_field(few, "stop", f"at most {MAX_STOPS} stop strings", len(self.stop))
        if not all(self.stop):
            raise InvalidRequest("stop must not hold an empty string", "stop")
        self._check_tokens()
        require_field(len(self.tools) <= MAX_TOOLS, "tools", f"at most {MAX_TOOLS} tools", len(self.tools))
        for name in self.tools:
            fits = isinstance(cast(object, name), str) and name.isidentifier() and len(name) <= 32
            require_field(fits, "tools", "identifiers of at most 32 characters", name)

    def seeded(self, seed: int | None) -> Ask:
        """The same with another seed, in [0, 2**63); nothing of it is looked at again."""
        if seed == self.seed:
            return self
        copied = copy.copy(self)
        object.__setattr__(copied, "seed", seed)
        return copied

    @property
    def policy(self) -> Window | Pruning | None:
        """What bounds the rows it keeps."""
        return self.window or self.pruning

    def _check_tokens(self) -> None:
        tops = (("seed", MAX_SEED), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS))
        for name, top in tops:
            if (given := getattr(self, name)) is not None:
                _require_whole(0, top, name, given)
        require_field(
            self.prompt_logprobs is None or self.mode == "direct",
            *("mode", "direct with prompt_logprobs: a plan has several prompts", self.mode),
        )
        _require_whole(0, self.limits.new_tokens, "min_tokens", self.min_tokens)
        if self.min_tokens and self.form:
            raise InvalidRequest(f"min_tokens: {self.form.kind} says where the answer ends", "min_tokens")
        few = len(self.stop_token_ids) <= MAX_STOP_IDS
        require_field(few, "stop_token_ids", f"at most {MAX_STOP_IDS} tokens", len(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require_whole(0, MAX_TOKEN_ID, "stop_token_ids", token)

    def _check_policy(self) -> None:
        given = [name for name in ("window", "pruning", "head_aware") if getattr(self, name)]
        if len(given) > 1 and "window" in given:
            raise InvalidRequest(
                f"{' and '.join(given)} are given; only pruning and head_aware go together", given[-1]
            )
        if given and given != ["window"] and self.mode != "direct":
            raise InvalidRequest(
                f"{given[0]} needs mode direct, got {self.mode}: branches fork their prefix, and a sequence "
                "whose heads keep different rows cannot be forked",
                field="mode",
            )

    def _check_prompt(self) -> None:
        given = (self.prompt is not None) + bool(self.messages) + bool(self.tokens)
        if given != 1:
            raise InvalidRequest("exactly one of prompt, messages and tokens must be given", "prompt")
        if self.tokens:
            rule = "direct or auto where the prompt is given in tokens"
            require_field(self.mode != "sot", "mode", rule, self.mode)
            require_field(len(self.tokens) <= MAX_TOKENS, "tokens", f"at most {MAX_TOKENS}", len(self.tokens))
            _require_ids(self.tokens)
            return
        few = len(self.messages) <= MAX_MESSAGES
        require_field(few, "messages", f"at most {MAX_MESSAGES}", len(self.messages))
        said = self.prompt if self.prompt is not None else self.messages[-1].content
        if not said.strip():
            part = "the last message" if self.prompt is None else "prompt"
            raise InvalidRequest(f"{part} must not be empty", "prompt")


FormKind = Literal["json_object", "json_schema", "regex", "choice"]

FORM_KINDS: tuple[FormKind, ...] = ("json_object", "json_schema", "regex", "choice")
MAX_FORM_BYTES = 64 << 10  # bytes of all texts of a form: they travel with the answer's opening
MAX_CHOICES = 1024  # texts of a choice; bounds a request


def refuse(reason: str) -> InvalidRequest:
    """What is raised for a form that cannot be; `constraint` is the field of every such refusal."""
    return InvalidRequest(f"constraint: {reason}", field="constraint")


@dataclass(frozen=True, slots=True)
class Form:
    """A form of one kind.

    texts: the schema (JSON) or the regex (Rust's dialect, for the whole answer); every choice; nothing
           for json_object.
    """

    kind: FormKind
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in FORM_KINDS:
            raise refuse(f"must be one of {', '.join(FORM_KINDS)}, got {self.kind!r}")
        if not all(isinstance(cast(object, text), str) for text in self.texts):
            raise refuse(f"{self.kind} must be text")
        if not _counts(self.kind, len(self.texts)):
            raise refuse(f"{self.kind} cannot have {len(self.texts)} texts")
        if not all(self.texts):
            raise refuse(f"{self.kind} must not be empty")
        if (size := sum(map(_size, self.texts))) > MAX_FORM_BYTES:
            raise refuse(f"{self.kind} has {size} bytes, {MAX_FORM_BYTES} are allowed")


def _counts(kind: FormKind, texts: int) -> bool:
    """Whether a form of this kind may have so many texts."""
    if kind == "choice":
        return 0 < texts <= MAX_CHOICES
    return texts == (kind != "json_object")


def _size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise refuse("holds half a character, which is not Unicode text") from None
