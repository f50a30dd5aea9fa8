"""Random pairs of a base and a head, trained for a moment, and the record of what they do.

`python -m tests.vectors.making` writes the two cases that lie beside this file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.vectors.drafting import (
    Grown,
    Round,
    Setting,
    greedy_round,
    next_logits,
    plain_greedy,
    sampled_round,
    states_of,
)
from tests.vectors.plain import Base, Head, Shape, Tensors, causal, features, head_logits, run_head

HERE = Path(__file__).parent
SETTINGS = {"A": Setting(12, 3, 4), "B": Setting(24, 4, 6), "C": Setting(5, 3, 1)}
WISHES = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 9})
MOST, GAP = 22, 2e-3
BEHIND = 8  # tokens that plain decoding writes on: the last tree may bring so many
Json = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One pair. layout: `midlayer` or `layers`, as EAGLE-3 heads are published; the rest as in `Head`.

    ids: aux layer ids as they stand in the config; None leaves them out.
    """

    kind: str = "eagle3"
    layout: str = "midlayer"
    hidden: int = 16
    head_dim: int = 4
    layers: int = 1
    drafts: int | None = 32
    fusion: str = "plain"
    taps: tuple[int, ...] = (2, 4, 5)
    ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    hass: bool = False
    own_embedding: bool = False
    own_lm_head: bool = True
    theta: float = 10000.0
    base_layers: int = 8
    vocab: int = 40
    config: Json = field(default_factory=dict)


def make_base(kind: Kind, seed: int) -> Base:
    shape, draw = Shape(16, 4, 2, 4, 24, theta=5000.0), drawer(seed)
    tensors = {
        "model.embed_tokens.weight": draw(kind.vocab, 16, scale=1.0),
        "model.norm.weight": 1 + draw(16, scale=0.2),
        "lm_head.weight": draw(kind.vocab, 16, scale=0.8),
    }
    for layer in range(kind.base_layers):
        at = f"model.layers.{layer}"
        tensors |= layer_tensors(draw, at, shape, 16)
        tensors[f"{at}.input_layernorm.weight"] = 1 + draw(16, scale=0.2)
    return Base(shape, kind.base_layers, kind.vocab, tensors)


def make_head(kind: Kind, base: Base, seed: int) -> Head:
    shape, draw, hidden = Shape(kind.hidden, 4, 2, kind.head_dim, 20, kind.theta), drawer(seed), kind.hidden
    inputs = 2 * hidden if kind.kind == "eagle3" else hidden
    tensors: Tensors = {}
    for layer in range(kind.layers):
        tensors |= layer_tensors(draw, f"layers.{layer}", shape, hidden if layer else inputs)
        if layer:
            tensors[f"layers.{layer}.input_layernorm.weight"] = 1 + draw(hidden, scale=0.2)
    if kind.kind == "eagle3":
        tensors |= eagle3_tensors(kind, draw, base)
    else:
        tensors["fc.weight"] = draw(hidden, 2 * hidden, scale=0.12)  # its output is fed back as it is
        names = ("embedding_layernorm", "hidden_states_layernorm", "layers.0.input_layernorm")
        tensors |= {f"{name}.weight": 1 + draw(hidden, scale=0.2) for name in names if kind.hass}
    if kind.fc_bias:
        tensors["fc.bias"] = draw(hidden, scale=0.3)
    if kind.own_embedding:
        tensors["embed_tokens.weight"] = draw(base.vocab, hidden, scale=1.0)
    if kind.qkv_bias:
        sizes = (("q", 4), ("k", 2), ("v", 2))
        tensors |= {f"layers.0.self_attn.{n}_proj.bias": draw(c * kind.head_dim, scale=0.3) for n, c in sizes}
    if kind.qk_norm:
        tensors |= {f"layers.0.self_attn.{n}_norm.weight": 1 + draw(kind.head_dim, scale=0.2) for n in "qk"}
    taps = kind.taps if kind.kind == "eagle3" and kind.fusion != "none" else ()
    flags = kind.norm_before_residual, kind.norm_output
    return Head(shape, kind.kind, kind.layers, taps, tensors, kind.fusion, *flags)


def eagle3_tensors(kind: Kind, draw: Any, base: Base) -> Tensors:
    hidden, states = kind.hidden, len(kind.taps) * base.shape.hidden
    norms = ["layers.0.input_layernorm", "layers.0.hidden_norm", "norm"]
    tensors = {f"{name}.weight": 1 + draw(hidden, scale=0.2) for name in norms}
    if kind.fusion != "none":
        tensors["fc.weight"] = draw(hidden, states)
    if kind.fusion == "joint":
        tensors["input_norm.weight"] = 1 + draw(states, scale=0.2)
    if kind.fusion == "each":
        tensors |= {f"fc_norm.{i}.weight": 1 + draw(16, scale=0.2) for i in range(len(kind.taps))}
    if kind.own_lm_head:
        tensors["lm_head.weight"] = draw(kind.drafts or base.vocab, hidden, scale=0.8)
    if kind.drafts:
        kept = torch.arange(base.vocab)[base.vocab - kind.drafts - 4 : base.vocab - 4]
        tensors["d2t"] = kept - torch.arange(kind.drafts)
        tensors["t2d"] = torch.isin(torch.arange(base.vocab), kept)
    return tensors


