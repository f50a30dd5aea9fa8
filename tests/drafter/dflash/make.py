"""What lies here: a tiny DFlash head, and what the published code computes with it.

git clone https://github.com/z-lab/dflash && git -C dflash checkout 44947fbf71114e241c96de194f4b382b5dd330d0
PYTHONPATH=dflash/dflash python tests/drafter/dflash/make.py OUTPUT    # torch 2.13.0, transformers 5.23.0
"""

import json
import sys
from pathlib import Path

import model as published  # dflash/dflash/model.py
import torch
from safetensors.torch import save_file
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

FIELDS = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads head_dim max_position_embeddings rms_norm_eps hidden_act attention_bias
layer_types num_target_layers block_size dflash_config"""
IDS, HIDDEN, BLOCK, MASK = 24, 16, 5, 23

output = Path(sys.argv[1])
output.mkdir(parents=True, exist_ok=True)
torch.manual_seed(11)
config = Qwen3Config(
    vocab_size=IDS, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=10000.0,
    attention_bias=False, layer_types=["full_attention"] * 2, tie_word_embeddings=False,
)  # fmt: skip
config.num_target_layers, config.block_size = 6, BLOCK
config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": [1, 3]}
config._attn_implementation = "eager"
head = published.DFlashDraftModel(config).eval().float()
with torch.no_grad():
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
embed, lm_head = torch.randn(IDS, HIDDEN), torch.randn(IDS, HIDDEN)
states, tokens = torch.randn(1, 12, 2 * HIDDEN), torch.randint(0, MASK, (13,))
found = {"embed": embed, "lm_head": lm_head, "states": states[0], "tokens": tokens}
cache, seen = published.DynamicCache(), 0
with torch.inference_mode():
    for length in (9, 12):  # as dflash_generate: the new states, a block behind them, which is cropped then
        block = torch.full((1, BLOCK), MASK)
        block[0, 0] = tokens[length]
        hidden = head(
            target_hidden=states[:, seen:length],
            noise_embedding=embed[block],
            position_ids=torch.arange(seen, length + BLOCK)[None],
            past_key_values=cache,
            use_cache=True,
            is_causal=False,
        )
        cache.crop(-BLOCK)
        seen, found[f"logits_{length}"] = length, hidden[0] @ lm_head.T
weights = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
save_file(found, output / "vectors.safetensors")
fields = {name: config.to_dict()[name] for name in FIELDS.split()}
fields |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "rope_theta": 10000.0}
(output / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")
