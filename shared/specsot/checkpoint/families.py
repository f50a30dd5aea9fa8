"""Families of base models (`model_type`): the names of their tensors, and defaults that configs leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

# Kind of a norm: RMS norm, or layer norm with a bias.
NormKind = Literal["rms", "layer"]
# Kind of an MLP: gate, up and down; up and down alone; or several experts, of which a router chooses some.
MlpKind = Literal["gated", "plain", "experts"]
# Name of an activation function. "gelu_tanh" is GELU's approximation by tanh.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

# The activation function by each spelling in config.json.
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
    """Names of the tensors of one family of base models, without `.weight` and `.bias`. An empty name means:
    no such tensor.

    embedding: The embedding.
    norm: The final norm.
    head: The lm_head.
    layer: The prefix of a layer's tensors, with {} for the layer's number. The names below are names inside a
        layer.
    input_norm: The norm before attention. If empty, attention reads the residual stream.
    mlp_norm: The norm before the MLP. If empty, the MLP reads the residual stream.
    attention: The attention module; `qkv`, `out` and `sinks` are names inside it.
    qkv: One tensor of queries, keys and values. If empty, they are q_proj, k_proj and v_proj.
    qkv_by_head: True if the rows of `qkv` are [heads, 3, head_dim]; False if they are queries, then keys,
        then values.
    after_attention: The norm over the attention's output, before it is added to the residual stream.
    after_mlp: The norm over the MLP's output, before it is added to the residual stream.
    out: The projection after attention.
    sinks: A learned attention score per query head, which takes part in the softmax; a full name without a
        suffix.
    router: The router of a layer with experts, which computes a score per expert.
    correction: The router's correction of scores, see `Routing.corrected`; a full name without a suffix.
    experts: Names of gate, up and down of an expert, with {} for its number.
    stacked: Names of one tensor of all experts' gates and ups, and one of their downs, both [experts, inputs,
        outputs]; in GGUF files they are apart. None: the family has no such tensors.
    alternating: True if gates and ups take turns in the first of these tensors, as gpt-oss publishes them;
        False if all gates precede all ups.
    whole_experts: Names of the same two tensors in the layout that products read, [experts, outputs, inputs],
        for experts that may be published either way. If they are those of `stacked`, the shape decides. None:
        the family has no such tensors.
    shared: Names of gate, up and down of the MLP that every token runs in addition to its experts; None:
        there is none.
    shared_gate: The gate of the shared MLP.
    parallel_norms: Norms of a layer whose experts run in parallel to an MLP (Gemma 4): before and after the
        MLP, before and after the experts. All read the residual stream, or what its MLP or experts return.
        None: experts take the place of the MLP.
    router_scale: Factors [hidden] of the router's normed input, in a layer with `parallel_norms`; a full name
        without a suffix.
    expert_scale: Factors [experts] of the weights of experts; a full name without a suffix.
    layer_scale: A factor [1] of the residual stream after the layer; a full name without a suffix.
    layer_tables: The embedding, the projection and its norm from which the per-layer inputs are made (Gemma 4
        E2B and E4B), see `ModelConfig.layer_input_size`. They are not names inside a layer. None: layers have
        no such input.
    layer_input: What adds a per-layer input to the residual stream: the gate, the projection, and the norm
        over its output. None: layers have no such input.
    gate_up: One tensor of the MLP's gate and up. If empty, they are apart.
    gate: The MLP's gate.
    up: The MLP's up projection.
    down: The MLP's down projection.
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
    alternating: bool = True
    whole_experts: tuple[str, str] | None = None
    shared: tuple[str, str, str] | None = None
    shared_gate: str = ""
    parallel_norms: tuple[str, str, str, str] | None = None
    router_scale: str = ""
    expert_scale: str = ""
    layer_scale: str = ""
    layer_tables: tuple[str, str, str] | None = None
    layer_input: tuple[str, str, str] | None = None
    gate_up: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


def _three(mlp: str) -> tuple[str, str, str]:
    """Return the names of gate, up and down of a gated MLP.

    mlp: name of the MLP inside a layer.
    """
    return f"{mlp}.gate_proj", f"{mlp}.up_proj", f"{mlp}.down_proj"


