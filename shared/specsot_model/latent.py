"""Multi-head latent attention (MLA) in its absorbed form, as what a `Block` does around its attention.

Of each token, the pages hold one row [k_pe | c] for all heads: a rotated key k_pe, and a latent vector c. As
published, the key and the value of head h are [U_h c | k_pe] and V_h c. Scores and outputs are the same if
U_h and V_h are applied to queries and outputs instead, so that no key or value of a head is ever computed:

    q_nope . (U_h c) + q_pe . k_pe = [q_pe | U_h^T q_nope] . [k_pe | c]
    sum of p_i (V_h c_i) = V_h (sum of p_i c_i)

Attention is then that of a model with one KV head, whose rows are keys and values at once. The formulas are
those of DeepSeek-V2 (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import Latent
from specsot_model.linear import Linear
from specsot_model.norms import Norm
from specsot_model.projections import fuse_latent_queries
from specsot_model.weights import Fetch

# The epsilon of the norms of latent vectors. Precedent: Transformers' modules of all families, whatever their
# config says of the other norms.
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Turns what a layer projects into the queries and the row of its one KV head, and weighted sums of
    latent vectors into the outputs of the heads.

    latent: Sizes of the attention.
    query_norm: Norm of the vector from which queries are projected; None: they are projected directly.
    queries: Product [query_rank] -> the heads' queries; None: they are projected directly.
    row_norm: Norm of the latent vector c.
    keys: [heads, unrotated, rank], U of each head.
    values: [heads, rank, value], the transposed V of each head.
    """

    latent: Latent
    query_norm: Norm | None
    queries: Linear | None
    row_norm: Norm
    keys: Tensor
    values: Tensor

    @classmethod
    def fetch(cls, fetch: Fetch, prefix: str, config: ModelConfig, latent: Latent) -> LatentHeads:
        """Return the parts of one layer, with their weights loaded. U and V are never quantized.

        ModelError is raised if a tensor is missing or has another shape.

        fetch: Reads tensors from the model's files.
        prefix: Name of the attention module, without a dot at the end.
        config: The model's config, for the number of heads.
        latent: Sizes of the attention.
        """
        query_norm = queries = None
        if latent.query_rank is not None:
            query_norm = Norm(fetch(f"{prefix}.q_a_layernorm.weight", (latent.query_rank,)), EPS)
            queries = fuse_latent_queries(fetch, prefix, config, latent)
        row_norm = Norm(fetch(f"{prefix}.kv_a_layernorm.weight", (latent.rank,)), EPS)
        if f"{prefix}.k_b_proj.weight" in fetch:
            # GGUF files have U and V apart, and U transposed.
            shape = config.heads, latent.rank, latent.unrotated
            keys = fetch(f"{prefix}.k_b_proj.weight", shape).transpose(1, 2)
            values = fetch(f"{prefix}.v_b_proj.weight", (config.heads, latent.value, latent.rank))
        else:
            sizes = latent.unrotated, latent.value
            expand = fetch(f"{prefix}.kv_b_proj.weight", (config.heads * sum(sizes), latent.rank))
            keys, values = expand.unflatten(0, (config.heads, -1)).split(sizes, 1)
        return cls(
            latent, query_norm, queries, row_norm, keys.contiguous(), values.transpose(1, 2).contiguous()
        )

    def project(self, projected: Tensor) -> Tensor:
        """Return the queries of all heads, and as the last head the row that the pages store; neither is
        rotated yet. The result is [rows, heads + 1, Latent.row].

        projected: [rows, query_rank or heads * Latent.query, and Latent.row], what `fuse_latent_inputs`
            computes.
        """
        latent = self.latent
        queries, row = projected.split((projected.shape[1] - latent.row, latent.row), 1)
        if self.query_norm is not None and self.queries is not None:
            queries = self.queries(self.query_norm(queries))
        rotated, unrotated = queries.unflatten(1, (-1, latent.query)).split(
            (latent.rotated, latent.unrotated), 2
        )
        heads = projected.new_empty(len(projected), rotated.shape[1] + 1, latent.row)
        heads[:, :-1, : latent.rotated] = rotated
        heads[:, :-1, latent.rotated :] = torch.bmm(unrotated.transpose(0, 1), self.keys).transpose(0, 1)
        heads[:, -1, : latent.rotated] = row[:, : latent.rotated]
        heads[:, -1, latent.rotated :] = self.row_norm(row[:, latent.rotated :])
        return heads

    def expand(self, attended: Tensor) -> Tensor:
        """Return the heads' outputs, [rows, heads * value].

        attended: [rows, heads * rank], the weighted sums of latent vectors.
        """
        sums = attended.unflatten(1, (len(self.values), -1))
        return torch.bmm(sums.transpose(0, 1), self.values).transpose(0, 1).flatten(1)


def fits_tiles(latent: Latent) -> bool:
    """Tell whether the GPU's attention kernel can read the rows: the number of rotated elements must be a
    power of two of at least 16.

    latent: Sizes of the attention.
    """
    return latent.rotated >= 16 and latent.rotated.bit_count() == 1
