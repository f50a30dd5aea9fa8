"""Request parameters and answer forms as frozen values that reject invalid fields."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Final, Literal, cast

from specsot.errors import ContextLengthExceeded, InvalidRequest

Mode = Literal["auto", "sot", "direct"]
PlanStyle = Literal["auto", "list", "markers", "tags"]
DrafterName = Literal["eagle", "mtp", "model", "suffix", "ngram", "none"]

# The modes of a request.
MODES: tuple[Mode, ...] = ("auto", "sot", "direct")
# The names of all drafters.
DRAFTERS: tuple[DrafterName, ...] = ("eagle", "mtp", "model", "suffix", "ngram", "none")
# Drafters that need no draft model.
MODELLESS: tuple[DrafterName, ...] = ("suffix", "ngram", "none")
# Entries. Bounds the logit biases of a request, which travel with every sequence that the request opens.
MAX_BIASES = 1024
# Tokens. Bounds the alternatives that are reported per token. Precedent: OpenAI's API, 20.
MAX_LOGPROBS = 20
# Tokens. Bounds a prompt of any model, and so the size of a message.
MAX_TOKENS = 1 << 20
# Token id. Bounds the ids of any model to int32.
MAX_TOKEN_ID = 2**31 - 1
# Messages. Bounds a conversation, and so the size of a request.
MAX_MESSAGES = 4096
# The largest seed, so that a seed fits into a signed 64-bit integer.
MAX_SEED = 2**63 - 1
# Strings. Bounds the stop strings of a request.
MAX_STOPS = 16
# Names. Bounds the tools of a request.
MAX_TOOLS = 64
# Tokens. Bounds the stop tokens of a request, which travel with every sequence that the request opens.
MAX_STOP_IDS = 128
# Characters. No tokenizer puts more text into one token, so a longer prompt has more tokens than the context.
MAX_TOKEN_CHARACTERS = 256
# Priorities are in -MAX_PRIORITY .. MAX_PRIORITY.
MAX_PRIORITY = 10
# Characters. Bounds how much of an invalid value an error message repeats.
MAX_SHOWN_CHARACTERS = 100
# Positions. Bounds the sinks of a window.
MAX_SINKS = 1024
# Positions. The smallest window: a window shorter than the depth of a draft tree would be of little use.
MIN_RECENT = 16
# Tokens. The smallest interval between two prunings, because draft trees and prompt chunks must end there.
MIN_PRUNE_EVERY = 16
# Layers. Bounds `Pruning.skip_layers`; no model has more layers.
MAX_SKIPPED_LAYERS = 1024


def require_field(is_valid: bool, name: str, rule: str, value: object) -> None:
    """Raise InvalidRequest unless `is_valid`. The error names the field, the rule and the value.

    is_valid: True if the value is allowed.
    name: name of the field.
    rule: what the value must be, such as "in [0, 1]", after "must be".
    value: the value that the client gave.
    """
    if not is_valid:
        raise InvalidRequest(f"{name} must be {rule}, got {brief(value)}", field=name)


def brief(value: object) -> str:
    """Return the `repr` of a value for an error message, cut to MAX_SHOWN_CHARACTERS characters if it is
    longer.

    value: what a client gave.

    "..." follows a text that was cut.
    """
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def _require_number(is_valid: Callable[[float], bool], name: str, rule: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is a number for which `is_valid` is true. NaN is never accepted.

    is_valid: returns whether a number is allowed.
    name: name of the field.
    rule: what the number must be, for the error message, after "must be".
    value: what the client gave, of any type.
    """
    require_field(isinstance(value, int | float) and is_valid(value), name, rule, value)


