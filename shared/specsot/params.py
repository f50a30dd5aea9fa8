"""What a caller may ask for, as frozen values that refuse impossible numbers.

Refuses to know text, tokens, tensors, and where the numbers came from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from specsot.errors import InvalidRequest

Mode = Literal["auto", "sot", "direct"]
DrafterName = Literal["eagle", "none"]

MODES: tuple[Mode, ...] = ("auto", "sot", "direct")
DRAFTERS: tuple[DrafterName, ...] = ("eagle", "none")


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{name} must be {rule}, got {value!r}", field=name)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a target token is drawn from logits.

    temperature 0 means argmax. top_k 0 means no cut; top_p 1.0 means no cut.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature) and self.temperature >= 0
        _require(finite, "temperature", "a number >= 0", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(self.top_k >= 0, "top_k", ">= 0", self.top_k)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be written. Counts are tokens; `max_parallel` counts live branches."""

    max_new_tokens: int = 1024
    max_branch_tokens: int | None = None
    max_skeleton_tokens: int = 512
    max_parallel: int = 8

    def __post_init__(self) -> None:
        _require(self.max_new_tokens > 0, "max_new_tokens", "> 0", self.max_new_tokens)
        capped = self.max_branch_tokens
        _require(capped is None or capped > 0, "max_branch_tokens", "> 0", capped)
        _require(self.max_skeleton_tokens > 0, "max_skeleton_tokens", "> 0", self.max_skeleton_tokens)
        _require(self.max_parallel > 0, "max_parallel", "> 0", self.max_parallel)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, whole. Exactly one of `prompt` and `messages` is given.

    seed None: the master draws one and logs it.
    tools: names a plan line may carry as a label.
    ignore_eos: write on to the token limits, whatever end-of-sequence tokens come (for benchmarks).
    """

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    model: str = ""
    mode: Mode = "auto"
    drafter: DrafterName = "eagle"
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    constraint: bool = True
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(self.mode in MODES, "mode", f"one of {', '.join(MODES)}", self.mode)
        _require(self.drafter in DRAFTERS, "drafter", f"one of {', '.join(DRAFTERS)}", self.drafter)
        _require(
            bool(self.messages) != (self.prompt is not None),
            "prompt",
            "given, or messages, not both",
            self.prompt,
        )
        said = self.prompt if self.prompt is not None else self.messages[-1].content
        _require(bool(said.strip()), "prompt", "not empty", said)
        _require(all(self.stop), "stop", "non-empty strings", self.stop)
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", "in [0, 2**63)", self.seed)
        for name in self.tools:
            fits = name.isidentifier() and len(name) <= 32
            _require(fits, "tools", "identifiers of at most 32 characters", name)
