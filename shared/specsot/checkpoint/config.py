"""Reads a base model's shape from its Hugging Face config.json, and per-head KV windows from kv_heads.json.

It knows which fields are required and how each family spells them. It needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import nextafter
from pathlib import Path
from typing import Any, TypeVar

from specsot.checkpoint.families import (
    ACTIVATIONS,
    FAMILIES,
    LLAMA,
    WITH_IMAGES,
    Activation,
    Delta,
    Family,
    Latent,
    MlpKind,
    Names,
    NormKind,
    Routing,
)
from specsot.checkpoint.fields import Fields, Json, read_json
from specsot.checkpoint.other_families import read_sizes
from specsot.checkpoint.quantization_config import Published, read_published
from specsot.checkpoint.rope import UNROTATED, Rope, read_rope, read_score_factor, read_sliding_rope
from specsot.errors import InvalidRequest, ModelError
from specsot.params import MAX_TOKENS, HeadImportance, HeadWindows

# Part of error messages that says what can be loaded.
LAYOUT = "SpecSoT reads Hugging Face directories (config.json, tokenizer.json, *.safetensors) and GGUF files"
# Fields that a model with images has next to its `text_config`, not in it.
OF_THE_WHOLE = ("eos_token_id", "quantization_config", "compression_config")
# Names. Bounds how many of a directory's files an error lists. Untuned.
MAX_SHOWN_NAMES = 5


def require_model_directory(directory: Path) -> Path:
    """Return the directory if it has a config.json.

    directory: path of the model directory.

    Raises ModelError if the path is a file, if it does not exist, or if the directory has no config.json; the
    error then names some of the files that it has.
    """
    if directory.is_file():
        raise ModelError(f"{directory}: a file, not a model directory; {LAYOUT}")
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such file or directory, and no name on the hub (owner/name)")
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: no config.json in it, and no GGUF file; {_describe_files(directory)}")
    return directory


def require_torch() -> None:
    """Return None if PyTorch and safetensors are installed. Raise ModelError, which names the missing
    packages, if they are not. Neither is imported.
    """
    missing = [name for name in ("torch", "safetensors") if find_spec(name) is None]
    if missing:
        raise ModelError(f"{' and '.join(missing)} not installed: pip install 'specsot[model]'")


def require_quantizer(kind: str | None, device: str) -> None:
    """Return None if the library that runs this quantization is installed, or if none is needed. Raise
    ModelError, which names the package to install, if it is missing. Nothing is imported.

    kind: the quantization, such as "int4"; None if weights are not quantized, which needs no library.
    device: the torch device, such as "cpu" or "cuda:0".

    On a CPU, int4 and int8 need numba; on a GPU, int4 needs torchao, and int8 needs nothing. Other kinds need
    no library.
    """
    on_cpu = device.partition(":")[0] == "cpu"
    library, extra = ("numba", "model") if on_cpu else ("torchao", "quant")
    if (kind == "int4" or (on_cpu and kind == "int8")) and find_spec(library) is None:
        raise ModelError(f"{kind} weights need {library}: pip install 'specsot[{extra}]'")


def _describe_files(directory: Path) -> str:
    """Return a few words about a directory's files, by which a user recognizes a wrong folder: "it holds a,
    b, ...", or "it is empty".

    directory: path of an existing directory.

    At most MAX_SHOWN_NAMES names are listed, in alphabetical order; "..." stands for more.
    """
    names = sorted(path.name for path in directory.iterdir())
    if not names:
        return "it is empty"
    shown = ", ".join(names[:MAX_SHOWN_NAMES]) + (", ..." if len(names) > MAX_SHOWN_NAMES else "")
    return f"it holds {shown}"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model with rotary positions and grouped-query attention.

    model_type: The family, a key of `FAMILIES`.
    hidden: Hidden size.
    layers: Number of layers.
    heads: Number of query heads, g times `kv_heads`; query head h reads KV head h // g.
    kv_heads: Number of KV heads; 1 with `latent`, whose rows all heads read.
    head_dim: Number of elements of a query, key or value of one head; `Latent.row` with `latent`.
    intermediate: Width of the MLP.
    vocab: Number of rows of the embedding, which is the number of logits.
    eps: Epsilon of the norms, which is added to the variance; see also `residual_scale`.
    max_positions: Length of the model's context, in tokens.
    tied: True if embedding and lm_head are one table.
    rope: Rotary settings of all layers, or of those outside `windowed` if there is a `sliding_rope`.
    qkv_bias: True if the query, key and value projections have biases.
    out_bias: True if the projection after attention has a bias.
    mlp_bias: True if the MLP's projections have biases.
    qk_norm: True if queries and keys are normed, each head by itself unless `whole_qk_norm` is True.
    eos: Token ids that end a sequence; empty if the files name none.
    names: Names of the tensors.
    norm: Kind of the norms.
    mlp: Kind of the MLPs.
    activation: Activation function of the MLPs.
    parallel: True if attention and MLP both read the layer's input, as in GPT-NeoX; False if the MLP reads
        the sum of the input and the attention's output.
    whole_qk_norm: True if one norm covers all query heads at once, and another one all key heads.
    routing: How tokens go to experts; None: no layer has experts.
    clamp: (limit, gain) of a clamped SwiGLU; None: `activation` decides.
    norm_offset: Number that RMS norms add to their weights; 1 in Gemma.
    embedding_scale: Factor of the embeddings before the first layer.
    attention_softcap: Cap c of attention scores, as c * tanh(score / c); None: no cap.
    logit_softcap: Cap c of logits, as c * tanh(logit / c); None: no cap.
    query_scalar: Number by whose square root attention scores are divided; None means head_dim.
    residual_scale: Factor of what the published model's layers add to the residual stream. Here the residual
        stream is the published model's divided by this number, so that nothing has to be multiplied:
        `embedding_scale` and `eps` are divided by it and by its square. The inputs of the norms are then the
        same up to a factor, which norms remove.
    logit_divisor: Number by which logits are divided.
    sliding_rope: Rotary settings of the layers in `windowed`; None: those of `rope`.
    window: How many positions a token sees in the layers in `windowed`, its own included; None: no window.
    windowed: Numbers of the sliding-window layers, counted from 0.
    unrotated: Numbers of the layers without rotary positions, counted from 0.
    wide: Number of KV heads, and number of elements of a head, in the layers outside `windowed`, whose heads
        differ from those of other layers (Gemma 4); None: all layers have the same heads. See `of_layer`.
    keys_as_values: True if values are the keys before their norm, in the layers outside `windowed`.
    values_normed: True if values are normed, each head by itself and without a weight.
    first_reader: Number of the first layer without keys and values of its own. It and all layers after it
        read those of an earlier layer, see `kv_source`. None: every layer has its own.
    stores_kv: False in the config of a layer that reads the keys and values of another one; see `of_layer`.
    reader_intermediate: Width of the MLP in layers without keys and values of their own; None: that of the
        others.
    layer_input_size: Number of elements of a per-layer input, which each layer gets of a token besides the
        hidden states: from an embedding of its own, and from the token's embedding (Gemma 4 E2B and E4B). 0:
        layers have no such input.
    layer_input_vocab: Number of rows of the embedding of the per-layer inputs; 0 without them.
    gated_heads: True if each query head's output is multiplied by a sigmoid gate.
    delta: Sizes of the gated delta layers; None: every layer attends.
    latent: Sizes of multi-head latent attention; None: every head has keys and values in the pages.
    published: How matrices are quantized in the files; None: they are not.
    text_of: The model_type of the model with images whose text part this config is; None: it is no part of
        such a model.
    transformers: The fields of config.json as JSON text, for a family that runs through Transformers' own
        code because our decoder does not know it; None: our decoder runs the model.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    max_positions: int
    tied: bool
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos: tuple[int, ...] = ()
    names: Names = LLAMA.names
    norm: NormKind = "rms"
    mlp: MlpKind = "gated"
    activation: Activation = "silu"
    parallel: bool = False
    whole_qk_norm: bool = False
    routing: Routing | None = None
    clamp: tuple[float, float] | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    query_scalar: float | None = None
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    sliding_rope: Rope | None = None
    window: int | None = None
    windowed: frozenset[int] = frozenset()
    unrotated: frozenset[int] = frozenset()
    wide: tuple[int, int] | None = None
    keys_as_values: bool = False
    values_normed: bool = False
    first_reader: int | None = None
    stores_kv: bool = True
    reader_intermediate: int | None = None
    layer_input_size: int = 0
    layer_input_vocab: int = 0
    gated_heads: bool = False
    delta: Delta | None = None
    latent: Latent | None = None
    published: Published | None = None
    text_of: str | None = None
    transformers: str | None = None

    def recurrent(self, layer: int) -> bool:
        """Return whether a layer is a gated delta layer. False for every layer if the model has none.

        layer: number of the layer, counted from 0.
        """
        return self.delta is not None and layer in self.delta.layers

    def of_layer(self, layer: int) -> ModelConfig:
        """Return this config as it holds for one layer; `self` if `wide` is None.

        The heads are those of the layer. In a layer that reads the keys and values of another one,
        `stores_kv` is False, and `intermediate` is `reader_intermediate` if the model has one. In a layer in
        `windowed`, `keys_as_values` is False.

        layer: number of the layer, counted from 0.
        """
        if self.wide is None:
            return self
        config = self
        if self.kv_source(layer) != layer:
            width = self.reader_intermediate or self.intermediate
            config = replace(self, stores_kv=False, intermediate=width)
        if layer in self.windowed:
            return replace(config, keys_as_values=False)
        kv_heads, head_dim = self.wide
        return replace(config, kv_heads=kv_heads, head_dim=head_dim)

    def kv_source(self, layer: int) -> int:
        """Return the number of the layer whose keys and values a layer reads: itself, or, for the layers from
        `first_reader` on, the last layer before `first_reader` of the same kind: in `windowed`, or not.

        layer: number of the layer, counted from 0.

            # layers 2 and 4 of 0 .. 5 have windows, first_reader 4: layer 4 reads layer 2, layer 5 layer 3
        """
        if self.first_reader is None or layer < self.first_reader:
            return layer
        is_windowed = layer in self.windowed
        return max(one for one in range(self.first_reader) if (one in self.windowed) == is_windowed)

    @property
    def tail(self) -> int:
        """Return how many of the last layers one stage must hold, because the last layers read the keys and
        values of earlier ones among them: at least 1, as every stage has a layer.
        """
        if self.first_reader is None:
            return 1
        return self.layers - min(map(self.kv_source, range(self.first_reader, self.layers)))

    def why_not_split(self, first: int, last: int) -> str:
        """Return why the layers `first` .. `last` - 1 cannot be a stage, in words; "" if they can.

        first: number of the first layer of the stage, counted from 0.
        last: number of the layer after its last one.
        """
        start = self.layers - self.tail
        if self.first_reader is None or (first <= start and (last <= start or last == self.layers)):
            return ""
        sources = sorted({self.kv_source(layer) for layer in range(self.first_reader, self.layers)})
        cuts = f"the model can be cut before layers 1 to {start}" if start else "the model cannot be cut"
        return (
            f"layers {self.first_reader}:{self.layers} read the keys and values of "
            f"{' and '.join(f'layer {source}' for source in sources)}, so that one stage must hold layers "
            f"{start}:{self.layers}, and {first}:{last} cannot be a stage: {cuts}"
        )

    def rope_of(self, layer: int) -> Rope:
        """Return the rotary settings of a layer.

        layer: number of the layer, counted from 0.
        """
        if layer in self.unrotated:
            return UNROTATED
        return (self.sliding_rope if layer in self.windowed else None) or self.rope

    @property
    def stored_tensors(self) -> int:
        """Return how many rows of `head_dim` elements the pages hold of a token in each KV head: 2, a key and
        a value, or 1 with `latent`, where one row is both.
        """
        return 2 if self.latent is None else 1

    @property
    def allows_policies(self) -> bool:
        """Return whether a request may have a KV policy, which hides tokens from layers that attend.

        False with gated delta layers, whose states contain every token, with layers without rotary positions,
        whose queries must not be rotated towards the first tokens, with layers of different heads, and with
        latent attention, for which policies were not tested.
        """
        return not (self.delta or self.unrotated or self.wide or self.latent)

    def sparse(self, layer: int) -> bool:
        """Return whether a layer has experts. False for every layer if the model has none.

        layer: number of the layer, counted from 0.
        """
        return self.routing is not None and layer not in self.routing.dense


def read_config(directory: Path) -> ModelConfig:
    """Return the shape of the model in a directory, as its config.json describes it.

    directory: the model directory. Its generation_config.json is used if it has one.

    Raises a ModelError that names the file and what is wrong.

    Raises ModelError if there is no config.json, if a file is no JSON object, and as `make_config` does.
    """
    require_model_directory(directory)
    source = directory / "config.json"
    generation = directory / "generation_config.json"
    return make_config(read_json(source), read_json(generation) if generation.exists() else {}, source)


def make_config(values: Json, generation: Json, source: Path) -> ModelConfig:
    """Return the shape of a model, from the fields of config.json and generation_config.json.

    values: the fields of config.json.
    generation: the fields of generation_config.json; empty if there is no such file.
    source: path of config.json, for error messages.

    A family that `FAMILIES` does not have gets a config with `transformers`; see `other_family_config`.
    Raises ModelError for a missing model_type, and for fields that are missing or wrong.

    The fields of a model with images are those of its text part, see `text_fields`. Raises ModelError also
    for a quantization that is not supported.
    """
    outer_type = str(values.get("model_type"))
    values = text_fields(values, source)
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None and isinstance(values.get("model_type"), str):
        return other_family_config(values, generation, source)
    if family is None:
        known = ", ".join((*FAMILIES, *WITH_IMAGES))
        raise ModelError(f"{source}: model_type {values.get('model_type')!r} is not one of {known}")
    published = read_published(values, source)
    text_of = outer_type if outer_type in WITH_IMAGES else None
    return _read(Fields(source, values), family, _eos(values, generation, source), published, text_of)


def other_family_config(values: Json, generation: Json, source: Path) -> ModelConfig:
    """Return the config of a model that runs through Transformers' own code, whatever its family is.

    Fields that describe how a layer computes keep their defaults, because Transformers' code computes it.

    values: the fields of config.json, of a model of text alone.
    generation: the fields of generation_config.json; empty if there is no such file.
    source: path of config.json, for error messages.

    Raises ModelError as `read_sizes` does, and for a quantization that is not supported.
    """
    return ModelConfig(
        model_type=str(values["model_type"]),
        eps=LLAMA.eps,
        rope=Rope(),
        eos=_eos(values, generation, source),
        published=read_published(values, source),
        **read_sizes(Fields(source, values)),
    )


def text_fields(values: Json, source: Path) -> Json:
    """Return the fields that describe the text model; `values` itself for a model of text alone.

    For a model with images, these are the fields of its `text_config`, and those fields of the whole config
    that OF_THE_WHOLE names and that are not null, which have precedence. A `text_config` without a model_type
    gets the default of the outer model_type; `tie_word_embeddings` applies if either config has it set.

    values: the fields of config.json.
    source: path of config.json, for error messages.

    Raises ModelError if a model with images has no `text_config`, or one that is no object.
    """
    default_type = WITH_IMAGES.get(str(values.get("model_type")))
    if default_type is None:
        return values
    text: Any = values.get("text_config")
    Fields(source, values).require(isinstance(text, dict), f"text_config must be an object, got {text!r}")
    outer = {name: values[name] for name in OF_THE_WHOLE if values.get(name) is not None}
    tied = {"tie_word_embeddings": True} if values.get("tie_word_embeddings") else {}
    return {"model_type": default_type, **text, **outer, **tied}


def _read(
    fields: Fields, family: Family, eos: tuple[int, ...], published: Published | None, text_of: str | None
) -> ModelConfig:
    """Return the shape of a model, from the fields of its config; the family supplies what the config leaves
    out.

    fields: the fields that describe the text model.
    family: defaults and tensor names of the model's family.
    eos: token ids that end a sequence.
    published: how the weights are published quantized, or None.
    text_of: the model_type of the model with images to which this text model belongs, or None.

    Raises ModelError for fields that are missing or wrong.

    A null in the config counts as absent, except where a reader of one field says otherwise.
    """
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads", family.heads)
    latent = None if family.latent is None else _latent(fields, family.latent)
    kv_heads, head_dim = (1, latent.row) if latent else _heads(fields, family, hidden, heads)
    rope = _latent_rope(fields, family, latent) if latent else _rope(fields, family, head_dim)
    bias = fields.flag("attention_bias", family.attention_bias)
    if family.dense_hybrid:
        _require_dense(fields)
    sparse = family.routing is not None and (not family.global_heads or fields.flag("enable_moe_block"))
    window, windowed = _windowed(fields, family)
    return ModelConfig(
        model_type=str(fields.values["model_type"]),
        hidden=hidden,
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.count("shared_intermediate_size", 1024)
        if family.dense_hybrid
        else fields.count("intermediate_size", fields.values.get(family.width_field)),
        vocab=fields.count("vocab_size", family.vocab),
        max_positions=_positions(fields, family),
        tied=fields.flag("tie_word_embeddings", family.tied),
        rope=rope,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias if family.out_bias is None else family.out_bias,
        mlp_bias=fields.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=fields.flag("use_qk_norm") if family.qk_norm is None else family.qk_norm,
        whole_qk_norm=family.whole_qk_norm,
        eos=eos,
        names=_names(family, sparse),
        norm=family.norm,
        mlp=family.mlp,
        activation=_activation(fields, family),
        parallel=family.parallel and fields.flag("use_parallel_residual", True),
        published=published,
        text_of=text_of,
        clamp=_clamp(fields, family),
        norm_offset=family.norm_offset,
        **_scales(fields, family, hidden, latent),
        sliding_rope=_sliding_rope(fields, family, rope),
        **_softcaps(fields, family),
        window=window,
        windowed=windowed,
        unrotated=_unrotated(fields, family),
        gated_heads=family.gated_heads,
        delta=None if family.delta is None else _delta(fields, family.delta),
        latent=latent,
        routing=_routing(fields, family, family.routing) if family.routing and sparse else None,
        **(_wide(fields, heads, kv_heads) if family.global_heads else {}),
        **(_layer_inputs_and_readers(fields, family, windowed) if family.global_heads else {}),
    )


def _heads(fields: Fields, family: Family, hidden: int, heads: int) -> tuple[int, int]:
    """Return the number of KV heads, and the number of elements of a head.

    fields: the fields of the config.
    family: the model's family.
    hidden: the hidden size.
    heads: the number of query heads.

    Raises ModelError if heads do not divide evenly, or if a head's number of elements is odd.

    In a family without a head_dim of its own, the number of KV heads is that of query heads, and head_dim is
    hidden / heads. Otherwise the config's values apply, then the family's, then `heads` and hidden / heads.
    """
    if not family.own_head_dim:
        fields.require(hidden % heads == 0, f"hidden_size {hidden} does not divide into {heads} heads")
        return heads, _even(fields, "hidden_size / num_attention_heads", hidden // heads)
    kv_heads = fields.count("num_key_value_heads", family.kv_heads or heads)
    fields.require(heads % kv_heads == 0, f"{heads} heads do not divide into {kv_heads} key-value heads")
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads or None)
    return kv_heads, _even(fields, "head_dim", head_dim)


def _latent(fields: Fields, defaults: Latent) -> Latent:
    """Return the sizes of multi-head latent attention.

    fields: the fields of the config. A q_lora_rank of null means that queries have no vector of their own.
    defaults: the sizes that the config does not have.

    Raises ModelError for sizes that are no integers above 0, for an odd number of rotated elements, and if
    projections have biases.
    """
    fields.require(not fields.flag("attention_bias"), "attention_bias is not supported with latent attention")
    direct = "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None
    return Latent(
        fields.count("kv_lora_rank", defaults.rank),
        _even(fields, "qk_rope_head_dim", fields.count("qk_rope_head_dim", defaults.rotated)),
        fields.count("qk_nope_head_dim", defaults.unrotated),
        fields.count("v_head_dim", defaults.value),
        None if direct else fields.count("q_lora_rank", defaults.query_rank),
        fields.flag("rope_interleave", defaults.interleaved),
    )


def _latent_rope(fields: Fields, family: Family, latent: Latent) -> Rope:
    """Return the rotary settings of latent attention, whose rows begin with their rotated elements.

    fields: the fields of the config. A fraction of heads that rotates is not read.
    family: the model's family.
    latent: sizes of the attention.

    Raises ModelError as `read_rope` does.
    """
    rope = read_rope(fields.values, fields.source, family)
    # The next larger number, because `Rope.rotated` rounds down.
    return replace(rope, share=nextafter(latent.rotated / latent.row, 1.0))


def _positions(fields: Fields, family: Family) -> int:
    """Return the length of the model's context, in tokens. With sparse attention, it is at most as many
    tokens as a token attends to: up to there, attention to all tokens is the same.

    fields: the fields of the config.
    family: the model's family.
    """
    positions = fields.count("max_position_embeddings", family.positions)
    return (
        positions if family.selected is None else min(positions, fields.count("index_topk", family.selected))
    )


def _even(fields: Fields, name: str, value: int) -> int:
    """Return `value`, or raise ModelError if it is odd.

    fields: the fields of the config, which name the file.
    name: name of the field, for the error message.
    value: the value of the field.
    """
    fields.require(value % 2 == 0, f"{name} must be even, got {value}")
    return value


def _rope(fields: Fields, family: Family, head_dim: int) -> Rope:
    """Return the rotary settings of the model's layers.

    fields: the fields of the config.
    family: the model's family.
    head_dim: number of elements of a head.

    Raises ModelError unless a positive, even number of a head's dimensions rotates.

    The number of rotated dimensions is head_dim times the fraction, rounded down. A `rotary_dim` in the
    config gives the fraction if the field of the family is missing.
    """
    values = dict(fields.values)
    # MiniMax writes rotary_dim in place of the family's field.
    if values.get("rotary_dim") is not None:
        values.setdefault(family.share_field, fields.count("rotary_dim") / head_dim)
    rope = read_rope(values, fields.source, family)
    rotated = rope.rotated(head_dim)
    fields.require(
        rotated >= 2 and rotated % 2 == 0,
        f"{family.share_field} {rope.share} turns {rotated} of a head's {head_dim} dimensions; that must be "
        "an even number > 0",
    )
    return rope


def _routing(fields: Fields, family: Family, defaults: Routing) -> Routing:
    """Return how the tokens of a layer go to experts.

    The number of experts is called num_experts in Qwen's published configs, num_local_experts in Mixtral's
    and in Qwen configs saved by Transformers 5, and n_routed_experts in GLM's.

    fields: the fields of the config.
    family: the model's family.
    defaults: the values of fields that the config does not have.

    Raises ModelError if a token would choose more experts than there are, or if fields are wrong.

    The layers without experts are in `dense`; `shared` is 0 if the family has no MLP that every token runs.
    """
    words = ("num_experts", "n_routed_experts", "num_local_experts")
    count_field = next((word for word in words if fields.values.get(word) is not None), words[-1])
    experts = fields.count(count_field, defaults.experts)
    num_chosen = fields.count(family.chosen_field, defaults.chosen)
    fields.require(
        num_chosen <= experts, f"{family.chosen_field} is {num_chosen}, {count_field} only {experts}"
    )
    width = fields.count(family.width_field, defaults.width)
    groups, num_open_groups = _groups(fields, experts, num_chosen)
    return replace(
        defaults,
        experts=experts,
        chosen=num_chosen,
        width=width,
        normalised=fields.flag("norm_topk_prob", defaults.normalised),
        scale=fields.number("routed_scaling_factor", defaults.scale),
        groups=groups,
        open_groups=num_open_groups,
        shared=_shared_width(fields, width) if family.names.shared else 0,
        dense=_dense_layers(fields, family),
    )


def _groups(fields: Fields, experts: int, num_chosen: int) -> tuple[int, int]:
    """Return the number of groups of experts, and from how many of them a token chooses: (1, 1) if the config
    names no groups, or a `topk_method` without groups. The second number is at most the first.

    fields: the fields of the config.
    experts: number of experts of a layer.
    num_chosen: number of experts per token.

    Raises ModelError if experts do not divide into the groups, or if the open groups have too few experts.

    Raises ModelError also if a group has fewer than two experts.
    """
    if fields.values.get("topk_method") == "greedy":
        return 1, 1
    groups = fields.count("n_group", 1)
    num_open_groups = fields.count("topk_group", 1)
    fields.require(
        groups == 1
        or (
            experts % groups == 0
            and experts >= 2 * groups
            and num_open_groups * experts >= num_chosen * groups
        ),
        f"{num_open_groups} of {groups} groups (topk_group, n_group) of {experts} experts do not hold "
        f"{num_chosen} to choose, or groups are not of two or more each",
    )
    return groups, min(num_open_groups, groups)


def _shared_width(fields: Fields, width: int) -> int:
    """Return the width of the shared MLP: Qwen names it, GLM counts shared experts of an expert's width.
    Without either field, it is the width of one expert.

    fields: the fields of the config.
    width: width of an expert.
    """
    return fields.index("shared_expert_intermediate_size", width * fields.index("n_shared_experts", 1))


def _dense_layers(fields: Fields, family: Family) -> frozenset[int]:
    """Return the layers without experts; none if every layer has experts.

    These are the first `first_k_dense_replace` layers, those of `mlp_only_layers`, and all layers but every
    `decoder_sparse_step`-th. If there are `mlp_layer_types`, they are the layers of the type "dense" instead.

    fields: the fields of the config.
    family: the model's family.

    Raises ModelError if `mlp_only_layers` are no numbers.

    Layers are numbered from 0. With a `decoder_sparse_step` of n, only the layers n - 1, 2n - 1, ... have
    experts.
    """
    if isinstance(kinds := fields.values.get("mlp_layer_types"), list):
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    layers, step = fields.count("num_hidden_layers"), fields.count("decoder_sparse_step", 1)
    listed_layers = fields.values.get("mlp_only_layers") or []
    fields.require(
        isinstance(listed_layers, list) and all(isinstance(layer, int) for layer in listed_layers),
        f"mlp_only_layers must be numbers of layers, got {listed_layers!r}",
    )
    first = fields.index("first_k_dense_replace", family.first_dense)
    dense = (layer < first or layer in listed_layers or (layer + 1) % step for layer in range(layers))
    return frozenset(layer for layer, is_dense in enumerate(dense) if is_dense)


def _activation(fields: Fields, family: Family) -> Activation:
    """Return the activation function, from `hidden_activation`, else `hidden_act`, else the family's default.
    Raises ModelError for an unknown one.

    fields: the fields of the config.
    family: the model's family, which has the default.
    """
    name = fields.values.get("hidden_activation") or fields.values.get("hidden_act") or family.activation
    fields.require(
        isinstance(name, str) and name in ACTIVATIONS,
        f"hidden_act {name!r} is not one of {', '.join(ACTIVATIONS)}",
    )
    return ACTIVATIONS[name]


def _clamp(fields: Fields, family: Family) -> tuple[float, float] | None:
    """Return (limit, gain) of the clamped SwiGLU in the MLPs, or None if the family has no clamp.

    fields: the fields of the config.
    family: the model's family, which has the defaults.

    Fields that the config does not have are taken from the family. Raises ModelError for a number that is not
    above 0.
    """
    if family.clamp is None:
        return None
    limit, gain = family.clamp
    return fields.number("swiglu_limit", limit), fields.number("swiglu_alpha", gain)


def _delta(fields: Fields, defaults: Delta) -> Delta:
    """Return which layers are gated delta layers, and their sizes.

    `layer_types` names them; without it, all layers but every `full_attention_interval`-th are gated delta
    layers.

    fields: the fields of the config.
    defaults: the sizes that the config does not have.

    Raises ModelError if `layer_types` does not fit the number of layers, or if value heads do not divide into
    key heads.

    Without `layer_types` and interval, every fourth layer attends; a null or empty `layer_types` counts as
    absent. Raises ModelError also for sizes that are no integers above 0.
    """
    count = fields.count("num_hidden_layers")
    interval = fields.count("full_attention_interval", 4)
    kinds = fields.values.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)
    ]
    known = {"linear_attention", "full_attention"}
    fields.require(
        isinstance(kinds, list) and len(kinds) == count and known.issuperset(map(str, kinds)),
        f"layer_types must be {count} of {', '.join(sorted(known))}",
    )
    keys = fields.count("linear_num_key_heads", defaults.key_heads)
    values = fields.count("linear_num_value_heads", defaults.value_heads)
    fields.require(values % keys == 0, f"{values} value heads do not divide into {keys} key heads")
    return Delta(
        keys,
        values,
        fields.count("linear_key_head_dim", defaults.key_dim),
        fields.count("linear_value_head_dim", defaults.value_dim),
        fields.count("linear_conv_kernel_dim", defaults.kernel),
        frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        defaults.apart,
    )


def _scales(fields: Fields, family: Family, hidden: int, latent: Latent | None) -> dict[str, Any]:
    """Return the epsilon of the norms and the factors of embeddings, attention scores, residual stream and
    logits, as arguments of `ModelConfig`.

    fields: the fields of the config.
    family: the model's family.
    hidden: the hidden size.
    latent: sizes of latent attention; None: the model has ordinary attention.

    Raises ModelError for a factor that is no number above 0.
    """
    eps = fields.number(family.eps_field, family.eps)
    if latent is not None:
        # Scores are divided by the root of a query's elements, and multiplied by yarn's factor.
        factor = read_score_factor(fields.values, fields.source)
        return {"eps": eps, "query_scalar": latent.query / factor**2}
    if not family.multiplied:
        scalar = family.query_scalar and fields.count("query_pre_attn_scalar", family.query_scalar)
        return {"eps": eps, "embedding_scale": hidden**0.5 if family.scaled else 1.0, "query_scalar": scalar}
    residual = fields.number("residual_multiplier", 1.0)
    return {
        "eps": eps / residual**2,
        "embedding_scale": fields.number("embedding_multiplier", 1.0) / residual,
        "query_scalar": fields.number("attention_multiplier", 1.0) ** -2,
        "residual_scale": residual,
        "logit_divisor": fields.number("logits_scaling", 1.0),
    }


def _sliding_rope(fields: Fields, family: Family, rope: Rope) -> Rope | None:
    """Return the rotary settings of sliding-window layers, or None if they are those of the other layers.

    fields: the fields of the config.
    family: the model's family.
    rope: the rotary settings of the other layers.

    Raises ModelError as `read_sliding_rope` does.
    """
    theta = rope.theta if family.windows_unscaled else family.sliding_theta
    return None if theta is None else read_sliding_rope(fields, theta)


def _names(family: Family, sparse: bool) -> Names:
    """Return the names of the model's tensors.

    family: the model's family.
    sparse: whether the model has experts.

    With experts in parallel to an MLP, the residual stream is normed by the names in `parallel_norms` alone.
    """
    if family.names.parallel_norms is None:
        return family.names
    return replace(family.names, mlp_norm="") if sparse else replace(family.names, parallel_norms=None)


def _wide(fields: Fields, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return what differs in Gemma 4's layers without a window, as arguments of `ModelConfig`.

    fields: the fields of the config, either as published (global_head_dim, num_global_key_value_heads) or as
        Transformers writes them (per_layer_config).
    heads: number of query heads.
    kv_heads: number of KV heads of the other layers.

    Raises ModelError if a number is wrong, or if these layers differ from each other.
    """
    by_layer = fields.values.get("per_layer_config")
    equal_keys = fields.flag("attention_k_eq_v")
    if by_layer is not None:
        # Transformers writes no layer if these layers have the heads of the others.
        kinds = list(by_layer.values()) or [{}] if isinstance(by_layer, dict) else []
        fields.require(
            bool(kinds) and all(isinstance(kind, dict) and kind == kinds[0] for kind in kinds),
            "per_layer_config must have the same numbers for all its layers",
        )
        whole = Fields(fields.source, kinds[0])
        wide_kv_heads = whole.count("num_key_value_heads", kv_heads)
        head_dim = whole.count("head_dim", fields.count("head_dim", 256))
    else:
        wide_kv_heads = fields.count("num_global_key_value_heads", kv_heads) if equal_keys else kv_heads
        head_dim = fields.count("global_head_dim", 512)
    fields.require(
        heads % wide_kv_heads == 0, f"{heads} heads do not divide into {wide_kv_heads} key-value heads"
    )
    return {
        "wide": (wide_kv_heads, _even(fields, "global_head_dim", head_dim)),
        "keys_as_values": equal_keys,
        "values_normed": True,
    }


