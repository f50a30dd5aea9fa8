"""What lies here: tiny P-EAGLE and DFlash heads, with yarn and windows, and what the published code computes.

git clone https://github.com/vllm-project/speculators  # its metadata must be installed: pip install --no-deps
git -C speculators checkout c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b
python tests/drafter/speculators/make.py OUTPUT  # torch 2.13.0, transformers 5.23.0
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.models.dflash import core as dflash
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.peagle import core as peagle
from speculators.models.peagle.config import PEagleSpeculatorConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

IDS, HIDDEN, MASK, BLOCK, LENGTH, TEXTS = 24, 16, 23, 4, 20, (9, 12)
LAYER = dict(
    vocab_size=IDS, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, attention_bias=False,
    layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=4,
    rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0,
                     "original_max_position_embeddings": 8},
)  # fmt: skip
output = Path(sys.argv[1])


def layer_config() -> Qwen3Config:
    config = Qwen3Config(**LAYER)
    config._attn_implementation = "eager"
    return config


def write(
    name: str, head: torch.nn.Module, fields: dict[str, object], found: dict[str, torch.Tensor]
) -> None:
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: tensor.contiguous() for key, tensor in head.state_dict().items() if "verifier" not in key}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(found, folder / "vectors.safetensors")
    fields |= {"speculators_model_type": name, "draft_vocab_size": IDS, "mask_token_id": MASK}
    fields |= {"transformer_layer_config": {"model_type": "qwen3", **LAYER}}
    (folder / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")


@torch.no_grad()
def fill(head: torch.nn.Module) -> None:
    for tensor in head.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape) * 0.3 + (1.0 if tensor.dim() == 1 else 0.0))


@torch.inference_mode()
def logits_of(head: torch.nn.Module, states: torch.Tensor, ids: torch.Tensor, **more: object) -> torch.Tensor:
    """What lm_head says. The loss that is made of it afterwards wants a GPU."""
    said: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda _, __, out: said.append(out[0].clone()))
    length = ids.shape[0]
    with suppress(RuntimeError):
        head(
            hidden_states=states[None], input_ids=ids[None], loss_mask=torch.ones(1, length),
            verifier_last_hidden_states=torch.zeros(1, length, HIDDEN),
            document_ids=torch.zeros(1, length, dtype=torch.long), **more,
        )  # fmt: skip
    return said[0]


torch.manual_seed(12)
tokens = torch.randint(0, MASK, (LENGTH + 1,))
depths = torch.cat([torch.zeros(LENGTH), *[torch.full((len(TEXTS),), d) for d in range(1, BLOCK)]]).long()
anchors = torch.cat([torch.arange(LENGTH), *[torch.tensor(TEXTS) - 1 for _ in range(1, BLOCK)]])
peagle.generate_cod_sample_indices = lambda **_: (anchors, depths)
taps = [2, 4, 5]
head = peagle.PEagleDraftModel(
    PEagleSpeculatorConfig(
        transformer_layer_config=layer_config(), draft_vocab_size=IDS, mask_token_id=MASK,
        eagle_aux_hidden_state_layer_ids=taps,
    )
).eval()  # fmt: skip
fill(head)
states = torch.randn(LENGTH, len(taps) * HIDDEN)
every = logits_of(head, states, tokens[1:], num_depths=BLOCK)  # row j pairs state j with token j + 1
found = {"states": states, "tokens": tokens}
for text in TEXTS:
    rows = [int(((anchors == text - 1) & (depths == depth)).nonzero()) for depth in range(BLOCK)]
    found[f"logits_{text}"] = every[rows]
write("peagle", head, {"eagle_aux_hidden_state_layer_ids": taps}, found)

dflash.select_anchors = lambda *_, **__: (torch.tensor(TEXTS), torch.ones(len(TEXTS), dtype=torch.bool))
taps = [2, 4]
head = dflash.DFlashDraftModel(
    DFlashSpeculatorConfig(
        transformer_layer_config=layer_config(), draft_vocab_size=IDS, mask_token_id=MASK,
        aux_hidden_state_layer_ids=taps, block_size=BLOCK + 1,
    )
).eval()  # fmt: skip
fill(head)
states = torch.randn(LENGTH, len(taps) * HIDDEN)
every = logits_of(head, states, tokens[:-1], max_anchors=len(TEXTS)).view(len(TEXTS), BLOCK + 1, IDS)
found = {"states": states, "tokens": tokens}
found |= {f"logits_{text}": each[1:].clone() for text, each in zip(TEXTS, every)}
write("dflash", head, {"aux_hidden_state_layer_ids": taps, "block_size": BLOCK + 1}, found)