def layer_tensors(draw: Any, at: str, shape: Shape, inputs: int) -> Tensors:
    hidden, inner, dim = shape.hidden, shape.inner, shape.head_dim
    sizes = {
        "self_attn.q_proj": (shape.heads * dim, inputs),
        "self_attn.k_proj": (shape.kv_heads * dim, inputs),
        "self_attn.v_proj": (shape.kv_heads * dim, inputs),
        "self_attn.o_proj": (hidden, shape.heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{at}.{name}.weight": draw(*size) for name, size in sizes.items()}
    return tensors | {f"{at}.post_attention_layernorm.weight": 1 + draw(hidden, scale=0.2)}


def drawer(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (
            1.2 * shape[-1] ** -0.5 if scale is None else scale
        )

    return draw


def train(base: Base, head: Head, prompts: list[list[int]], steps: int) -> None:
    """A few steps on the base's own greedy text, so that something is accepted."""
    texts = [prompt + plain_greedy(base, prompt, 24)[0] for prompt in prompts]
    given = [states_of(base, head, text[:-1]) for text in texts]
    learned = [t.requires_grad_() for name, t in head.tensors.items() if t.is_floating_point()]
    means = [(torch.zeros_like(t), torch.zeros_like(t)) for t in learned]
    targets = head.tensors.get("d2t")
    known = torch.arange(base.vocab) if targets is None else targets + torch.arange(len(targets))
    for step in range(steps):
        text, states = texts[step % len(texts)], given[step % len(texts)]
        rows = torch.arange(len(text) - 2)
        outputs = run_head(head, base, text[1:-1], features(head, states)[:-1], rows, causal(len(rows)))
        wanted = torch.tensor(text[2:])
        keep = torch.isin(wanted, known)
        loss = F.cross_entropy(
            head_logits(head, base, outputs)[keep], torch.searchsorted(known, wanted[keep])
        )
        adapt(learned, torch.autograd.grad(loss, learned, materialize_grads=True), means, step + 1)
    for tensor in learned:
        tensor.requires_grad_(False)


@torch.no_grad()
def adapt(
    learned: list[Tensor], slopes: Sequence[Tensor], means: list[tuple[Tensor, Tensor]], step: int
) -> None:
    """Adam, as published. torch.optim's takes four seconds to be imported."""
    for tensor, slope, (first, second) in zip(learned, slopes, means):
        first.lerp_(slope, 0.1)
        second.lerp_(slope.square(), 0.001)
        tensor -= 0.01 * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)


def write_case(
    directory: Path,
    kind: Kind,
    seed: int = 1,
    prompts: int = 2,
    steps: int = 60,
    most: int = MOST,
    settings: Sequence[str] = tuple(SETTINGS),
) -> Path:
    """A whole case, `most` tokens and a last tree for each prompt and setting; prompts with near ties are
    passed over.
    """
    base = make_base(kind, seed)
    head, dice = make_head(kind, base, seed + 1), random.Random(seed)
    chosen: list[list[int]] = []
    while len(chosen) < prompts:
        prompt = [dice.randrange(3, kind.vocab) for _ in range(dice.choice((1, 5, 9, 14)))]
        if plain_greedy(base, prompt, most + BEHIND)[1] > GAP:
            chosen.append(prompt)
    train(base, head, chosen, steps)
    directory.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        record, tensors = record_all(kind, base, head, chosen, dice, most, settings)
    (directory / "vectors.json").write_text(json.dumps(record))
    save(directory / "vectors.safetensors", tensors)
    write_models(directory, kind, base, head)
    return directory


def record_all(
    kind: Kind,
    base: Base,
    head: Head,
    prompts: list[list[int]],
    dice: random.Random,
    most: int,
    settings: Sequence[str],
) -> tuple[Json, Tensors]:
    tensors: Tensors = {}
    record: Json = {
        "case": kind.kind,
        "algo": "eagle3" if kind.kind == "eagle3" else "eagle2",
        "settings": {name: vars(SETTINGS[name]) for name in settings},
        "base": "base",
        "head": "head",
        "aux_layers": list(head.taps) or None,
        "prompts": [
            record_prompt(i, base, head, prompt, tensors, most, settings) for i, prompt in enumerate(prompts)
        ],
    }
    record["sampling"] = [
        record_sampling(j, base, head, j % len(prompts), prompts[j % len(prompts)], wish, tensors, dice)
        for j, wish in enumerate(WISHES)
    ]
    return record, tensors


def record_prompt(
    i: int, base: Base, head: Head, prompt: list[int], tensors: Tensors, most: int, settings: Sequence[str]
) -> Json:
    greedy, gap = plain_greedy(base, prompt, most + BEHIND)
    fed, states = [*prompt[1:], greedy[0]], states_of(base, head, prompt)
    rows = torch.arange(len(prompt))
    outputs = run_head(head, base, fed, features(head, states), rows, causal(len(rows)))
    tensors |= {
        f"p{i}.prompt_features": states,
        f"p{i}.base_logits": next_logits(base, prompt),
        f"p{i}.head_input_ids": torch.tensor(fed),
        f"p{i}.head_hidden": outputs,
        f"p{i}.head_logits_last": head_logits(head, base, outputs)[-1],
    }
    runs: Json = {}
    for name in settings:
        rounds = generate(base, head, prompt, greedy[0], SETTINGS[name], most)
        runs[name] = record_run(rounds)
        for k, step in enumerate(rounds[0].tree.steps if name == "A" else (), start=1):
            tensors |= {f"p{i}.A.draft{k}_{key}": value for key, value in step.items()}
    return {"prompt_ids": prompt, "base_greedy_ids": greedy, "base_min_top2_logit_gap": gap, "runs": runs}


def generate(
    base: Base, head: Head, prompt: list[int], root: int, setting: Setting, most: int
) -> list[Round]:
    rounds, text = list[Round](), list(prompt)
    while len(text) - len(prompt) <= most:
        done = greedy_round(base, head, text, root, setting)
        rounds.append(done)
        text, root = text + [done.tree.tokens[node] for node in done.path], done.bonus
    return rounds


def record_run(rounds: list[Round]) -> Json:
    return {
        "generated_ids": [one.tree.tokens[node] for one in rounds for node in one.path],
        "accept_lengths": [len(one.path) - 1 for one in rounds],
        "tau": sum(len(one.path) for one in rounds) / len(rounds),
        "bonus_tokens": [one.bonus for one in rounds],
        "best_candidate": [one.best for one in rounds],
        "trees": [record_tree(one.tree, one.rows) | {"committed_len": len(one.text)} for one in rounds[:2]],
        "min_rank_gap_all_rounds": min(one.tree.rank_gap for one in rounds),
        "min_select_gap_all_rounds": min(one.tree.select_gap for one in rounds),
    }


def record_tree(tree: Grown, rows: list[list[int]]) -> Json:
    return {
        "tokens": tree.tokens,
        "parents": tree.parents,
        "depth": tree.depth,
        "retrieve_indices": rows,
        "min_rank_gap": tree.rank_gap,
        "min_select_gap": tree.select_gap,
    }


def record_sampling(
    j: int,
    base: Base,
    head: Head,
    i: int,
    prompt: list[int],
    wish: Json,
    tensors: Tensors,
    dice: random.Random,
) -> Json:
    text, root, rounds = list(prompt), int(next_logits(base, prompt).argmax()), list[Json]()
    for r in range(2):
        done = sampled_round(base, head, text, root, SETTINGS["A"], wish, dice)
        path = [done.tree.tokens[node] for node in done.path]
        tensors |= {f"s{j}.r{r}.node_logits": done.logits, f"s{j}.r{r}.sample_p": done.left}
        rounds.append(
            record_tree(done.tree, done.rows)
            | {
                "uniforms": done.uniforms,
                "best_candidate": done.best,
                "accept_length": len(path) - 1,
                "accepted_path_tokens": path,
                "bonus_token": done.bonus,
            }
        )
        text, root = text + path, done.bonus
    lengths = [one["accept_length"] for one in rounds]
    return {"prompt": i, "setting": "A", **wish, "accept_lengths": lengths, "rounds": rounds}


def write_models(directory: Path, kind: Kind, base: Base, head: Head) -> None:
    shape = base.shape
    config = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": base.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": base.vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    write_model(directory / "base", config, base.tensors)
    own = {
        "model_type": "llama",
        "num_attention_heads": head.shape.heads,
        "rms_norm_eps": head.shape.eps,
        **({} if head.shape.theta == 10000.0 else {"rope_theta": head.shape.theta}),
    }
    flags: Json = {
        "norm_before_residual": head.norm_before_residual,
        "norm_output": head.norm_output,
        "norm_before_fc": head.fusion == "joint",
        "fc_norm": head.fusion == "each",
        "eagle_aux_hidden_state_layer_ids": kind.ids and list(kind.ids),
    }
    if head.kind == "eagle1":
        write_model(directory / "head", own | kind.config, head.tensors)
    elif kind.layout == "midlayer":
        renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.tensors.items()}
        aux = {"use_aux_hidden_state": head.fusion != "none"}
        write_model(directory / "head", own | flags | {"eagle_config": aux} | kind.config, renamed)
    else:
        nested = {"transformer_layer_config": own | {"num_hidden_layers": 40}, "tie_word_embeddings": True}
        write_model(directory / "head", flags | nested | kind.config, head.tensors)


def write_model(directory: Path, config: Json, tensors: Tensors) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save(directory / "model.safetensors", tensors)


def save(file: Path, tensors: Tensors) -> None:
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, file)


SMALL = {
    "eagle3-small": Kind(
        layout="layers",
        fusion="joint",
        norm_before_residual=True,
        norm_output=True,
        ids=(1, 3, 6),
        taps=(2, 4, 7),
    ),
    "eagle2-small": Kind(kind="eagle1", fc_bias=True, qkv_bias=True, theta=500.0, drafts=None),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, kind in SMALL.items():
        write_case(HERE / name, kind, steps=150)
