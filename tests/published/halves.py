"""The two halves of a comparison, each run in a process of its own, so that only one model is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

# Token ids of one text.
Ids = tuple[int, ...]


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new process, which ends with it, and return its result.

    work: a function of this module.
    arguments: its arguments.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def our_ids(file: Path, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of texts as users write them, without what begins a prompt.

    file: the GGUF file.
    texts: the texts.
    """
    from specsot.checkpoint.resolving import resolve_model
    from specsot_master.text import Text

    text = Text(resolve_model(file))
    return [text.encode(one) for one in texts]


def our_prompts(file: Path, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of raw prompts, with the token that begins a text if the model has one.

    file: the GGUF file.
    texts: the prompts.
    """
    from specsot.checkpoint.resolving import resolve_model
    from specsot_master.text import Text

    text = Text(resolve_model(file))
    return [text.encode_prompt(one) for one in texts]


def our_answers(file: Path, prompts: Sequence[Ids], num_tokens: int) -> list[Ids]:
    """Return greedy continuations of `num_tokens` tokens, which a fleet in this process writes in fp32,
    without a drafter, all at once.

    file: the GGUF file.
    prompts: token ids of the prompts.
    num_tokens: number of tokens; tokens that end a text count as any others.
    """
    from specsot.params import Ask, Limits
    from specsot_app.fleet.opening import open_fleet
    from specsot_app.fleet.options import FleetOptions
    from specsot_bench.asking import finished_answer

    limits = Limits(max_new_tokens=num_tokens)
    asks = [Ask(tokens=prompt, mode="direct", limits=limits, ignore_eos=True) for prompt in prompts]

    async def write() -> list[Ids]:
        """Open the fleet, ask, and close it."""
        fleet = await open_fleet(FleetOptions(model=file, dtype="fp32", quantization="none", drafter="none"))
        try:
            answers = await asyncio.gather(*(finished_answer(fleet, ask) for ask in asks))
        finally:
            await fleet.close()
        return [tuple(answer.tokens) for answer in answers]

    return asyncio.run(write())


def our_logits(file: Path, texts: Sequence[Ids], folder: Path) -> None:
    """Write the logits in fp32 after every token of each text, [num_tokens, vocab_size], into a folder.

    file: the GGUF file.
    texts: token ids.
    folder: where each text's logits are written, as 0.npy, 1.npy, ...
    """
    import torch

    from specsot.checkpoint.resolving import resolve_model
    from specsot.service.options import ModelOptions
    from specsot_bench.reference_model import load_decoder, of_base

    options = ModelOptions(resolve_model(file), dtype="fp32", quantization="none", device="cpu")
    logits = of_base(load_decoder(options))
    with torch.inference_mode():
        for number, text in enumerate(texts):
            np.save(folder / f"{number}.npy", logits(text, len(text)).float().numpy())


def their_ids(file: Path, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of texts by the tokenizer that Transformers makes of the file, without what begins
    a prompt.

    file: the GGUF file.
    texts: the texts.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return [tuple(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in texts]


def against_their_logits(
    file: Path, texts: Sequence[Ids], num_prompts: Sequence[int], folder: Path
) -> list[dict[str, float]]:
    """Compare our logits with those of Transformers' reading of the same file; return one row of figures a
    text:

        tokens     number of generated tokens
        differ     those that are not Transformers' greedy choice
        gap        largest difference of Transformers' two largest logits where a generated token is not
                   Transformers' choice
        logits     largest difference of a logit at any position
        spread     largest logit less the smallest one, at any position, to which the difference compares

    file: the GGUF file.
    texts: token ids, prompt and continuation.
    num_prompts: how many first tokens of each text are the prompt.
    folder: the folder that `our_logits` has written to.
    """
    import torch

    from specsot.checkpoint.resolving import resolve_model
    from specsot_bench.reference_model import of_transformers

    reference = of_transformers(resolve_model(file), torch.float32, "cpu")
    rows = list[dict[str, float]]()
    with torch.inference_mode():
        for number, (text, first) in enumerate(zip(texts, num_prompts, strict=True)):
            theirs = reference(text, len(text)).float()
            ours = torch.from_numpy(np.load(folder / f"{number}.npy"))
            top = theirs.topk(2)
            wrong = [place for place in range(first, len(text)) if top.indices[place - 1, 0] != text[place]]
            gaps = [float(top.values[place - 1, 0] - top.values[place - 1, 1]) for place in wrong]
            rows.append(
                {
                    "tokens": len(text) - first,
                    "differ": len(wrong),
                    "gap": max(gaps, default=0.0),
                    "logits": float((ours - theirs).abs().max()),
                    "spread": float(theirs.max() - theirs.min()),
                }
            )
    return rows
