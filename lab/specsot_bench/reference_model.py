"""Loads a whole model as SpecSoT or Transformers does, and finds tokens that its greedy decoding would not
have chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specsot.checkpoint.config import read_config
from specsot.checkpoint.gguf.directory import read_places
from specsot.checkpoint.gguf.finding import POINTER
from specsot.errors import ModelError
from specsot.service.options import ModelOptions
from specsot_bench.core.verify_report import TokenDifference
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.eagle import EagleHead
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.linear import check_device, check_quantization


def load_decoder(options: ModelOptions) -> Decoder:
    """Return a model with all its layers, loaded as a worker does.

    options: Options that name the model and its precision.
    Raises ModelError, InvalidRequest.
    """
    check_device(options.device)
    check_quantization(options.stored_form, options.device)
    return Decoder.of(options)


# Families whose GGUF files Transformers reads; Mixtral is left out because it would get random experts.
GGUF_READ = ("llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text", "minimax_m2")


@contextmanager
def no_import_warnings() -> Generator[None]:
    """Silence warnings of the logging module within the context, while libraries are imported. The context
    yields None.

    The warnings concern kernels that this process does not call.

    Records of the level WARNING and below are dropped, for all threads of the process; afterwards nothing is
    disabled, also not what was disabled before.
    """
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def load_in_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Return a model that Transformers has loaded. Raises ModelError with Transformers' own words.

    A GGUF file is read and dequantized by Transformers itself, but with our config: Transformers overlooks
    how Llama 3 scales rotary positions, and head sizes of Qwen3.

    A model that also reads images is loaded with its image part. Nothing is fetched from the hub. A GGUF
    model in several parts, or of a family that is not in GGUF_READ, raises ModelError.

    folder: The model's directory.
    dtype: Data type of its weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    arguments: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    reads_images = read_config(folder).text_of is not None
    try:
        with no_import_warnings():
            if (folder / POINTER).is_file():
                file = _one_gguf(folder)
                config = AutoConfig.from_pretrained(folder)
                # Without this, the family's default is used, which the vocabulary may lack.
                config.pad_token_id = None
                arguments |= {"gguf_file": file.name, "config": config}
                folder = file.parent
            loader = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
            return loader.from_pretrained(folder, **arguments)
    # Transformers raises many kinds of exceptions, including assertions.
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder}: Transformers cannot load it ({line})") from error


def _one_gguf(folder: Path) -> Path:
    """Return the model's GGUF file.

    The families that Transformers reads are GGUF_READ.

    folder: Directory of the model, with a file that points to its GGUF files.
    Raises ValueError if Transformers cannot read the file: it has several parts, or is of another family.
    """
    first_file, *other_files = {location.file for location in read_places(folder / POINTER).values()}
    model_type = read_config(folder).model_type
    if other_files or model_type not in GGUF_READ:
        raise ValueError(
            f"it reads no GGUF files {'in several parts' if other_files else f'of {model_type}'}"
        )
    return Path(first_file)


def feed_base(base: Decoder, tokens: Tensor, taps: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states [num_tokens, hidden_size] after the last layer, and the sum [num_tokens,
    head_hidden_size] over the taps, or None without taps.

    The result has the data type and device of the model.

    base: The whole model.
    tokens: [num_tokens] token ids of one text.
    taps: Slice of the head's weights that each tapped layer's input is multiplied with, by layer,
        [head_hidden_size, hidden_size] each; empty: no taps.
    """
    num_tokens = len(tokens)
    plan = base.plan([RowSpan(num_tokens, 0, num_tokens, (0,))], num_tokens, "packed")
    positions = torch.arange(num_tokens, device=base.device)
    slices = {layer: base.hold_tap(part) for layer, part in taps.items()}
    kv = base.make_kv(1, num_tokens)
    return base.forward(base.embed(tokens), positions, positions, plan, kv, slices, tokens=tokens)


def feed_head(
    head: EagleHead, tokens: Tensor, features: Tensor, free_rows: int = 0
) -> tuple[Tensor, KVPages]:
    """Return the head's outputs [num_tokens, hidden_size], and its KV in one page.

    Each token sees itself and all tokens before it.

    head: The draft head.
    tokens: [num_tokens] token ids.
    features: Features of the base for these tokens, [num_tokens, hidden_size].
    free_rows: Number of rows that stay free in the page.
    """
    num_tokens = len(tokens)
    kv = head.make_kv(1, num_tokens + free_rows)
    # Every row sees itself and all rows before it.
    row_span = RowSpan(num_tokens, 0, num_tokens, (0,))
    positions = torch.arange(num_tokens, device=head.device)
    return head.forward(
        tokens, features, HeadRows(positions, positions, head.plan([row_span], num_tokens + free_rows), kv)
    ), kv


# Computes logits: (token ids of a text, number of last positions) -> [positions, vocab_size].
Logits = Callable[[Sequence[int], int], Tensor]


def of_transformers(model: Path, dtype: torch.dtype, device: str) -> Logits:
    """Return a function that computes logits with a model that Transformers loads and runs.

    model: The model's directory.
    dtype: Data type of its weights.
    device: A torch device.
    Raises ModelError if Transformers cannot load the model.
    """
    loaded = load_in_transformers(model, dtype).to(device).eval()
    return lambda tokens, rows: loaded(torch.tensor([tokens], device=device), logits_to_keep=rows).logits[0]


def of_base(base: Decoder) -> Logits:
    """Return a function that computes logits as SpecSoT reads a whole text, in one pass without drafts.

    base: The whole model.
    """
    return lambda tokens, rows: base.logits(
        feed_base(base, torch.tensor(tokens, device=base.device), {})[0][-rows:]
    )


@torch.inference_mode()
def compare(
    reference: Logits, prompt: Sequence[int], answer: Sequence[int], end_ids: Collection[int] | None
) -> list[TokenDifference]:
    """Return every token that is not the reference's choice after the tokens before it.

    If there is none, greedy decoding by the reference writes exactly these tokens.

    An answer that ended although the reference would not end gives a last difference with `ours` None and
    the index len(answer). The gap is that of the reference's two largest logits at the same position.

    reference: Computes the reference's logits.
    prompt, answer: Token ids of the prompt and of the answer that is compared.
    end_ids: End tokens, one of which must come next; None if the answer was cut off, so that nothing is
        required.
    """
    logits = reference([*prompt, *answer], len(answer) + 1).float()
    first, second = logits.topk(2).values.unbind(-1)
    choices = logits.argmax(-1).tolist()
    gaps = (first - second).tolist()
    wrong_indices = [index for index, token in enumerate(answer) if choices[index] != token]
    differences = [
        TokenDifference(index, answer[index], choices[index], gaps[index]) for index in wrong_indices
    ]
    if end_ids is not None and choices[-1] not in end_ids:
        differences.append(TokenDifference(len(answer), None, choices[-1], gaps[-1]))
    return differences