def _layer_inputs_and_readers(fields: Fields, family: Family, windowed: frozenset[int]) -> dict[str, Any]:
    """Return what Gemma 4 E2B and E4B have and the larger models do not, as arguments of `ModelConfig`:
    per-layer inputs, and layers that read the keys and values of earlier ones.

    fields: the fields of the config.
    family: the model's family.
    windowed: numbers of the sliding-window layers.

    Raises ModelError if no layer with keys and values has the kind of attention of a layer without them, if
    the embedding of the per-layer inputs has fewer rows than there are token ids, and if tokens see later
    tokens.
    """
    fields.require(
        fields.values.get("use_bidirectional_attention") != "all",
        "use_bidirectional_attention 'all' is not supported",
    )
    size = fields.index("hidden_size_per_layer_input", family.layer_input_size)
    vocab = fields.count("vocab_size", family.vocab)
    rows = fields.count("vocab_size_per_layer_input", vocab) if size else 0
    fields.require(
        not size or rows >= vocab, f"vocab_size_per_layer_input is {rows}, less than vocab_size {vocab}"
    )
    layers, num_readers = fields.count("num_hidden_layers"), fields.index("num_kv_shared_layers", 0)
    found: dict[str, Any] = {"layer_input_size": size, "layer_input_vocab": rows}
    if not num_readers:
        return found
    first = layers - num_readers
    kinds = {layer in windowed for layer in range(max(first, 0))}
    fields.require(
        {layer in windowed for layer in range(max(first, 0), layers)} <= kinds,
        f"num_kv_shared_layers is {num_readers} of {layers} layers, and the others do not have both kinds of "
        "attention",
    )
    wide = fields.flag("use_double_wide_mlp")
    width = 2 * fields.count("intermediate_size") if wide else None
    return found | {"first_reader": first, "reader_intermediate": width}


