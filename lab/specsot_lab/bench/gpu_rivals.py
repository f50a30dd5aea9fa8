"""Transformers' own decoding of the same shapes on the same GPU, alone and assisted by a small model.

Weights are made up so that every token says the next; where an assistant
drafts, acceptance is replayed: so many tokens say a wrong one to the assistant, and there alone it is unsure.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specsot_app.bench.hf_baseline import HfModel, HfText, Ids
from specsot_lab.bench.acceptance import even_runs
from specsot_lab.bench.synthetic_models import ASSISTANTS, FAINT, SHAPES

Row = dict[str, object]
Settings = Mapping[str, Any]

FEW, MANY = 8, 160  # tokens of an answer that warms up, and of one that is timed
CHANCES = (0.9, 0.8)  # that a drafted token is right: as our replayed head, and less
UNSURE = 4  # tokens that are equally likely where the assistant errs: below Transformers' threshold, 0.4


def measure_rivals(name: str, text: int) -> Iterator[Row]:
    """Milliseconds a token of `generate`: as it comes, assisted, and with a static cache, compiled."""
    base, prompt = make(SHAPES[name], "cuda"), tuple(range(text))
    rival = HfModel(base)
    rival.write(prompt, FEW)
    yield _told("eager", rival.write(prompt, MANY))
    if small := ASSISTANTS.get(name):
        yield from measure_assisted(base, make(SHAPES[small], "cuda"), small, prompt, MANY)
    static = HfModel(base, settings={"cache_implementation": "static"})
    static.write(prompt, MANY)  # of another length it would be compiled again
    yield _told("static cache, compiled", static.write(prompt, MANY))
    del base, rival, static
    gc.collect()
    torch.cuda.empty_cache()


def measure_assisted(base: Any, small: Any, name: str, prompt: Ids, tokens: int) -> Iterator[Row]:
    """With Transformers' defaults: twenty drafted tokens at most, and none behind one that is unsure."""
    passes = 0

    def note(*_: object) -> None:
        nonlocal passes
        passes += 1

    small.register_forward_hook(note)
    first, rival = prompt[-1], HfModel(base, small)
    for chance in CHANCES:
        err(small, mistakes(chance, first, first + tokens))
        rival.write(prompt, FEW, assisted=True)
        passes = 0
        told = rival.write(prompt, tokens, assisted=True)
        rounds = len(told.steps) - 1  # the last step is the end
        yield _told(f"assisted by {name}, acceptance replayed", told) | {
            "chance": chance,
            "accepted %": round(100 * (tokens - rounds) / passes, 1),
            "tokens a pass": round(tokens / rounds, 2),
        }


def make(shape: Settings, device: str) -> Any:
    """A model with which every token says the next: what layers add is small, and lm_head is the embedding
    moved by one row. So the two are never one matrix; a token reads as many bytes either way.
    """
    settings: dict[str, Any] = {**shape, "tie_word_embeddings": False}
    config: Any = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(FAINT)
    err(model, ())
    model.generation_config.eos_token_id = None
    return model


def err(model: Any, tokens: Sequence[int]) -> None:
    """Every token says the next one, but for these: behind them a few others are equally likely, and wrong.

    Those are the vocabulary's last, which no text here reaches.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    head.copy_(table.roll(1, 0))
    end = len(head)
    for token in tokens:
        head[token + 1] = 0.0
        head[end - UNSURE : end] = table[token]
        end -= UNSURE


def mistakes(chance: float, first: int, last: int) -> list[int]:
    """Tokens behind which an assistant errs that is otherwise right with this chance."""

    def places() -> Iterator[int]:
        place = first
        for run in even_runs(chance):
            place += run
            yield place
            place += 1

    return list(takewhile(lambda place: place <= last, places()))


def _told(way: str, told: HfText) -> Row:
    """From the first tokens on, so that no prompt is in it."""
    (begun, before), (ended, tokens) = told.steps[0], told.steps[-1]
    seconds = (ended - begun) / (tokens - before)
    return {
        "what": f"Transformers generate, {way}",
        "ms": round(seconds * 1e3, 3),
        "tokens/s": round(1 / seconds, 1),
    }
