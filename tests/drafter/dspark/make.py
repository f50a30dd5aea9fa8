"""What lies here: tiny DSpark heads, and what the published code computes with them.

git clone https://github.com/deepseek-ai/DeepSpec
git -C DeepSpec checkout afdfa7c9382a3341a3e6f17756dd816da79f132c
pip install torch==2.13.0 transformers==5.23.0  # and what speculators imports
pip install --no-deps speculators==0.9.0
PYTHONPATH=DeepSpec HF_HUB_OFFLINE=1 python tests/drafter/dspark/make.py OUTPUT

`deepseek` is a head of DeepSpec, of the kind vanilla, with embeddings and lm_head of its own; `gated` and
`rnn` are heads of speculators. `gated` drafts 8 of the 12 ids; the first row of `rnn` drafts nothing.
"""

import json
import sys
from itertools import product
from pathlib import Path

import torch
from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import core as dflash
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

IDS, HIDDEN, MASK, BLOCK, LENGTH, DEPTH = 12, 16, 11, 4, 12, 3
DRAFTED = torch.tensor([0, 1, 3, 4, 6, 7, 9, 10])  # the ids that `gated` drafts
DEEPSEEK = """
vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
max_position_embeddings rms_norm_eps hidden_act attention_bias layer_types tie_word_embeddings
num_target_layers block_size mask_token_id target_layer_ids num_anchors enable_confidence_head
confidence_head_with_markov markov_rank markov_head_type
"""
output = Path(sys.argv[1])


def layer_config(layers: int) -> Qwen3Config:
    config = Qwen3Config(
        vocab_size=IDS, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False, tie_word_embeddings=False,
        layer_types=["full_attention"] * layers,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def fill(head: torch.nn.Module) -> None:
    for tensor in head.parameters():
        tensor.copy_(torch.randn(tensor.shape) * 0.5 + (1.0 if tensor.dim() == 1 else 0.0))


def prefixes(root: int, ids: torch.Tensor, first: int) -> torch.Tensor:
    """The token before each row, [prefixes, BLOCK], for all DEPTH - 1 tokens that may follow the root."""
    found = [
        [root] * (first + 1) + list(path) + [0] * (BLOCK - first - DEPTH)
        for path in product(ids.tolist(), repeat=DEPTH - 1)
    ]
    return torch.tensor(found)


def logits_by_depth(logits: torch.Tensor, ids: int, first: int) -> dict[str, torch.Tensor]:
    """After every path of 0, 1, 2 tokens, in the order of `product`: [ids ** depth, logits] each."""
    return {
        f"after_{depth}": logits[:: ids ** (DEPTH - 1 - depth), first + depth].clone()
        for depth in range(DEPTH)
    }


torch.manual_seed(13)
tokens = torch.randint(0, MASK, (LENGTH + 1,))

config = layer_config(2)
config.num_target_layers, config.block_size, config.num_anchors, config.mask_token_id = 6, BLOCK, 1, MASK
config.target_layer_ids, config.markov_rank, config.markov_head_type = [-1, 3], 6, "vanilla"
config.enable_confidence_head = config.confidence_head_with_markov = True
head = Qwen3DSparkModel(config).eval()
fill(head)
states = torch.randn(LENGTH, 2 * HIDDEN)
found = {"states": states, "tokens": tokens}
cache, seen = DynamicCache(), 0
with torch.inference_mode():
    for length in (9, 12):  # as deepspec/eval/dspark/draft_ops.py: a block, which is cropped then
        block = torch.full((1, BLOCK), MASK)
        block[0, 0] = tokens[length]
        hidden = head._forward_backbone(
            target_hidden_states=states[None, seen:length],
            noise_embedding=head.embed_tokens(block),
            position_ids=torch.arange(seen, length + BLOCK)[None],
            past_key_values=cache,
            use_cache=True,
            is_causal=False,
        )
        cache.crop(-BLOCK)
        seen = length
        before = prefixes(int(tokens[length]), torch.arange(IDS), 0)
        many = hidden.expand(len(before), -1, -1)
        logits = head.markov_head.apply_block_logits(
            head.compute_logits(many)[None], token_ids=before[None], hidden_states=many[None]
        )[0]
        found |= {f"{length}_{name}": part for name, part in logits_by_depth(logits, IDS, 0).items()}
folder = output / "deepseek"
folder.mkdir(parents=True, exist_ok=True)
weights = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
save_file(found, folder / "vectors.safetensors")
fields = {name: config.to_dict()[name] for name in DEEPSEEK.split()} | {"rope_theta": 10000.0}
fields |= {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}
(folder / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")
shared = {"embed_tokens.weight": weights["embed_tokens.weight"], "lm_head.weight": weights["lm_head.weight"]}

dflash.select_anchors = lambda *_, **__: (torch.tensor([LENGTH]), torch.ones(1, dtype=torch.bool))
for kind, from_anchor, drafted in (("gated", True, DRAFTED), ("rnn", False, torch.arange(IDS))):
    drafts = BLOCK if from_anchor else BLOCK - 1
    head = DSparkDraftModel(
        DSparkSpeculatorConfig(
            transformer_layer_config=layer_config(1), draft_vocab_size=len(drafted), block_size=BLOCK,
            aux_hidden_state_layer_ids=[2, 4], mask_token_id=MASK, sample_from_anchor=from_anchor,
            markov_rank=6, markov_head_type=kind,
            speculators_config=SpeculatorsConfig(
                algorithm="dspark",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path="base", architectures=["LlamaForCausalLM"]),
            ),
        )
    ).eval()  # fmt: skip
    fill(head)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(shared["embed_tokens.weight"])
        if len(drafted) == IDS:
            head.lm_head.weight.copy_(shared["lm_head.weight"])
        else:
            head.load_vocab_mappings(
                torch.isin(torch.arange(IDS), drafted), drafted - torch.arange(len(drafted))
            )
    states = torch.randn(LENGTH + BLOCK, 2 * HIDDEN)  # those behind the text are not seen
    with torch.inference_mode():
        hidden, base, *_ = head._backbone_forward(
            hidden_states=states[None],
            input_ids=torch.cat([tokens, torch.zeros(BLOCK - 1, dtype=torch.long)])[None],
            loss_mask=torch.ones(1, LENGTH + BLOCK),
            verifier_last_hidden_states=torch.zeros(1, LENGTH + BLOCK, HIDDEN),
            document_ids=torch.zeros(1, LENGTH + BLOCK, dtype=torch.long),
            max_anchors=1,
        )
        first = 0 if from_anchor else 1
        before = prefixes(int(tokens[LENGTH]), drafted, first)
        bias = head.markov_head.block_bias(
            prev_token_ids=before, hidden_states=hidden.expand(len(before), -1, -1)
        )
        parts = logits_by_depth(base + bias, len(drafted), first)
    head.save_pretrained(output / kind)
    (output / kind / "config.py").unlink()  # the code of the config's class
    found = {"states": states[:LENGTH].clone(), "tokens": tokens}
    found |= {f"{LENGTH}_{name}": part for name, part in parts.items()}
    save_file(found, output / kind / "vectors.safetensors")