def _require_dense(fields: Fields) -> None:
    """Return None if every layer attends and has one MLP. Raises ModelError for Mamba layers and for experts,
    which some models of Granite 4's family have.

    fields: the fields of the config.
    """
    count = fields.count("num_hidden_layers")
    kinds = fields.values.get("layer_types") or fields.values.get("layers_block_type") or []
    fields.require(
        isinstance(kinds, list)
        and [kind in ("attention", "full_attention") for kind in kinds] == [True] * count,
        "Mamba layers are not supported, only attention in every layer",
    )
    fields.require(
        fields.index("num_local_experts", 8) == 0,
        "num_local_experts must be 0, experts of this family are not supported",
    )


def _softcaps(fields: Fields, family: Family) -> dict[str, Any]:
    """Return the caps of attention scores and logits, as arguments of `ModelConfig`. A cap is None if the
    config has null, and the family's default if the config does not have the field.

    Returns an empty dict for a family without caps.

    fields: the fields of the config.
    family: the model's family, which has the defaults.

    Raises ModelError for a cap that is no number above 0.
    """
    if family.softcaps is None:
        return {}
    named = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    caps = {
        name: fields.values.get(word, default)
        for (name, word), default in zip(named.items(), family.softcaps)
    }
    return {name: None if cap is None else fields.number(named[name], cap) for name, cap in caps.items()}


