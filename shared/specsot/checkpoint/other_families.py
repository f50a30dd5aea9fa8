"""Reads the sizes of a model whose family our decoder does not know.

Such a model runs through Transformers' own code. Only sizes are read here, without torch and without
Transformers. Whether Transformers has code for the family, and whether that code can run over layer ranges,
is decided when layers are built (`specsot_model.transformers_layers`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from specsot.checkpoint.fields import Fields

if TYPE_CHECKING:
    from specsot.checkpoint.fields import Json

# The spellings of each size in config.json, the usual one first.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
}
# Tokens. Context of a model whose config names none. Precedent: Transformers' default for Llama.
DEFAULT_POSITIONS = 2048
# Fields by which a config would load code from the model's directory. Such code is never run.
REMOTE_CODE = ("auto_map", "trust_remote_code")


def read_sizes(fields: Fields) -> dict[str, Any]:
    """Return the sizes of a model of an unknown family, as arguments of `ModelConfig`.

    Besides the fields of SPELLINGS these are `kv_heads` and `head_dim` of an ordinary layer (the layers'
    true sizes are measured before they are loaded), `tied`, and `transformers`, the config for Transformers.
    A config that does not say whether embedding and lm_head are one table counts as tied, which takes effect
    only if the files have no lm_head.

    fields: the fields of config.json.

    Raises ModelError for a model that reads images, for an encoder-decoder, and for missing or wrong sizes.
    """
    values = fields.values
    kind = values["model_type"]
    fields.require(
        not isinstance(values.get("text_config"), dict),
        f"of model_type {kind!r}, which reads more than text, the text part is not supported",
    )
    fields.require(
        not values.get("is_encoder_decoder"),
        f"model_type {kind!r} is an encoder-decoder, whose layers need the encoder's output besides their "
        "hidden state",
    )
    hidden = _count(fields, SPELLINGS["hidden"])
    # Of an MLP without a width, only the memory is estimated here.
    defaults = {"intermediate": 4 * hidden, "max_positions": DEFAULT_POSITIONS}
    sizes = {name: _count(fields, words, defaults.get(name)) for name, words in SPELLINGS.items()}
    heads = sizes["heads"]
    kv_heads = fields.count("num_key_value_heads", heads)
    head_dim = fields.count("head_dim", max(hidden // heads, 1))
    tied = fields.flag("tie_word_embeddings", True)
    return {
        **sizes,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "tied": tied,
        "transformers": _config(values),
    }


def _count(fields: Fields, words: tuple[str, ...], default: int | None = None) -> int:
    """Return the size that one of several fields has.

    fields: the fields of config.json.
    words: spellings of the field, the usual one first; the first that is present counts.
    default: the size if none is present, or None.

    Raises ModelError if none is present and there is no default, or if the value is no integer above 0.
    """
    word = next((word for word in words if isinstance(fields.values.get(word), int)), words[0])
    return fields.count(word, default)


def _config(values: Json) -> str:
    """Return the fields of config.json as JSON text, without those that would load code from a directory.

    values: the fields of config.json.
    """
    return json.dumps({name: value for name, value in values.items() if name not in REMOTE_CODE})
