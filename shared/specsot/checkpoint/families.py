"""Families of base models (`model_type`): what their tensors are called, and what their configs leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

NormKind = Literal["rms", "layer"]
MlpKind = Literal["gated", "plain", "experts"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Names:
    """Tensors of one family, without `.weight` and `.bias`.

    layer: of layer {}; what follows it here is inside a layer, and under `attention` the projections.
    qkv:   one tensor of them; empty where q_proj, k_proj, v_proj are apart. qkv_by_head: its rows are
    [heads, 3, head_dim], else queries, keys, values.
    after_attention, after_mlp: norms over what both add; empty where there are none.
    gate_up: one tensor of both; empty where they are apart.
    gate, up, down: of an MLP; gate is empty where there is none. experts: the same three of expert {};
    shared: of the MLP beside them, and shared_gate: what opens it, where a layer has these.
    correction: of the router, without a suffix; empty where there is none.
    stacked: one tensor of all experts' gates and ups, and one of their downs; in GGUF files they are apart.
    whole_experts: the same of experts that may be published either way, as products read them.
    sinks: a score of each query head, without a suffix; empty where there is none.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    qkv: str = ""
    qkv_by_head: bool = False
    after_attention: str = ""
    after_mlp: str = ""
    out: str = "o_proj"
    sinks: str = ""
    router: str = ""
    correction: str = ""
    experts: tuple[str, str, str] = ("", "", "")
    stacked: tuple[str, str] | None = None
    whole_experts: tuple[str, str] | None = None
    shared: tuple[str, str, str] | None = None
    shared_gate: str = ""
    gate_up: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


def _three(mlp: str) -> tuple[str, str, str]:
    """Gate, up and down of a gated MLP."""
    return f"{mlp}.gate_proj", f"{mlp}.up_proj", f"{mlp}.down_proj"


