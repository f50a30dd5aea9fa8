"""Loads a whole model, for measurements: as SpecSoT does, or as Transformers does, for what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specsot.errors import ModelError
from specsot.model.config import read_config
from specsot.model.decoder import Decoder
from specsot.model.gguf.directory import read_places
from specsot.model.gguf.finding import POINTER
from specsot.model.linear import check_device, check_quantization
from specsot.service.options import ModelOptions
from specsot_app.runtime import no_import_warnings


def load_whole(options: ModelOptions) -> Decoder:
    """All layers. Raises ModelError, InvalidRequest."""
    check_device(options.device)
    check_quantization(options.quantization, options.device)
    return Decoder.of(options)


# By Transformers, whose Mixtral would have random experts.
GGUF_READ = ("llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text", "minimax_m2")


def load_in_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Raises ModelError where Transformers cannot load it, in its own words.

    A GGUF file is read and dequantized by Transformers itself. The config is ours: it overlooks how Llama 3
    scales rotary positions, and head sizes of Qwen3.
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
                config.pad_token_id = None  # else the family's usual one, which the vocabulary may not have
                given |= {"gguf_file": file.name, "config": config}
                folder = file.parent
            loader = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
            return loader.from_pretrained(folder, **given)
    except Exception as error:  # of many kinds, assertions too
        line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder}: Transformers cannot load it ({line})") from error


def _one_gguf(folder: Path) -> Path:
    first, *others = {place.file for place in read_places(folder / POINTER).values()}
    kind = read_config(folder).model_type
    if others or kind not in GGUF_READ:
        raise ValueError(f"it reads no GGUF files {'in several parts' if others else f'of {kind}'}")
    return Path(first)
