"""Loads a whole model as SpecSoT or Transformers does, and finds tokens that its greedy decoding would not
have chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specsot.checkpoint.config import read_config
from specsot.checkpoint.gguf.directory import read_places
from specsot.checkpoint.gguf.finding import POINTER
from specsot.errors import ModelError
from specsot.service.options import ModelOptions
from specsot_app.runtime import no_import_warnings
from specsot_bench.core.verify_report import TokenDifference
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.eagle import EagleHead
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.linear import check_device, check_quantization


def load_whole(options: ModelOptions) -> Decoder:
    """Load all layers. Raises ModelError, InvalidRequest."""
    check_device(options.device)
    check_quantization(options.quantization, options.device)
    return Decoder.of(options)


# Families whose GGUF files Transformers reads; Mixtral is left out because it would get random experts.
GGUF_READ = ("llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text", "minimax_m2")


def load_in_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model with Transformers. Raises ModelError with Transformers' own words.

    A GGUF file is read and dequantized by Transformers itself, but with our config: Transformers overlooks
    how Llama 3 scales rotary positions, and head sizes of Qwen3.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    given: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    reads_images = read_config(folder).text_of is not None
    try:
        with no_import_warnings():
            if (folder / POINTER).is_file():
                file = _one_gguf(folder)
                config = AutoConfig.from_pretrained(folder)
                # Without this, the family's default is used, which the vocabulary may lack.
                config.pad_token_id = None
                given |= {"gguf_file": file.name, "config": config}
                folder = file.parent
            loader = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
            return loader.from_pretrained(folder, **given)
    # Transformers raises many kinds of exceptions, including assertions.
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder}: Transformers cannot load it ({line})") from error


def _one_gguf(folder: Path) -> Path:
    """Return the model's GGUF file. Raises ValueError if Transformers cannot read it."""
    first, *others = {place.file for place in read_places(folder / POINTER).values()}
    kind = read_config(folder).model_type
    if others or kind not in GGUF_READ:
        raise ValueError(f"it reads no GGUF files {'in several parts' if others else f'of {kind}'}")
    return Path(first)


def feed_base(base: Decoder, tokens: Tensor, taps: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states [n, H] after the last layer, and the sum [n, Hd] over the taps, or None
    without taps.
    """
    rows = len(tokens)
    plan = base.plan([RowSpan(rows, 0, rows, (0,))], rows, "packed")
    places = torch.arange(rows, device=base.device)
    slices = {layer: base.hold_tap(part) for layer, part in taps.items()}
    return base.forward(base.embed(tokens), places, places, plan, base.make_kv(1, rows), slices)


def feed_head(head: EagleHead, tokens: Tensor, features: Tensor, room: int = 0) -> tuple[Tensor, KVPages]:
    """Return outputs [n, hidden] for features [n, hidden], and the KV in a page with room for `room` more
    rows.
    """
    rows = len(tokens)
    kv = head.make_kv(1, rows + room)
    # Every row sees itself and all rows before it.
    span = RowSpan(rows, 0, rows, (0,))
    places = torch.arange(rows, device=head.device)
    return head.forward(tokens, features, HeadRows(places, places, head.plan([span], rows + room), kv)), kv


# (token ids, number of last rows) -> logits [rows, V]
Logits = Callable[[Sequence[int], int], Tensor]


def of_transformers(model: Path, dtype: torch.dtype, device: str) -> Logits:
    """Return the logits of a model that Transformers loads and runs. Raises ModelError."""
    held = load_in_transformers(model, dtype).to(device).eval()
    return lambda text, rows: held(torch.tensor([text], device=device), logits_to_keep=rows).logits[0]


def of_base(base: Decoder) -> Logits:
    """Return the logits of a model as SpecSoT reads a whole text, in one pass without drafts."""
    return lambda text, rows: base.logits(
        feed_base(base, torch.tensor(text, device=base.device), {})[0][-rows:]
    )


@torch.inference_mode()
def compare(
    reference: Logits, prompt: Sequence[int], written: Sequence[int], ends: Collection[int] | None
) -> list[TokenDifference]:
    """Return every token that is not the reference's choice after the tokens before it.

    If there is none, greedy decoding by the reference writes exactly these tokens.
    ends: one of these tokens must come next; None if the answer was cut off.
    """
    logits = reference([*prompt, *written], len(written) + 1).float()
    first, second = logits.topk(2).values.unbind(-1)
    choices = logits.argmax(-1).tolist()
    gaps = (first - second).tolist()
    wrong = [at for at, token in enumerate(written) if choices[at] != token]
    found = [TokenDifference(at, written[at], choices[at], gaps[at]) for at in wrong]
    if ends is not None and choices[-1] not in ends:
        found.append(TokenDifference(len(written), None, choices[-1], gaps[-1]))
    return found