# The tensor names of Qwen's models with experts.
QWEN_EXPERTS = Names(router="mlp.gate", experts=_three("mlp.experts.{}"))
# The names of one tensor of all experts' gates and ups, and of one of their downs.
WHOLE_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# The tensor names of Mixtral's models with experts.
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
    """How the tokens of a layer go to experts: each to the `chosen` experts with the highest scores.

    experts: Number of experts of a layer.
    chosen: Number of experts per token.
    width: Width of each expert.
    score: Function that turns the router's logits into scores; the weights of experts are scores.
    normalised: True if a token's weights are divided by their sum before they are multiplied by `scale`.
    scale: Factor of the weights.
    groups: Number of groups of neighbouring experts.
    open_groups: Number of groups from which a token chooses: those whose best scores have the largest sums.
    summed: Number of a group's best scores that are summed.
    biased: True if the router adds a bias to its logits, and experts have biases.
    corrected: True if experts are chosen by score plus a learned correction; the weights stay scores.
    shared: Width of an MLP that every token runs in addition; 0: there is none.
    dense: Numbers of the layers that have one MLP instead of experts, counted from 0.
    """

    experts: int
    chosen: int
    width: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    open_groups: int = 1
    summed: int = 2
    biased: bool = False
    corrected: bool = False
    shared: int = 0
    dense: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Delta:
    """Sizes of a model's gated delta layers, which have a recurrent state instead of attention, and which
    layers these are.

    key_heads: Number of query heads and of key heads.
    value_heads: Number of value heads.
    key_dim: Number of elements of a query or key of one head.
    value_dim: Number of elements of a value of one head.
    kernel: How many tokens the convolution reads, its own included.
    layers: Numbers of the gated delta layers, counted from 0; the other layers attend.
    apart: True if the input projections are tensors of their own (Qwen3.5). Otherwise they are two tensors in
        which the parts of each key head lie side by side.
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
        """Number of elements of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of elements of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Columns that the convolution reads: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def row(self) -> int:
        """Number of elements that pages store of a token: `mixed`, and two per value head (b and a)."""
        return self.mixed + 2 * self.value_heads

    @property
    def state(self) -> int:
        """Number of elements of a layer's recurrent state."""
        return self.values * self.key_dim

    @property
    def half(self) -> int:
        """Pages store the `row` numbers of a token as two rows of this length, as keys and values."""
        return -(-self.row // 2)


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (MLA). Of each token, the KV pages hold one row for all heads: a
    rotated key, and a latent vector from which keys and values of each head are products.

    rank: Number of elements of the latent vector (kv_lora_rank).
    rotated: Number of elements of a head's query, and of the key that all heads share, that are rotated
        (qk_rope_head_dim).
    unrotated: Number of elements of a head's query that are not rotated (qk_nope_head_dim).
    value: Number of elements of a head's value (v_head_dim).
    query_rank: Number of elements of the vector from which queries are projected (q_lora_rank); None: they
        are projected from the hidden states.
    interleaved: True if the two elements of a rotary pair are neighbours in the files; False if they are half
        of `rotated` apart.
    """

    rank: int = 512
    rotated: int = 64
    unrotated: int = 128
    value: int = 128
    query_rank: int | None = 1536
    interleaved: bool = True

    @property
    def row(self) -> int:
        """Number of elements that pages store of a token: first the rotated key, then the latent vector."""
        return self.rotated + self.rank

    @property
    def query(self) -> int:
        """Number of elements of a head's query as it is projected."""
        return self.unrotated + self.rotated


@dataclass(frozen=True, slots=True)
class Family:
    """A family of base models (one model_type): its tensor names, and defaults of what configs leave out. The
    defaults of this class are Llama's.

    Many fields are defaults for a field of config.json, used if the config does not have it.

    names: Names of the tensors.
    norm: Kind of the norms.
    mlp: Kind of the MLPs.
    mlp_bias: True if the MLP's projections have biases; None: mlp_bias of the config says it.
    qkv_bias: True if the query, key and value projections have biases; None: attention_bias of the config
        says it.
    out_bias: True if the projection after attention has a bias; None: attention_bias of the config says it.
    attention_bias: Default of attention_bias.
    qk_norm: True if queries and keys are normed; None: use_qk_norm of the config says it.
    whole_qk_norm: True if the norm covers all query heads, or all key heads, at once.
    heads: Default of num_attention_heads; None: the config must have it.
    vocab: Default of vocab_size; None: the config must have it.
    kv_heads: Default of num_key_value_heads; None: as many as query heads.
    head_dim: Default of head_dim; None: hidden size / query heads.
    own_head_dim: True if head_dim and the number of KV heads are fields of their own; False if head_dim is
        hidden size / query heads, and every query head has a KV head.
    activation: Default of hidden_act.
    eps: Default of the field that `eps_field` names.
    eps_field: Name of the field with the epsilon of the norms.
    theta: Default of the field that `theta_field` names.
    theta_field: Name of the field with the rotary base.
    rope_kind: Default of the kind of rotary settings, see `Rope.kind`.
    share: Default of the field that `share_field` names.
    share_field: Name of the field with the fraction of each head that rotates.
    partial: True if the fraction of a head that rotates may be less than 1.
    positions: Default of max_position_embeddings.
    window: Which layers may have a sliding window: "never" none, "always" those that the config names,
        "asked" the same if use_sliding_window is true.
    window_rows: Default of sliding_window, in positions; None: no window.
    pattern: Default of sliding_window_pattern: the last of so many layers sees all positions; 0: every layer
        has the window.
    whole_layers: Default of max_window_layers, the number of first layers that see all positions; 0: the
        field is not read.
    parallel: True if use_parallel_residual of the config is read, see `ModelConfig.parallel`.
    routing: Defaults for layers with experts; None: the family has no experts.
    width_field: Name of the field with an expert's width.
    first_dense: Default of first_k_dense_replace, the number of first layers without experts.
    clamp: Defaults of (limit, gain) of a clamped SwiGLU (`mlp.gate_clamped`); None: there is no clamp.
    norm_offset: Number that RMS norms add to their weights.
    gated_heads: True if q_proj also computes a gate per query head.
    delta: Defaults for gated delta layers; None: the family has none.
    latent: Defaults for multi-head latent attention; None: the family has ordinary attention.
    selected: Default of index_topk, the number of tokens to which a token attends in sparse attention. Texts
        of at most so many tokens are served, whose tokens attend to all; None: attention is not sparse.
    tied: Default of tie_word_embeddings.
    scaled: True if embeddings are multiplied by the square root of the hidden size.
    softcaps: Default caps of (attention scores, logits); None: the family has no caps.
    query_scalar: Default of query_pre_attn_scalar; None: the field is not read.
    sliding_theta: Default of rope_local_base_freq, the rotary base of sliding-window layers; None: all layers
        have the same base.
    windows_unscaled: True if sliding-window layers have the default rotary settings, with the base of the
        others; False if they have those of the others, unless there is a `sliding_theta`.
    unrotated_interval: Default of no_rope_layer_interval: every so-manieth layer has no rotary positions; 0:
        all layers have them, and the field is not read.
    chosen_field: Name of the field with the number of experts per token.
    global_heads: True if layers without a window have heads of their own (Gemma 4), see `ModelConfig.wide`,
        values are normed, and enable_moe_block says whether there are experts.
    layer_input_size: Default of hidden_size_per_layer_input, the number of elements of a per-layer input; 0:
        layers have no such input.
    multiplied: True if the config's embedding_multiplier, residual_multiplier, attention_multiplier and
        logits_scaling are read (Granite).
    dense_hybrid: True if other models of the family have Mamba layers or experts, which are refused, and if
        position_embedding_type says whether layers have rotary positions.
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
    rope_kind: str = "default"
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
    latent: Latent | None = None
    selected: int | None = None
    tied: bool = False
    scaled: bool = False
    softcaps: tuple[float | None, float | None] | None = None
    query_scalar: int | None = None
    sliding_theta: float | None = None
    windows_unscaled: bool = False
    unrotated_interval: int = 0
    chosen_field: str = "num_experts_per_tok"
    global_heads: bool = False
    layer_input_size: int = 0
    multiplied: bool = False
    dense_hybrid: bool = False


# Llama, whose values are the defaults of the other families too.
LLAMA = Family(mlp_bias=None)
# What the Gemma families have in common.
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
# Gemma 4. Of the published models, E2B and E4B have per-layer inputs, and KV that layers share.
GEMMA4 = replace(
    GEMMA,
    names=replace(
        GEMMA.names,
        router="router.proj",
        experts=_three("experts.{}"),
        whole_experts=("experts.gate_up_proj", "experts.down_proj"),
        parallel_norms=(
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ),
        router_scale="router.scale",
        expert_scale="router.per_expert_scale",
        layer_scale="layer_scalar",
        layer_tables=(
            "model.embed_tokens_per_layer",
            "model.per_layer_model_projection",
            "model.per_layer_projection_norm",
        ),
        layer_input=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
    ),
    mlp="gated",
    routing=Routing(128, 8, 704),
    chosen_field="top_k_experts",
    norm_offset=0.0,
    query_scalar=1,
    softcaps=(None, None),
    qk_norm=True,
    theta=1e6,
    sliding_theta=10000.0,
    rope_kind="proportional",
    share=0.25,
    partial=True,
    positions=131072,
    pattern=6,
    window_rows=512,
    global_heads=True,
    layer_input_size=256,
)
# OLMo 2, and what OLMo 3 has in common with it: norms only over what attention and MLP add.
OLMO = Family(
    names=Names(
        input_norm="",
        mlp_norm="",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    qk_norm=True,
    whole_qk_norm=True,
    eps=1e-5,
)
# Granite, and what Granite 4 has in common with it.
GRANITE = Family(mlp_bias=None, multiplied=True)
# Qwen3-Next, and what the Qwen3.5 families have in common with it.
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
# DeepSeek V3 and R1, and what the other families with multi-head latent attention have in common with it.
DEEPSEEK_V3 = Family(
    names=replace(
        QWEN_EXPERTS, correction="mlp.gate.e_score_correction_bias", shared=_three("mlp.shared_experts")
    ),
    mlp="experts",
    routing=Routing(256, 8, 2048, "sigmoid", scale=2.5, corrected=True),
    first_dense=3,
    latent=Latent(),
    positions=4096,
)
# DeepSeek V3.2, and what GLM-5 has in common with it: sparse attention.
DEEPSEEK_V32 = replace(DEEPSEEK_V3, positions=163840, selected=2048)

# The supported families by model_type.
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
    "smollm3": Family(
        mlp_bias=None,
        kv_heads=4,
        theta=2e6,
        positions=32768,
        window="asked",
        tied=True,
        unrotated_interval=4,
    ),
    "qwen3_vl_text": Family(qk_norm=True, kv_heads=32, head_dim=128, theta=5e5, positions=128000),
    "qwen3_vl_moe_text": Family(
        names=replace(QWEN_EXPERTS, stacked=WHOLE_EXPERTS, alternating=False, whole_experts=WHOLE_EXPERTS),
        mlp="experts",
        routing=Routing(60, 4, 1408),
        qk_norm=True,
        kv_heads=16,
        theta=5e5,
        positions=128000,
        tied=True,
    ),
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
        names=replace(QWEN_DELTA.names, whole_experts=WHOLE_EXPERTS),
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
    "deepseek_v2": replace(
        DEEPSEEK_V3,
        names=replace(DEEPSEEK_V3.names, correction=""),
        routing=Routing(64, 6, 1407, normalised=False, summed=1),
        first_dense=0,
        positions=2048,
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": replace(DEEPSEEK_V32, latent=Latent(512, 64, 192, 256, 2048), eps=1e-5, positions=202752),
    "glm4_moe_lite": replace(
        DEEPSEEK_V3,
        routing=Routing(64, 4, 1536, "sigmoid", scale=1.8, corrected=True),
        first_dense=1,
        latent=Latent(512, 64, 192, 256, 768),
        eps=1e-5,
        positions=202752,
    ),
    "mistral4": replace(
        DEEPSEEK_V3,
        names=replace(DEEPSEEK_V3.names, correction="", whole_experts=WHOLE_EXPERTS),
        routing=Routing(128, 4, 2048),
        first_dense=0,
        latent=Latent(256, 64, 64, 128, 1024),
        partial=True,
        positions=1048576,
    ),
    "youtu": Family(latent=Latent(), tied=True, positions=131072),
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
            stacked=WHOLE_EXPERTS,
        ),
        mlp="experts",
        # gpt-oss takes the softmax over the chosen experts only. That equals a softmax over all experts whose
        # chosen weights are normalized to sum to 1.
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
        sliding_theta=10000.0,
        heads=8,
        vocab=262208,
    ),
    "olmo2": OLMO,
    "olmo3": replace(OLMO, theta=5e5, window="always", window_rows=4096, pattern=4, windows_unscaled=True),
    "granite": GRANITE,
    "granitemoehybrid": replace(
        GRANITE,
        names=Names(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear"),
        mlp_bias=False,
        width_field="shared_intermediate_size",
        dense_hybrid=True,
    ),
    "gemma4_text": GEMMA4,
    # 12B: of text, the same without experts.
    "gemma4_unified_text": replace(GEMMA4, positions=262144, window_rows=1024, layer_input_size=0),
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

# Models with images, and the family of their text model if `text_config` names none.
WITH_IMAGES: Mapping[str, str] = {
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# Prefixes of the text model's tensors in models with images, and in models of text alone.
OF_TEXT: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def text_name(name: str) -> str:
    """Return the name of a tensor as a model of text alone has it. A name without a known prefix is returned
    unchanged.

    name: the tensor's name in a model with images.

    # "model.language_model.norm.weight" -> "model.norm.weight"
    """
    prefix = next((candidate for candidate in OF_TEXT if name.startswith(candidate)), "")
    return f"{OF_TEXT[prefix]}{name.removeprefix(prefix)}" if prefix else name


def names_of(module: str) -> list[str]:
    """Return the names that a module may have: first `module` itself, then its names in models with images.

    Only `module` is returned if its name has no known prefix.

    module: the module's name in a model of text alone.

        # "model.norm" -> "model.norm", "model.language_model.norm", "language_model.model.norm"
    """
    inner = f"{module}."
    whole = [
        f"{start}{inner.removeprefix(text)}" for start, text in OF_TEXT.items() if inner.startswith(text)
    ]
    return [module, *(one[:-1] for one in whole)]
