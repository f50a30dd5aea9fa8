"""A DSpark head: a DFlash head whose Markov head makes every drafted token depend on the one before it.

The body drafts a block in one pass, as `specsot_drafter.heads.dflash` describes. With the logits b_i that the
body gives for place i of the block, and the token x_{i-1} before that place, the logits of place i are

    b_i + W2 z_i,   z_i = W1[x_{i-1}]                                               vanilla
                    z_i = sigmoid(G [h_i, W1[x_{i-1}]]) * W1[x_{i-1}]               gated
                    z_i = tanh(o_i), s_i = sigmoid(g_i) * s_{i-1} + (1 - sigmoid(g_i)) * tanh(c_i),
                          [g_i, c_i, o_i] = J [s_{i-1}, W1[x_{i-1}], h_i]           rnn

where h_i is the body's output at place i, and s is zero before the first row of the block. So the
log-probability of a path is a sum of conditional ones, and trees grow as those of other heads do. The formats
of DeepSeek's DeepSpec, of SpecForge and of vLLM's speculators are supported. The confidence head that such
checkpoints may have is not read: the draft policy measures acceptance itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from specsot.errors import ModelError
from specsot_drafter.heads.checkpoint import MARKOV, Checkpoint
from specsot_drafter.heads.dflash import BlockHead
from specsot_model.linear import Linear, Table, hold_table, look_up
from specsot_model.stored_form import lm_head_quantization
from specsot_model.weights import Fetch

MarkovKind = Literal["vanilla", "gated", "rnn"]
# The projection that each kind has besides W1 and W2, by its name in the files.
PROJECTIONS: Mapping[MarkovKind, str] = {"gated": "gate_proj", "rnn": "joint_proj"}


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """The part of a DSpark head that makes a place depend on the tokens before it.

    kind: How the logits depend on them: on the last token ("vanilla"), on it and the place's output
        ("gated"), or on all tokens of the block ("rnn").
    rank: Columns of W1.
    embedding: W1, [vocabulary of the base model, rank].
    projection: W2, which maps a latent row, [rank], to what is added to the logits, [draft vocabulary].
    mix: The projection G or J. None for the kind "vanilla".
    """

    kind: MarkovKind
    rank: int
    embedding: Table
    projection: Linear
    mix: Linear | None

    @property
    def width(self) -> int:
        """Columns of a node's row: z, and with the kind "rnn" the state s after it."""
        return 2 * self.rank if self.kind == "rnn" else self.rank

    def read(self, tokens: Tensor, outputs: Tensor, before: Tensor) -> Tensor:
        """Return the rows of nodes, [nodes, width], from which `logits` are computed.

        tokens: The base model's id of each node's token, [nodes].
        outputs: The body's output at the place that follows each node, [nodes, hidden].
        before: The row of each node's parent, [nodes, width]; zeros before the first row of a block.
        """
        embedded = look_up(self.embedding, tokens).to(outputs.dtype)
        if self.mix is None:
            return embedded
        if self.kind == "gated":
            return torch.sigmoid(self.mix(torch.cat((outputs, embedded), 1))) * embedded
        state = before[:, self.rank :]
        gate, candidate, latent = self.mix(torch.cat((state, embedded, outputs), 1)).chunk(3, 1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.cat((torch.tanh(latent), state), 1)

    def logits(self, rows: Tensor) -> Tensor:
        """Return what is added to the body's logits at the place that follows each node, [nodes, draft
        vocabulary].

        rows: Rows of `read`, [nodes, width].
        """
        return self.projection(rows[:, : self.rank].contiguous())


@dataclass(kw_only=True, eq=False)
class DSparkHead(BlockHead):
    """A DSpark head that was loaded for its base model.

    markov: The Markov head.
    """

    kind = "dspark"

    markov: MarkovHead

    def begin(self, roots: Tensor, outputs: Tensor) -> Tensor:
        """Return the Markov head's rows at the roots of blocks, [blocks, width].

        roots: Token id of each root, [blocks].
        outputs: The body's outputs, [blocks, rows, hidden].

        If the first row drafts nothing, the Markov head reads it, too, as in training.
        """
        rows = outputs.new_zeros(len(roots), self.markov.width)
        for place in range(self.block.first + 1):
            rows = self.markov.read(roots, outputs[:, place], rows)
        return rows


def load_markov(head: Checkpoint, fetch: Fetch, vocab: int, hidden: int, draft_vocab: int) -> MarkovHead:
    """Load the Markov head of a DSpark checkpoint, and return it.

    head: The head's checkpoint.
    fetch: Loads its tensors.
    vocab: Number of token ids of the base model.
    hidden: Columns of the head's hidden states.
    draft_vocab: Number of token ids that the head can draft.

    Raises ModelError if the config names a kind that is not supported or if a tensor is missing, and
    HeadMismatch if a tensor has another shape.
    """
    kind = head.settings.get("markov_head_type", "vanilla")
    if kind not in get_args(MarkovKind):
        raise ModelError(f"{head.source}: markov_head_type {kind!r} is not vanilla, gated or rnn")
    rank = head.shape(f"{MARKOV}.markov_w1.weight")[-1]
    # W2 is as sensitive as the lm_head, to whose logits its own are added.
    form = lm_head_quantization(fetch.quantization)
    return MarkovHead(
        kind=kind,
        rank=rank,
        embedding=hold_table(fetch(f"{MARKOV}.markov_w1.weight", (vocab, rank)), fetch.quantization),
        projection=Linear(fetch(f"{MARKOV}.markov_w2.weight", (draft_vocab, rank)), None, form),
        mix=_mix(fetch, kind, rank, hidden),
    )


def _mix(fetch: Fetch, kind: MarkovKind, rank: int, hidden: int) -> Linear | None:
    """Load the projection G or J and return it, not quantized, as it is small. Return None for the kind
    "vanilla", which has none.

    fetch: Loads the head's tensors.
    kind: Kind of the Markov head.
    rank: Columns of W1.
    hidden: Columns of the head's hidden states.
    """
    if kind == "vanilla":
        return None
    shape = (rank, hidden + rank) if kind == "gated" else (3 * rank, hidden + 2 * rank)
    name = f"{MARKOV}.{PROJECTIONS[kind]}"
    return Linear(fetch(f"{name}.weight", shape), fetch(f"{name}.bias", shape[:1]))
