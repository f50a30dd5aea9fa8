"""Plain decoding by Transformers: the reference every ring must reproduce token for token.

One token at a time, one sequence at a time, its own KV cache, fp32; a text that is given to be judged is read
in one forward. Penalties, cuts and the distribution are Transformers' own too; only the uniform number of a
position is the product's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specsot.params import Sampling
from tests.exact import pick, shape, times_of

NEAR = 1e-4  # a top-2 logit gap below this may be decided either way by rounding


@dataclass(frozen=True)
class Plain:
    """What plain decoding writes, and how close each argmax was."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@cache
def load(base: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


KNOWN: dict[tuple[object, ...], Plain] = {}


def write_plainly(
    base: Path,
    prompt: tuple[int, ...],
    limit: int,
    sampling: Sampling,
    seed: int,
    ordinal: int,
    guess: Sequence[int] = (),
) -> Plain:
    """Return what plain decoding writes, by Transformers, which decode one token in one forward.

    guess: what may be that text, such as a ring's. One forward reads as much of it as is right, so pass what
        the ring wrote: a correct ring then costs one forward.
    """
    key = base, prompt, limit, sampling, seed, ordinal
    if key not in KNOWN:
        KNOWN[key] = _write_plainly(*key, guess)
    return KNOWN[key]


@torch.inference_mode()
def _write_plainly(
    base: Path,
    prompt: tuple[int, ...],
    limit: int,
    sampling: Sampling,
    seed: int,
    ordinal: int,
    guess: Sequence[int],
) -> Plain:
    model, tokens, gaps = load(base), list(prompt), list[float]()
    ahead, past, read = [*prompt, *guess[: limit - 1]], None, 0  # read: tokens whose keys `past` has
    while len(tokens) < len(prompt) + limit:
        fed = ahead if past is None else tokens[read:]
        out = model(input_ids=torch.tensor([fed]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        for logits in out.logits[0, len(tokens) - 1 - read :]:
            times = times_of(prompt, tokens[len(prompt) :])
            top = shape(logits, sampling, times).topk(2).values
            gaps.append(float(top[0] - top[1]))
            tokens.append(pick(logits, sampling, times, seed, ordinal, len(tokens)))
            if tokens != ahead[: len(tokens)]:
                break  # what was fed behind it is not the text
        wrong = read + len(fed) - (len(tokens) - 1)  # tokens that were fed and are not the text's
        if wrong:
            past.crop(-wrong)
        read = len(tokens) - 1
    return Plain(tuple(tokens[len(prompt) :]), tuple(gaps))


class Excuses:
    """Counts differences at near ties; more than 1 % of the cases is a failure after all."""

    def __init__(self) -> None:
        self.cases = self.excused = 0

    def compare(self, written: list[int], plain: Plain) -> None:
        self.cases += 1
        if tuple(written) == plain.tokens:
            return
        first = next(i for i, (a, b) in enumerate(zip(written, plain.tokens)) if a != b)
        assert plain.gaps[first] < NEAR, (
            f"token {first}: wrote {written[first]}, plain decoding {plain.tokens[first]}, "
            f"top-2 gap {plain.gaps[first]:.2e}"
        )
        self.excused += 1

    def settle(self) -> None:
        assert self.cases > 0
        assert self.excused <= 0.01 * self.cases, f"{self.excused} of {self.cases} cases excused"


def check_texts(
    base: Path, prompts: Iterable[Sequence[int]], texts: Iterable[list[int]], limit: int, sampling: Sampling
) -> None:
    """Each text is what plain decoding writes behind its prompt, with seed 7 and its place as ordinal."""
    excuses = Excuses()
    for n, (prompt, text) in enumerate(zip(prompts, texts)):
        excuses.compare(text, write_plainly(base, tuple(prompt), limit, sampling, 7, n, text))
    excuses.settle()