def _windowed(fields: Fields, family: Family) -> tuple[int | None, frozenset[int]]:
    """Return the window of sliding-window layers, and which layers these are.

    Return (None, no layers) if every layer sees all positions, or if no sequence can exceed the window.

    fields: the fields of the config.
    family: the model's family.

    The set of layers holds numbers from 0; the window is in positions. Also returns (None, no layers) if the
    config's window is null, if the family has windows only where use_sliding_window is true and it is not,
    and if no layer is of the sliding kind. Raises ModelError for wrong fields.
    """
    enabled = family.window == "asked" and fields.flag("use_sliding_window")
    rows = fields.values.get("sliding_window", family.window_rows)
    if rows is None or not (enabled or family.window == "always"):
        return None, frozenset()
    window = fields.count("sliding_window", rows)
    layers = fields.count("num_hidden_layers")
    is_sliding = [kind == "sliding_attention" for kind in _layer_types(fields, family, layers)]
    own_rope = family.windows_unscaled or family.sliding_theta is not None
    never_reached = not own_rope and window >= fields.count("max_position_embeddings", family.positions)
    if not any(is_sliding) or never_reached:
        return None, frozenset()
    return window, frozenset(layer for layer, one in enumerate(is_sliding) if one)


def _unrotated(fields: Fields, family: Family) -> frozenset[int]:
    """Return the layers without rotary positions: those with a 0 in `no_rope_layers`, else every
    `no_rope_layer_interval`-th. Return none for a family in which all layers rotate.

    fields: the fields of the config.
    family: the model's family.

    Raises ModelError if `no_rope_layers` is no list of 0 and 1, or is shorter than the number of layers.

        # no_rope_layers [1, 1, 1, 0, 1] of 5 layers -> {3}
    """
    layers = fields.count("num_hidden_layers")
    if family.dense_hybrid and fields.values.get("position_embedding_type") != "rope":
        return frozenset(range(layers))
    if not family.unrotated_interval:
        return frozenset()
    flags = fields.values.get("no_rope_layers")
    if flags is None:
        interval = fields.count("no_rope_layer_interval", family.unrotated_interval)
        return frozenset(range(interval - 1, layers, interval))
    fields.require(
        isinstance(flags, list) and len(flags) >= layers and all(flag in (0, 1) for flag in flags),
        f"no_rope_layers must be 0 or 1 for each of {layers} layers",
    )
    return frozenset(layer for layer, rotates in enumerate(flags[:layers]) if not rotates)