def _require_within(low: float, high: float, name: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is a number in [low, high].

    low, high: the bounds, which are allowed themselves.
    name: name of the field.
    value: what the client gave, of any type.
    """
    _require_number(lambda number: low <= number <= high, name, f"in [{low:g}, {high:g}]", value)


def _is_whole(low: float, high: float, value: object) -> bool:
    """Return whether a value is an integer in [low, high]; a bool is none.

    low, high: the bounds, which are allowed themselves and may be infinite.
    value: what the client gave, of any type.
    """
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _require_whole(low: int, high: int, name: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is an integer in [low, high].

    low, high: the bounds, which are allowed themselves.
    name: name of the field.
    value: what the client gave, of any type.
    """
    require_field(_is_whole(low, high, value), name, f"whole, in [{low}, {high}]", value)


def _require_ids(tokens: tuple[int, ...]) -> None:
    """Raise InvalidRequest unless all tokens are integers in [0, MAX_TOKEN_ID].

    A prompt may have a million tokens, and the check blocks the event loop, so every loop over them runs in
    C.

    tokens: token ids of a prompt; at least one.

    Bools are no integers here. Raises ValueError for an empty tuple.
    """
    types = set(map(type, tokens))
    require_field(types <= {int}, "tokens", "whole numbers", sorted(kind.__name__ for kind in types))
    for token in (min(tokens), max(tokens)):
        _require_whole(0, MAX_TOKEN_ID, "tokens", token)


def check_length(context_tokens: int, tokens: int = 0, characters: int = 0, completion: int = 0) -> None:
    """Raise ContextLengthExceeded if a prompt is longer than the context by its length alone.

    The check is cheap, so that it can run before the prompt is copied or tokenized.

    context_tokens: length of the model's context in tokens.
    tokens: length of the prompt in tokens, if the prompt is given as tokens.
    characters: length of the prompt in characters, if the prompt is given as text.
    completion: number of tokens that are requested after the prompt, for the error message.

    Otherwise returns None. A prompt of exactly `context_tokens` tokens is too long, because no token could
    follow. A text is too long only if it would be so with tokens of MAX_TOKEN_CHARACTERS characters each; the
    error is then of its characters. A length of 0 is not checked.
    """
    if tokens >= context_tokens:
        raise ContextLengthExceeded.of(context_tokens, tokens, completion)
    if characters > MAX_TOKEN_CHARACTERS * context_tokens:
        raise ContextLengthExceeded.of_text(context_tokens, characters)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request: how a target token is sampled from logits.

    temperature: divisor of the logits. 0 means argmax.
    top_p: only the likeliest tokens with this total probability are sampled. 1 means all. 0 leaves only the
        likeliest token, and is replaced by a temperature of 0.
    top_k: only so many likeliest tokens are sampled. 0 means all.
    min_p: tokens whose probability is below this fraction of the likeliest token's are not sampled. 0 means
        all are.
    repetition_penalty: penalty on the logits of all tokens of the sequence, the prompt included. 1 means
        none.
    presence_penalty: subtracted once from the logit of each token that the sequence has generated.
    frequency_penalty: subtracted from the logit of a token once for each time the sequence has generated it.
    logit_bias: (token id, value added to the token's logit), by ascending token id.

    Raises InvalidRequest if a value is out of its range.
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
        """Raise InvalidRequest, which names the field, if a value is out of its range: `temperature` is
        finite and at least 0, `top_p` and `min_p` are in [0, 1], `top_k` is an integer in [0, 2**31),
        `repetition_penalty` is in [0.01, 100], the other penalties are in [-2, 2], and the biases are as
        `_require_bias` says.

        A `top_p` of 0 is replaced by 1, with a `temperature` of 0.
        """
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
        """True if a penalty makes a token's probability depend on the preceding tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _require_bias(bias: tuple[tuple[int, float], ...]) -> None:
    """Raise InvalidRequest unless the biases are at most MAX_BIASES, by ascending token id, each in [-100,
    100]. Returns None if they are, also if there are none.

    bias: (token id, value added to the token's logit).

    Ids must be integers of at least 0, each at most once.
    """
    require_field(len(bias) <= MAX_BIASES, "logit_bias", f"of at most {MAX_BIASES} tokens", len(bias))
    previous_token = -1
    for token, added_logit in bias:
        _require_whole(0, 2**31 - 1, "logit_bias", token)
        require_field(token > previous_token, "logit_bias", "by ascending token id, each once", token)
        _require_within(-100, 100, "logit_bias", added_logit)
        previous_token = token


def _require_text(field: str, *texts: str) -> None:
    """Raise InvalidRequest unless the texts can be encoded as UTF-8.

    A lone surrogate cannot. Bytes on a command line that are not UTF-8 arrive as lone surrogates.

    field: name of the field, for the error message.
    texts: the texts of the field.

    Values that are no str raise InvalidRequest too. Returns None for valid texts, also if there are none.
    """
    try:
        "".join(texts).encode()
    except (TypeError, UnicodeEncodeError):
        raise InvalidRequest(f"{field} must be Unicode text, encoded as UTF-8", field) from None


# Tokens. How many a request may generate if neither the request nor its endpoint names a limit.
MAX_NEW_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Token limits of a request: how many tokens it may generate, and with how many branches at once.

    max_new_tokens: bounds all tokens that are generated for a request: those of a direct answer; or those of
        the plan, which takes at most half of them, of the headings and of all branches. None, for which many
        clients send -1, means `default_new_tokens`, or as many as the model's context and the ring's KV pages
        hold after the prompt.
    max_branch_tokens: bounds the tokens of each branch. None means that only `max_new_tokens` bounds them.
    max_skeleton_tokens: bounds the tokens of the plan.
    max_parallel: bounds the number of branches that decode at once.
    default_new_tokens: how many tokens an endpoint grants a request that names no limit.

    Raises InvalidRequest if a value is not a whole number > 0.
    """

    max_new_tokens: int | None = None
    max_branch_tokens: int | None = None
    max_skeleton_tokens: int = 512
    max_parallel: int = 8
    default_new_tokens: int = MAX_NEW_TOKENS

    def __post_init__(self) -> None:
        """Raise InvalidRequest, which names the field, unless every limit is a whole number > 0, or None
        where None is the default. A `max_new_tokens` of -1 is replaced by None.
        """
        if self.max_new_tokens == -1:
            object.__setattr__(self, "max_new_tokens", None)
        for each in fields(self):
            count = getattr(self, each.name)
            holds = (count is None and each.default is None) or _is_whole(1, math.inf, count)
            require_field(holds, each.name, "whole, > 0", count)

    @property
    def new_tokens(self) -> int:
        """The limit that applies: `max_new_tokens`, or `default_new_tokens` if the request names none."""
        return self.default_new_tokens if self.max_new_tokens is None else self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Window:
    """Attention to the first tokens of a sequence and to recent ones, as in StreamingLLM (arXiv:2309.17453).

    A token attends to the sinks as if the tokens between the sinks and the window did not exist: from
    position sinks + recent, if its own position is greater.

    sinks: number of first tokens that every token attends to. 0 means recent tokens alone.
    recent: number of tokens immediately before its own that a token attends to.

    Raises InvalidRequest if a value is out of its range.
    """

    sinks: int = 4
    recent: int = 508

    def __post_init__(self) -> None:
        """Raise InvalidRequest, which names the field, unless `sinks` is an integer in [0, MAX_SINKS] and
        `recent` an integer in [MIN_RECENT, MAX_TOKENS].
        """
        _require_whole(0, MAX_SINKS, "sinks", self.sinks)
        _require_whole(MIN_RECENT, MAX_TOKENS, "recent", self.recent)


@dataclass(frozen=True, slots=True)
class Pruning:
    """Pruning of the KV cache by the norm of keys (arXiv:2406.11430).

    Each time a multiple of `prune_every` tokens is committed, every KV head keeps the rows whose keys have
    the smallest L2 norm, and discards the others.

    keep_ratio: the fraction of its rows that a head keeps, rounded up.
    prune_every: number of tokens between two prunings.
    skip_layers: number of the model's first layers that keep all rows.

    Raises InvalidRequest if a value is out of its range.
    """

    keep_ratio: float = 0.8
    prune_every: int = 50
    skip_layers: int = 2

    def __post_init__(self) -> None:
        """Raise InvalidRequest, which names the field, unless `keep_ratio` is in (0, 1], `prune_every` is an
        integer in [MIN_PRUNE_EVERY, MAX_TOKENS], and `skip_layers` is an integer in [0, MAX_SKIPPED_LAYERS].
        """
        _require_number(lambda ratio: 0 < ratio <= 1, "keep_ratio", "in (0, 1]", self.keep_ratio)
        _require_whole(MIN_PRUNE_EVERY, MAX_TOKENS, "prune_every", self.prune_every)
        _require_whole(0, MAX_SKIPPED_LAYERS, "skip_layers", self.skip_layers)

    def num_kept_rows(self, rows: int) -> int:
        """Return how many of `rows` rows a pruning leaves to each head, rounded up.

        rows: number of rows among which a head chooses.
        """
        return math.ceil(self.keep_ratio * rows)

    @property
    def max_kept_rows(self) -> int | None:
        """Return the largest number of rows that a pruning leaves, however long the sequence is.

        None if there is no bound, because some layers are skipped or all rows are kept. If a pruning leaves m
        rows, the next one leaves ceil(ratio * (m + every)) < ratio * (m + every) + 1, which is at most m from
        m = (ratio * every + 1) / (1 - ratio) on.
        """
        if self.skip_layers or self.keep_ratio == 1:
            return None
        return math.ceil((self.keep_ratio * self.prune_every + 1) / (1 - self.keep_ratio))

    def due(self, position: int) -> int:
        """Return the position of the last pruning that is due once `position` tokens are committed; 0 if none
        is.

        With `prune_every` 50, the position is 100 for 100..149 committed tokens.

        position: number of committed tokens of the sequence.
        """
        return position - position % self.prune_every


@dataclass(frozen=True, slots=True)
class HeadImportance:
    """How important the rows that pruning may evict are to each KV head.

    layers: layers[layer][head] is the head's importance, in [0, 1].

    Raises InvalidRequest if layers have different numbers of heads, or if a value is out of its range.
    """

    layers: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Raise InvalidRequest if there are no layers or no heads, if layers have different numbers of heads,
        or if an importance is not in [0, 1].
        """
        widths = {len(heads) for heads in self.layers}
        require_field(
            len(widths) == 1 and 0 not in widths, "importance", "as many heads in every layer, some", widths
        )
        for importance in (one for heads in self.layers for one in heads):
            _require_number(lambda one: 0 <= one <= 1, "importance", "in [0, 1]", importance)


# [layers][KV heads]: numbers of rows.
HeadCounts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HeadPruning(Pruning):
    """Pruning by the norm of keys in which every KV head keeps a fraction of rows of its own.

    A head of importance i keeps the fraction keep_ratio * (0.5 + 0.5 * i) of its rows, rounded up.

    importance: importance[layer][head] of the model's KV heads, see `HeadImportance`.
    """

    importance: tuple[tuple[float, ...], ...] = ()

    def rows_kept_by_head(self, kept_before: HeadCounts | None, num_new_rows: int) -> HeadCounts:
        """Return how many rows every head keeps at a pruning.

        kept_before: by layer and head, how many rows the preceding pruning left. None if there was none.
        num_new_rows: number of rows since the preceding pruning.

        >>> HeadPruning(1.0, 16, 0, ((0.0, 1.0),)).rows_kept_by_head(((8, 16),), 16)
        ((12, 32),)
        """
        counts_before = kept_before or self.no_rows_kept
        return tuple(
            tuple(
                math.ceil(self.keep_ratio * (0.5 + 0.5 * importance) * (rows + num_new_rows))
                for importance, rows in zip(importances, counts)
            )
            for importances, counts in zip(self.importance, counts_before)
        )

    @property
    def no_rows_kept(self) -> HeadCounts:
        """The value of `kept_before` at the first pruning: 0 for every head."""
        return tuple((0,) * len(heads) for heads in self.importance)


@dataclass(frozen=True, slots=True)
class HeadWindows:
    """Attention to the first tokens and to recent ones, with a window of its own for each KV head.

    Unlike with `Window`, the sinks keep their true positions.

    layers: layers[layer][head] is (sinks, recent) of the head, in tokens.

    Raises InvalidRequest if layers have different numbers of heads, or if a value is out of its range.
    """

    layers: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        """Raise InvalidRequest if there are no layers or no heads, if layers have different numbers of heads,
        if the sinks of a head are no integer in [0, MAX_SINKS], or if its recent tokens are no integer in [0,
        MAX_TOKENS].
        """
        widths = {len(heads) for heads in self.layers}
        require_field(len(widths) == 1 and 0 not in widths, "heads", "as many in every layer, some", widths)
        for sinks, recent in (pair for heads in self.layers for pair in heads):
            _require_whole(0, MAX_SINKS, "sinks", sinks)
            _require_whole(0, MAX_TOKENS, "recent", recent)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    role: "system", "user", "assistant", or another role that the chat template knows.
    content: text of the turn.
    """

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One complete request. Exactly one of `prompt`, `messages` and `tokens` is given.

    prompt: the user's text.
    messages: a conversation, rendered through the model's chat template.
    tokens: a prompt in the model's token ids, which the answer continues. The mode must be "direct", or
        "auto", in which a model that forks by tags may do so.
    model: name of the model.
    mode: "direct" for one answer, "sot" for a plan, "auto" to let the router choose.
    drafter: which drafter proposes tokens. With None, the fleet's preferred drafter does.
    sampling: how tokens are sampled.
    limits: how many tokens may be generated.
    stop: strings that end a direct answer or a branch.
    tools: names that a line of the plan may carry as a label.
    constraint: True if the plan is constrained to its grammar.
    seed: seed of the random numbers. With None, for which many clients send a negative number, the master
        draws a seed and logs it.
    ignore_eos: True to decode up to the token limits in spite of end-of-sequence tokens, for benchmarks.
    logprobs: how many of the likeliest alternatives to report with the log-probability of each generated
        token. With None, nothing is reported.
    priority: requests of higher priority leave the queue first; in [-10, 10].
    resumable: True if the request outlives its client's connection for a while, and may be read again from
        any event on.
    form: the constraint on the answer, or None. As there is no plan with a form, mode "auto" becomes
        "direct".
    window: which positions a token attends to. With None, a token attends to all preceding ones. With a
        window, an answer may be longer than the model's context.
    pruning: how the KV cache is pruned. With None, it is not.
    head_aware: True if every head attends to the window that was measured for the model's head. With
        `pruning`, every head instead keeps a fraction of its rows by its measured importance (`HeadPruning`).
        `pruning` and `head_aware` exclude a window, and need mode "direct".
    finish_within_s: seconds after its arrival within which the request ends, at the end of a sentence. Such a
        request is not resumable.
    polish: True to let the model rewrite the branches of a plan as one text in a last turn.
    min_tokens: number of tokens before which neither an end token nor a stop string ends an answer. Branches
        get a share each; the plan has no minimum.
    stop_token_ids: additional end tokens of a direct answer or a branch, which apply even with `ignore_eos`.
    include_stop_str_in_output: True if the stop string, or the end token's text, is part of the answer.
    skip_special_tokens: True if special tokens are left out of the text.
    prompt_logprobs: the same as `logprobs`, for the tokens of the prompt.

    With `prompt_logprobs`, `min_tokens` or `stop_token_ids`, mode "auto" becomes "direct".

    Raises InvalidRequest if a value is out of its range or if fields exclude each other.
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
        """Raise InvalidRequest, which names the field, if a value is out of its range or if fields exclude
        each other.

        Two fields are replaced: mode "auto" becomes "direct" with `form`, `min_tokens`, `stop_token_ids` or
        `prompt_logprobs`, and a negative seed becomes None.

        What is rejected, in addition to values that their types exclude: `resumable` with `finish_within_s`;
        `polish` with `form` or mode "direct"; `form` with mode "sot"; an empty stop string; more than
        MAX_STOPS stop strings or MAX_TOOLS tools; a tool that is no identifier of at most 32 characters; and
        what `_check_prompt`, `_check_policy` and `_check_tokens` reject.
        """
        token_level = self.min_tokens or self.stop_token_ids or self.prompt_logprobs is not None
        if (self.form or token_level) and self.mode == "auto":
            object.__setattr__(self, "mode", "direct")
        if _is_whole(-math.inf, -1, self.seed):
            object.__setattr__(self, "seed", None)
        _require_whole(-MAX_PRIORITY, MAX_PRIORITY, "priority", self.priority)
        require_field(self.mode in MODES, "mode", f"one of {', '.join(MODES)}", self.mode)
        if self.finish_within_s is not None:
            _require_number(lambda s: 0 < s < math.inf, "finish_within_s", "> 0", self.finish_within_s)
            require_field(not self.resumable, "resumable", "false with finish_within_s", self.resumable)
        if self.polish and (self.form or self.mode == "direct"):
            why = f"{self.form.title} holds one answer" if self.form else "mode direct writes one text"
            raise InvalidRequest(f"polish joins the branches of a plan; {why}", field="polish")
        known_drafter = self.drafter is None or self.drafter in DRAFTERS
        require_field(known_drafter, "drafter", f"one of {', '.join(DRAFTERS)}", self.drafter)
        texts = (self.prompt if self.prompt is not None else "", *(one.content for one in self.messages))
        _require_text("prompt", *texts)
        _require_text("stop", *self.stop)
        self._check_prompt()
        self._check_policy()
        if self.form and self.mode == "sot":
            raise refuse(f"{self.form.title} holds one answer, not a plan; mode must be direct or auto")
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
        """Return the same request with another seed in [0, 2**63), without validating its fields again.

        seed: the seed to set, or None.

        Returns this request itself if it has the seed already. The seed is not checked.
        """
        if seed == self.seed:
            return self
        copied = copy.copy(self)
        object.__setattr__(copied, "seed", seed)
        return copied

    @property
    def policy(self) -> Window | Pruning | None:
        """The window or the pruning that bounds the KV rows of the request, or None."""
        return self.window or self.pruning

    def _check_tokens(self) -> None:
        """Raise InvalidRequest unless seed, log-probabilities, `min_tokens` and `stop_token_ids` are in their
        ranges.

        Seed, `logprobs` and `prompt_logprobs` may be None. `prompt_logprobs` needs mode "direct",
        `min_tokens` is at most the number of new tokens and excludes `form`, and there are at most
        MAX_STOP_IDS stop tokens.
        """
        bounds = (("seed", MAX_SEED), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS))
        for name, max_value in bounds:
            if (value := getattr(self, name)) is not None:
                _require_whole(0, max_value, name, value)
        require_field(
            self.prompt_logprobs is None or self.mode == "direct",
            *("mode", "direct with prompt_logprobs: a plan has several prompts", self.mode),
        )
        _require_whole(0, self.limits.new_tokens, "min_tokens", self.min_tokens)
        if self.min_tokens and self.form:
            raise InvalidRequest(f"min_tokens: {self.form.title} says where the answer ends", "min_tokens")
        few = len(self.stop_token_ids) <= MAX_STOP_IDS
        require_field(few, "stop_token_ids", f"at most {MAX_STOP_IDS} tokens", len(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require_whole(0, MAX_TOKEN_ID, "stop_token_ids", token)

    def _check_policy(self) -> None:
        """Raise InvalidRequest if window, pruning and head windows exclude each other, or if the request's
        mode excludes them.

        A window excludes both others; `pruning` and `head_aware` go together, and need mode "direct".
        """
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
        """Raise InvalidRequest unless exactly one of prompt, messages and tokens is given, and it is not
        empty or too long.

        A prompt in tokens excludes mode "sot" and has at most MAX_TOKENS tokens, all of which are valid ids.
        There are at most MAX_MESSAGES messages, and the last one must have more than spaces, as `prompt`
        must. An empty tuple of messages or tokens counts as not given; an empty `prompt` does not.
        """
        num_prompts = (self.prompt is not None) + bool(self.messages) + bool(self.tokens)
        if num_prompts != 1:
            raise InvalidRequest("exactly one of prompt, messages and tokens must be given", "prompt")
        if self.tokens:
            rule = "direct or auto where the prompt is given in tokens"
            require_field(self.mode != "sot", "mode", rule, self.mode)
            require_field(len(self.tokens) <= MAX_TOKENS, "tokens", f"at most {MAX_TOKENS}", len(self.tokens))
            _require_ids(self.tokens)
            return
        few_enough = len(self.messages) <= MAX_MESSAGES
        require_field(few_enough, "messages", f"at most {MAX_MESSAGES}", len(self.messages))
        text = self.prompt if self.prompt is not None else self.messages[-1].content
        if not text.strip():
            part = "the last message" if self.prompt is None else "prompt"
            raise InvalidRequest(f"{part} must not be empty", "prompt")


FormKind = Literal["json_object", "json_schema", "regex", "choice", "structural_tag"]

# The kinds of forms that clients may ask for.
FORM_KINDS: tuple[FormKind, ...] = ("json_object", "json_schema", "regex", "choice")
# The kind that only the master writes; see `specsot.grammar.structural_tag`.
STRUCTURAL_TAG: Final = "structural_tag"
# Bytes. Bounds all texts of a form together, because they travel with the opening of the answer's sequence.
MAX_FORM_BYTES = 64 << 10
# Texts. Bounds the texts of a choice.
MAX_CHOICES = 1024


def refuse(reason: str) -> InvalidRequest:
    """Return the error to raise for an invalid form. Its field is "constraint", whatever is wrong.

    reason: what is wrong, one line after "constraint: ".
    """
    return InvalidRequest(f"constraint: {reason}", field="constraint")


@dataclass(frozen=True, slots=True)
class Form:
    """A constraint on the whole answer of a request.

    kind: "json_object" for any JSON object, "json_schema", "regex", or "choice" for one of several texts.
    texts: one text, the JSON schema or the regular expression (Rust's dialect, matching the whole answer);
        for "choice", every choice; for "json_object", nothing. For "structural_tag", which clients cannot
        ask for, the text that `specsot.grammar.structural_tag.write_tag` returns.

    Raises InvalidRequest, whose field is "constraint", for an unknown kind, for texts that do not fit the
    kind, and for texts of more than MAX_FORM_BYTES bytes.
    """

    kind: FormKind
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise InvalidRequest, whose field is "constraint", for an unknown kind, for a text that is no str
        or is empty, for a number of texts that does not fit the kind, and for texts of more than
        MAX_FORM_BYTES bytes in all.
        """
        if self.kind not in (*FORM_KINDS, STRUCTURAL_TAG):
            raise refuse(f"must be one of {', '.join(FORM_KINDS)}, got {self.kind!r}")
        if not all(isinstance(cast(object, text), str) for text in self.texts):
            raise refuse(f"{self.title} must be text")
        if not _counts(self.kind, len(self.texts)):
            raise refuse(f"{self.title} cannot have {len(self.texts)} texts")
        if not all(self.texts):
            raise refuse(f"{self.title} must not be empty")
        if (size := sum(map(_size, self.texts))) > MAX_FORM_BYTES:
            raise refuse(f"{self.title} has {size} bytes, {MAX_FORM_BYTES} are allowed")

    @property
    def title(self) -> str:
        """What messages to clients call the form; they know no structural tags."""
        return "the form of forced calls" if self.kind == STRUCTURAL_TAG else self.kind


def _counts(kind: FormKind, texts: int) -> bool:
    """Return True if a form of this kind may have `texts` texts: none for "json_object", 1 to MAX_CHOICES for
    "choice", exactly one for every other kind.

    kind: the kind of the form.
    texts: number of texts that the client gave.
    """
    if kind == "choice":
        return 0 < texts <= MAX_CHOICES
    return texts == (kind != "json_object")


def _size(text: str) -> int:
    """Return the length of a text in bytes of UTF-8. Raises InvalidRequest if the text has a lone surrogate.

    text: a text of a form.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise refuse("holds half a character, which is not Unicode text") from None