QWEN_EXPERTS = Names(router="mlp.gate", experts=_three("mlp.experts.{}"))
MIXTRAL_EXPERTS = Names(
    router="block_sparse_moe.gate",
    experts=(
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer's rows go to experts: each to the `chosen` with the highest scores.

    width: of each expert. score: what the router's logits become; weights are scores.
    normalised: whether a row's weights sum to 1 before they are multiplied by `scale`.
    groups: of neighbouring experts; a row chooses from the `open_groups` whose two best scores sum to most.
    biased: whether the router adds a number of each expert's to its logits, and experts have biases.
    corrected: whether choices, not weights, go by scores plus a learned number of each expert.
    shared: width of an MLP that every row goes through besides; 0: there is none.
    dense: layers that have one MLP instead.
    """

    experts: int
    chosen: int
    width: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    open_groups: int = 1
    biased: bool = False
    corrected: bool = False
    shared: int = 0
    dense: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated delta layers: heads of queries and keys, heads of values, their dimensions; the rows that a
    convolution reads. layers: which ones they are; the others attend. apart: the projections that read a row
    are tensors of their own (Qwen3.5), not two with each key head's parts side by side.
    """

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    kernel: int = 4
    layers: frozenset[int] = frozenset()
    apart: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Columns that the convolution reads: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def row(self) -> int:
        """Numbers that pages hold of a row: those, and two of each value head."""
        return self.mixed + 2 * self.value_heads

    @property
    def state(self) -> int:
        """Numbers of a state."""
        return self.values * self.key_dim

    @property
    def half(self) -> int:
        """Pages hold them as two rows of so many."""
        return -(-self.row // 2)


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type. Llama's, where nothing else is said.

    qkv_bias, out_bias: fixed by the family; None reads attention_bias (attention_bias: its default).
    kv_heads: where the config names none; None: as many as heads. head_dim: None: hidden / heads.
    own_head_dim: whether heads need not fill the hidden width.
    share: part of each head that is rotated, where the config does not say.
    partial: whether it may be less than all.
    window: whether attention slides: never, always, or when use_sliding_window asks for it.
    window_rows: its width where the config does not say; None: whole.
    pattern: of so many layers the last one sees all, where the config does not say; 0: all have the window.
    whole_layers: how many of the first see all, where max_window_layers does not say; 0: it is not read.
    parallel: whether use_parallel_residual is read.
    qk_norm: over each query and key head; None reads use_qk_norm. whole_qk_norm: over all of them at once.
    routing: of layers with experts, where the config does not say. width_field: of an expert's width.
    first_dense: how many layers have no experts, where first_k_dense_replace does not say.
    clamp: limit and gain of a clamped SwiGLU (see `mlp.gate_clamped`), where the config does not say.
    norm_offset: what RMS norms add to their weights. tied: where tie_word_embeddings does not say.
    scaled: whether embeddings are multiplied by the square root of the hidden width.
    heads, vocab: where the config does not say; None: it must.
    softcaps: of attention's scores and of logits, where the config does not say; None: there are none.
    query_scalar: where query_pre_attn_scalar does not say; None: it is not read.
    near_theta: of layers with a window, where rope_local_base_freq does not say; None: that of all.
    gated_heads: whether q_proj also has a gate of each query head. delta: of gated delta layers.
    """

    names: Names = Names()
    norm: NormKind = "rms"
    mlp: MlpKind = "gated"
    mlp_bias: bool | None = False
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    attention_bias: bool = False
    qk_norm: bool | None = False
    whole_qk_norm: bool = False
    heads: int | None = None
    vocab: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    own_head_dim: bool = True
    activation: str = "silu"
    eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    theta: float = 10000.0
    theta_field: str = "rope_theta"
    share: float = 1.0
    share_field: str = "partial_rotary_factor"
    partial: bool = False
    positions: int = 2048
    window: Literal["never", "always", "asked"] = "never"
    window_rows: int | None = None
    pattern: int = 0
    whole_layers: int = 0
    parallel: bool = False
    routing: Routing | None = None
    width_field: str = "moe_intermediate_size"
    first_dense: int = 0
    clamp: tuple[float, float] | None = None
    norm_offset: float = 0.0
    gated_heads: bool = False
    delta: Delta | None = None
    tied: bool = False
    scaled: bool = False
    softcaps: tuple[float | None, float | None] | None = None
    query_scalar: int | None = None
    near_theta: float | None = None


LLAMA = Family(mlp_bias=None)
GEMMA = Family(
    names=Names(
        mlp_norm="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    activation="gelu_pytorch_tanh",
    norm_offset=1.0,
    tied=True,
    scaled=True,
    kv_heads=4,
    head_dim=256,
    query_scalar=256,
    window="always",
    window_rows=4096,
)
QWEN_DELTA = Family(
    names=replace(QWEN_EXPERTS, shared=_three("mlp.shared_expert"), shared_gate="mlp.shared_expert_gate"),
    mlp="experts",
    routing=Routing(512, 10, 512),
    qk_norm=True,
    kv_heads=2,
    head_dim=256,
    share=0.25,
    partial=True,
    positions=32768,
    norm_offset=1.0,
    gated_heads=True,
    delta=Delta(),
)

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(
        qkv_bias=False, out_bias=False, kv_heads=8, positions=131072, window="always", window_rows=4096
    ),
    "ministral3": Family(
        qkv_bias=False,
        out_bias=False,
        kv_heads=8,
        head_dim=128,
        eps=1e-5,
        theta=1e6,
        positions=262144,
        window="always",
    ),
    "mixtral": Family(
        names=MIXTRAL_EXPERTS,
        mlp="experts",
        routing=Routing(8, 2, 14336),
        width_field="intermediate_size",
        qkv_bias=False,
        out_bias=False,
        kv_heads=8,
        eps=1e-5,
        theta=1e6,
        positions=131072,
        window="always",
    ),
    "qwen2": Family(
        qkv_bias=True,
        out_bias=False,
        kv_heads=32,
        positions=32768,
        window="asked",
        window_rows=4096,
        whole_layers=28,
    ),
    "qwen3": Family(
        qk_norm=True,
        kv_heads=32,
        head_dim=128,
        positions=32768,
        window="asked",
        window_rows=4096,
        whole_layers=28,
    ),
    "qwen3_vl_text": Family(qk_norm=True, kv_heads=32, head_dim=128, theta=5e5, positions=128000),
    "qwen3_moe": Family(
        names=QWEN_EXPERTS,
        mlp="experts",
        routing=Routing(128, 8, 768, normalised=False),
        qk_norm=True,
        kv_heads=4,
        positions=32768,
        window="asked",
        window_rows=4096,
    ),
    "qwen3_next": QWEN_DELTA,
    "qwen3_5_text": replace(
        QWEN_DELTA, names=Names(), mlp="gated", routing=None, kv_heads=4, delta=Delta(apart=True)
    ),
    "qwen3_5_moe_text": replace(
        QWEN_DELTA,
        names=replace(QWEN_DELTA.names, whole_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
        routing=Routing(256, 8, 512),
        delta=Delta(apart=True),
    ),
    "glm4_moe": Family(
        names=replace(
            QWEN_EXPERTS, correction="mlp.gate.e_score_correction_bias", shared=_three("mlp.shared_experts")
        ),
        mlp="experts",
        routing=Routing(128, 8, 1408, "sigmoid", corrected=True),
        first_dense=1,
        out_bias=False,
        qk_norm=None,
        kv_heads=8,
        eps=1e-5,
        share=0.5,
        partial=True,
        positions=131072,
    ),
    "minimax_m2": Family(
        names=replace(MIXTRAL_EXPERTS, correction="block_sparse_moe.e_score_correction_bias"),
        mlp="experts",
        routing=Routing(256, 8, 1536, "sigmoid", corrected=True),
        width_field="intermediate_size",
        qkv_bias=False,
        out_bias=False,
        qk_norm=True,
        whole_qk_norm=True,
        kv_heads=8,
        head_dim=128,
        theta=5e6,
        partial=True,
        positions=196608,
    ),
    "gpt_oss": Family(
        names=Names(
            sinks="sinks",
            router="mlp.router",
            experts=_three("mlp.experts.{}"),
            stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
        mlp="experts",
        # A softmax over the chosen alone is one over all whose chosen weights are made to sum to 1.
        routing=Routing(128, 4, 2880, biased=True),
        width_field="intermediate_size",
        clamp=(7.0, 1.702),
        attention_bias=True,
        head_dim=64,
        kv_heads=8,
        eps=1e-5,
        theta=150000.0,
        positions=131072,
        window="always",
        window_rows=128,
        pattern=2,
    ),
    "phi3": Family(
        names=Names(qkv="qkv_proj", gate_up="mlp.gate_up_proj"),
        qkv_bias=False,
        out_bias=False,
        eps=1e-5,
        partial=True,
        positions=4096,
        window="always",
    ),
    "gemma2": replace(GEMMA, positions=8192, pattern=2, softcaps=(50.0, 30.0)),
    "gemma3_text": replace(
        GEMMA,
        positions=131072,
        pattern=6,
        softcaps=(None, None),
        qk_norm=True,
        theta=1e6,
        near_theta=10000.0,
        heads=8,
        vocab=262208,
    ),
    "gpt_neox": Family(
        names=Names(
            embedding="gpt_neox.embed_in",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
            layer="gpt_neox.layers.{}",
            attention="attention",
            qkv="query_key_value",
            qkv_by_head=True,
            out="dense",
            gate="",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        norm="layer",
        mlp="plain",
        mlp_bias=True,
        attention_bias=True,
        own_head_dim=False,
        activation="gelu",
        eps=1e-5,
        eps_field="layer_norm_eps",
        theta_field="rotary_emb_base",
        share=0.25,
        share_field="rotary_pct",
        partial=True,
        parallel=True,
    ),
}

# Models that read images, too, and the family of their text where `text_config` names none.
WITH_IMAGES: Mapping[str, str] = {
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# How tensors of text are called in those models, and in others.
OF_TEXT: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def text_name(name: str) -> str:
    """What a tensor is called in a model of text alone."""
    found = next((start for start in OF_TEXT if name.startswith(start)), "")
    return f"{OF_TEXT[found]}{name.removeprefix(found)}" if found else name


def names_of(module: str) -> list[str]:
    """What a module of text may be called, in a model of text alone and in one that reads images, too."""
    inner = f"{module}."
    whole = [
        f"{start}{inner.removeprefix(text)}" for start, text in OF_TEXT.items() if inner.startswith(text)
    ]
    return [module, *(one[:-1] for one in whole)]