def _layer_types(fields: Fields, family: Family, layers: int) -> list[str]:
    """Return the attention kind of every layer, "full_attention" or "sliding_attention": from `layer_types`
    of the config, else by the family's rule.

    fields: the fields of the config.
    family: the model's family.
    layers: number of layers.

    Raises ModelError if `layer_types` names too few layers or another kind.

        # sliding_window_pattern 3, 6 layers -> sliding, sliding, full, sliding, sliding, full

    If `layer_types` names more layers than the model has, the rest is ignored.
    """
    kinds = ("full_attention", "sliding_attention")
    listed_kinds = fields.values.get("layer_types")
    if listed_kinds is None:
        first = fields.index("max_window_layers", family.whole_layers) if family.whole_layers else 0
        pattern = fields.index("sliding_window_pattern", family.pattern)
        is_sliding = (
            layer >= first and (not pattern or (layer + 1) % pattern > 0) for layer in range(layers)
        )
        # SmolLM3's windows are in the layers without rotary positions.
        if family.unrotated_interval:
            unrotated = _unrotated(fields, family)
            is_sliding = (layer in unrotated for layer in range(layers))
        return [kinds[one] for one in is_sliding]
    fields.require(
        isinstance(listed_kinds, list)
        and len(listed_kinds) >= layers
        and all(kind in kinds for kind in listed_kinds),
        f"layer_types must be {' or '.join(kinds)} for each of {layers} layers",
    )
    return listed_kinds[:layers]


def _eos(values: Json, generation: Json, source: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids: those of generation_config.json if it has any, else of config.json.

    Returns an empty tuple if neither file names ids.

    values: the fields of config.json.
    generation: the fields of generation_config.json.
    source: path of config.json, for error messages.

    Raises ModelError for values that are no token ids.

    A single id counts as a list of one. A bool, a negative number and a text are no token ids. Ids of
    generation_config.json replace those of config.json; they are not merged. An empty list in
    generation_config.json gives ().
    """
    generation_ids = generation.get("eos_token_id")
    stored_ids = values.get("eos_token_id") if generation_ids is None else generation_ids
    ids = stored_ids if isinstance(stored_ids, list) else [] if stored_ids is None else [stored_ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ModelError(f"{source}: eos_token_id must be token ids, got {stored_ids!r}")
    return tuple(ids)


# File in a model directory with what was measured of its KV heads.
HEADS_FILE = "kv_heads.json"


def read_heads(directory: Path, config: ModelConfig) -> HeadWindows | None:
    """Read the KV window of every head from kv_heads.json, or return None if there is no such file.

    directory: the model directory.
    config: the model's config, which the file must fit.

    Raises ModelError if the file is malformed or belongs to another model.
    """
    return _read_heads(directory, config, lambda layers: HeadWindows(_of_heads(layers, _head_window)))


def read_importance(directory: Path, config: ModelConfig) -> HeadImportance | None:
    """Return the importance of every KV head, from kv_heads.json.

    Returns None if it was not measured: there is no file, or the file is of an earlier version, which has
    windows alone.

    directory: the model directory.
    config: the model's config, which the file must fit.

    Raises ModelError if the file is malformed or belongs to another model.

    Raises ModelError also if only some heads have an importance.
    """

    def importance_of(layers: Any) -> HeadImportance | None:
        """Return the importance of all heads, or None if no head has one.

        layers: the `layers` of the file.
        """
        if all("importance" not in head for heads in layers for head in heads):
            return None
        return HeadImportance(_of_heads(layers, lambda head: head["importance"]))

    return _read_heads(directory, config, importance_of)


_Heads = TypeVar("_Heads", HeadWindows, HeadWindows | None, HeadImportance | None)


def _read_heads(directory: Path, config: ModelConfig, read: Callable[[Any], _Heads]) -> _Heads | None:
    """Return what `read` makes of the `layers` in the file of measured heads, or None if there is no file.

    directory: the model directory.
    config: the model's config, which the file must fit.
    read: makes a value of the `layers`.

    Raises ModelError if the file is malformed or has another number of layers or KV heads than the model.

    Also returns None if `read` does. A file is malformed if it has no `layers`, or if `read` raises KeyError,
    TypeError, AttributeError or InvalidRequest.
    """
    path = directory / HEADS_FILE
    if not path.is_file():
        return None
    try:
        layers = read_json(path)["layers"]
        heads = read(layers)
    except (KeyError, TypeError, AttributeError, InvalidRequest) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from None
    file_shape = (len(layers), len(layers[0]))
    model_shape = (config.layers, config.kv_heads)
    if file_shape != model_shape:
        raise ModelError(
            f"{path}: {file_shape[0]} layers of {file_shape[1]} KV heads, the model has {model_shape}"
        )
    return heads


_Head = TypeVar("_Head")


def _of_heads(layers: Any, read: Callable[[Any], _Head]) -> tuple[tuple[_Head, ...], ...]:
    """Return a value for every head of every layer.

    layers: by layer and KV head, an object of the file.
    read: makes a value of one object.
    """
    return tuple(tuple(read(head) for head in heads) for heads in layers)


def write_heads(
    path: Path, layers: Sequence[Sequence[Mapping[str, Any]]], measured: Mapping[str, Any]
) -> None:
    """Write a file of measured heads, which `read_heads` and `read_importance` read.

    path: the file to write. An existing file is replaced.
    layers: By layer and KV head, an object with `sinks`, `recent` (None: all positions) and `importance`, and
        whatever else a reader of the file should know.
    measured: How the heads were measured, for readers of the file.

    Raises OSError if the file cannot be written.
    """
    lines = ",\n".join(f"    {json.dumps(list(heads))}" for heads in layers)
    path.write_text(f'{{\n  "measured": {json.dumps(dict(measured))},\n  "layers": [\n{lines}\n  ]\n}}\n')


def _head_window(head: Mapping[str, Any]) -> tuple[int, int]:
    """Return (sinks, recent) of a head, in tokens; MAX_TOKENS recent tokens if `recent` is null, which means
    all positions.

    head: the object of one head.

    Raises KeyError if the object lacks either field.
    """
    recent = head["recent"]
    return head["sinks"], MAX_TOKENS if recent is None else recent
