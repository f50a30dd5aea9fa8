"""Loads a published draft head for its base model, and checks that the two fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.checkpoint.fields import Fields
from specsot.checkpoint.rope import Rope, read_rope
from specsot.errors import HeadMismatch, InvalidRequest, ModelError
from specsot.members import AS_PUBLISHED, Overrides, Quantization
from specsot_drafter.heads.checkpoint import (
    BLOCK_KINDS,
    Checkpoint,
    HeadShape,
    check_supported,
    kind_of,
    read_offsets,
    read_shape,
)
from specsot_drafter.heads.dflash import MASK, BlockHead, block_plan, block_taps, depth_of, mask_of
from specsot_drafter.heads.dspark import DSparkHead, load_markov
from specsot_drafter.heads.eagle import (
    ConcatenatedTaps,
    DraftMask,
    Eagle1Head,
    Eagle3Head,
    EagleHead,
    FinalHidden,
    Fusion,
    HeadLayers,
    HeadWindow,
    SummedTaps,
    choose_taps,
    fetch_norm,
    find_norm,
)
from specsot_model.inference import inference_mode
from specsot_model.layers import Edges, Norm, stored_edges, unchanged
from specsot_model.linear import Linear, ProjectedTable, Table, hold_table, look_up
from specsot_model.published import open_weights
from specsot_model.rotary import Rotary
from specsot_model.stored_form import lm_head_quantization, uses_packed_kernels
from specsot_model.weights import Fetch

log = structlog.get_logger()

# Rows. How many embeddings are projected at a time; bounds the extra memory. Untuned.
PROJECTED_AT_ONCE = 1 << 13
# The epsilon of norms where a head's config names none. Precedent: the reference's config class.
EPS = 1e-6
EMBEDDING = "embed_tokens.weight"
# A head narrower than its base may hold projections in place of tables of its own. When the head is loaded,
# its lm_head is computed as base_lm_head[draft ids] [draft vocabulary, base_hidden] @ lm_proj, and its
# embeddings as base_embeddings [vocab, base_hidden] @ embed_proj.T. With weights packed for a CPU, the
# embedding of a token is computed when it is first looked up instead (`ProjectedTable`).
EMBEDDING_PROJECTION = "embed_proj.weight"  # [hidden, base_hidden]
LM_HEAD_PROJECTION = "lm_proj.weight"  # [base_hidden, hidden]
# Rows. The number of embeddings of a head that are compared with the base model's. Untuned.
COMPARED_ROWS = 1024


def load_head(
    directory: Path,
    base_directory: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    allow_pickle_bin: bool = False,
    allow_pickle_base: bool = False,
    overrides: Overrides = AS_PUBLISHED,
    quantization: Quantization | None = None,
) -> EagleHead:
    """Load an EAGLE-1, EAGLE-2, EAGLE-3, P-EAGLE, DFlash or DSpark head in any published layout, for its base
    model, and return it. A head's own embeddings take precedence over the base model's.

    directory: Where the head is.
    base_directory: Where the base model is.
    dtype: Type of the head's numbers.
    device: Where the head computes.
    allow_pickle_bin: True if pickled weight files of the head may be read, see `WeightFiles`.
    allow_pickle_base: The same for the base model.
    overrides: Settings that replace those of the head's config.
    quantization: The format in which matrices are held, an lm_head of the base model included; the slices of
        fc are not quantized. None: not quantized.

    Raises ModelError for an unusable directory, HeadMismatch with both shapes if the head does not fit the
    base model, and InvalidRequest for an impossible override.

    The result's class is that of the head's family: Eagle1Head, Eagle3Head (also for P-EAGLE), BlockHead or
    DSparkHead.
    """
    base = Fetch(open_weights(base_directory, allow_pickle_base), dtype, device, quantization)
    edges = stored_edges(read_config(base_directory), base)
    head = Checkpoint.open(directory, allow_pickle_bin)
    return fit_head(head, edges, dtype, device, overrides, quantization)


@inference_mode
def fit_head(
    head: Checkpoint,
    base: Edges,
    dtype: torch.dtype,
    device: torch.device | str,
    overrides: Overrides = AS_PUBLISHED,
    quantization: Quantization | None = None,
) -> EagleHead:
    """Load a head like `load_head`, from files or from memory, with only the edges of the base model, and
    return it.

    head: The head's checkpoint.
    base: The base model's embeddings, last norm and lm_head.
    dtype: Type of the head's numbers.
    device: Where the head computes.
    overrides: Settings that replace those of the head's config.
    quantization: The format in which matrices are held. None: not quantized.

    Raises ModelError for a head that is not supported, HeadMismatch if it does not fit the base model, and
    InvalidRequest for an impossible override.

    The result's class is that of the head's family: Eagle1Head, Eagle3Head (also for P-EAGLE), BlockHead or
    DSparkHead.
    """
    check_supported(head)
    fetch = Fetch(head, dtype, device, quantization)
    loader = _HeadLoader(head, fetch, base, read_shape(head, base.config), overrides)
    return getattr(loader, kind_of(head))()


@dataclass(frozen=True, slots=True)
class _HeadLoader:
    """Loader of one head; each family has a method that is called by its name.

    head: The head's checkpoint.
    fetch: Loads the head's own tensors.
    base: The base model's embeddings, last norm and lm_head, which a head may share.
    shape: The sizes of the head.
    overrides: Settings that replace those of the head's config.
    """

    head: Checkpoint
    fetch: Fetch
    base: Edges
    shape: HeadShape
    overrides: Overrides

    @property
    def config(self) -> ModelConfig:
        """Config of the base model."""
        return self.base.config

    def eagle1(self) -> Eagle1Head:
        """Load an EAGLE-1 or EAGLE-2 head; it reads the base model's last hidden state.

        Raises InvalidRequest if the overrides name taps, which such a head does not have.

        Raises HeadMismatch if the head has another hidden size than the base model, or tensors of other
        shapes. Returns the head.
        """
        if self.overrides.aux_layers is not None:
            raise InvalidRequest(f"{self.head.directory}: an EAGLE-1 head has no aux_layers", "aux_layers")
        hidden = self.config.hidden
        self.head.check("fc.weight", (hidden, 2 * hidden))
        self.head.check("layers.0.self_attn.o_proj.weight", (hidden, self.shape.heads * self.shape.head_dim))
        return Eagle1Head(
            shape=self.shape,
            positions=self._positions,
            fusion=self._final(),
            table=self._table(),
            fc=Linear(*self._fc(2), self.fetch.quantization),
            decoder=self._layers(),
            lm_head=self.base.lm_head(),
            token_norm=find_norm(self.fetch, "embedding_layernorm", hidden, self._eps),
            feature_norm=find_norm(self.fetch, "hidden_states_layernorm", hidden, self._eps),
            input_norm=find_norm(self.fetch, "layers.0.input_layernorm", hidden, self._eps),
        )

    def eagle3(self) -> Eagle3Head:
        """Load an EAGLE-3 or P-EAGLE head and return it. Raises HeadMismatch if it does not fit the base
        model.

        Raises ModelError if a tensor is missing, and InvalidRequest for impossible taps in the overrides.
        The mask is None unless it is a P-EAGLE head.
        """
        hidden = self.shape.hidden
        fusion = self._fusion()
        return Eagle3Head(
            shape=self.shape,
            positions=self._positions,
            fusion=fusion,
            table=self._table(),
            token_norm=fetch_norm(self.fetch, "layers.0.input_layernorm", hidden, self._eps),
            feature_norm=fetch_norm(self.fetch, "layers.0.hidden_norm", hidden, self._eps),
            decoder=self._layers(),
            norm=fetch_norm(self.fetch, "norm", hidden, self._eps),
            lm_head=self._lm_head(),
            offsets=read_offsets(self.head, self.shape, self.config, self.fetch.device),
            norm_before_residual=self.head.flag("norm_before_residual"),
            norm_output=self.head.flag("norm_output"),
            mask=self._mask(fusion),
        )

    def dflash(self) -> BlockHead:
        """Load a DFlash head and return it. Raises HeadMismatch if it does not fit the base model.

        Raises ModelError for a bad block size or a missing tensor, and InvalidRequest for impossible taps in
        the overrides.
        """
        return self._block(BlockHead)

    def dspark(self) -> BlockHead:
        """Load a DSpark head and return it. Raises HeadMismatch if it does not fit the base model.

        Raises ModelError for a bad block size, a kind of Markov head that is not supported or a missing
        tensor, and InvalidRequest for impossible taps in the overrides.
        """
        shape = self.shape
        markov = load_markov(self.head, self.fetch, self.config.vocab, shape.hidden, shape.vocab)
        return self._block(partial(DSparkHead, markov=markov))

    def _block(self, make: Callable[..., BlockHead]) -> BlockHead:
        """Load the parts that DFlash and DSpark heads have in common, and return the head.

        make: Makes the head from these parts.
        """
        hidden = self.shape.hidden
        taps = taps_of(self.head, self.config.layers, self.overrides)
        return make(
            shape=self.shape,
            positions=self._positions,
            fusion=SummedTaps(taps, *self._fc(len(taps))),
            table=self._table(),
            block=block_plan(self.head, self.config.vocab),
            context_norm=fetch_norm(self.fetch, "hidden_norm", hidden, self._eps),
            input_norm=fetch_norm(self.fetch, "layers.0.input_layernorm", hidden, self._eps),
            decoder=self._layers(),
            norm=fetch_norm(self.fetch, "norm", hidden, self._eps),
            lm_head=self._lm_head(),
            offsets=read_offsets(self.head, self.shape, self.config, self.fetch.device),
        )

    def _fusion(self) -> Fusion:
        """Return how states of the base model become features.

        fc runs in the stages unless a norm precedes it. Some heads have no fc, and read the last state.

        A head whose config sets `use_aux_hidden_state` to false reads the last state alone, which is
        `FinalHidden`. Without norms before fc, the result is `SummedTaps`, else `ConcatenatedTaps`. Raises
        HeadMismatch if fc has another shape than the taps need, and ModelError if the norms exclude each
        other.
        """
        if not self.head.settings.get("use_aux_hidden_state", True):
            return self._final()
        taps = taps_of(self.head, self.config.layers, self.overrides)
        weight, bias = self._fc(len(taps))
        norms = self._fusion_norms(len(taps))
        if not norms:
            return SummedTaps(taps, weight, bias)
        fc = Linear(weight, bias, self.fetch.quantization)
        return ConcatenatedTaps(taps, fc.shape[1], norms, fc, self.fetch.dtype)

    def _final(self) -> FinalHidden:
        """Return the fusion of a head that reads the base model's last hidden state. Raises HeadMismatch if
        that state does not have the head's hidden size.
        """
        hidden = self.config.hidden
        if self.shape.hidden != hidden:
            raise HeadMismatch(
                f"{self.head.directory}: it takes the base's last state as it is, which is [{hidden}], "
                f"but its own are [{self.shape.hidden}]"
            )
        return FinalHidden(
            (self.config.layers,), hidden, [self.base.final_norm()], unchanged, self.fetch.dtype
        )

    def _fc(self, states: int) -> tuple[Tensor, Tensor | None]:
        """Return the weight of fc, [hidden, states * base hidden], and its bias, [hidden], or None if it has
        no bias.

        states: Number of hidden states of the base model that are fused.
        """
        weight = self.fetch("fc.weight", (self.shape.hidden, states * self.config.hidden))
        return weight, self.fetch("fc.bias", weight.shape[:1]) if "fc.bias" in self.fetch else None

    def _mask(self, fusion: Fusion) -> DraftMask | None:
        """Return the mask of a P-EAGLE head; None for other heads.

        fusion: How states of the base model become features. The mask's hidden states are fused here, once.

        Raises HeadMismatch if their number of columns is not that of fc.

        A head has a mask if it has the tensor of the mask's hidden states. Also raises what `mask_of` raises
        for a mask token that the config does not name or that is out of range.
        """
        if MASK not in self.fetch:
            return None
        slices = fusion.slices().values()
        states = self.fetch(MASK, self.head.shape(MASK)).flatten()
        wanted = len(slices) * self.config.hidden
        if len(states) != wanted:
            raise HeadMismatch(f"{self.head.directory}: {MASK} has {len(states)} columns, fc reads {wanted}")
        parts = zip(slices, states.split(self.config.hidden))
        fused = torch.stack([weight.to(part.device) @ part for weight, part in parts]).sum(0)
        token = mask_of(self.head, self.config.vocab)
        return DraftMask(token, fusion.features(fused[None])[0], depth_of(self.head))

    def _fusion_norms(self, states: int) -> list[Norm]:
        """Return the norms before fc: one over all states together, or one for each state. Return [] if the
        head has none. Raises ModelError if the config asks for both.

        states: Number of hidden states of the base model that are fused.

        A norm over all states has the columns of all of them; each of the other norms has those of one
        state.
        """
        joint, each = fusion_norms(self.head)
        if joint and each:
            raise ModelError(f"{self.head.directory}: norm_before_fc and fc_norm exclude each other")
        if joint:
            return [fetch_norm(self.fetch, "input_norm", states * self.config.hidden, self._eps)]
        names = [f"fc_norm.{state}" for state in range(states)] if each else []
        return [fetch_norm(self.fetch, name, self.config.hidden, self._eps) for name in names]

    def _table(self) -> Table | ProjectedTable:
        """Return the head's own embeddings, projected ones, or the base model's; see EMBEDDING_PROJECTION.

        Raises HeadMismatch if the base model's embeddings would be needed and do not fit.

        Own embeddings are used first, and compared with the base model's if the sizes are equal: a
        difference is only logged. Without own ones, a base model that scales its embeddings raises
        HeadMismatch, even if the head has a projection.
        """
        wanted = (self.config.vocab, self.shape.hidden)
        if EMBEDDING in self.fetch:
            own = self.fetch(EMBEDDING, wanted)
            if self.shape.hidden == self.config.hidden:
                _compare(own, self.base.embedding(), self.head.directory)
            return hold_table(own, self.fetch.quantization)
        if self.config.embedding_scale != 1:
            raise HeadMismatch(f"{self.head.directory}: no {EMBEDDING} in it, and the base scales its own")
        if EMBEDDING_PROJECTION in self.fetch:
            return self._projected_table()
        if self.shape.hidden != self.config.hidden:
            raise HeadMismatch(
                f"{self.head.directory}: no {EMBEDDING} in it, which must be {list(wanted)}; "
                f"the base's is {[self.config.vocab, self.config.hidden]}"
            )
        return self.base.embedding()

    def _projected_table(self) -> Table | ProjectedTable:
        """Return the base model's embeddings, projected to the head's hidden size. With packed CPU weights,
        the result is a `ProjectedTable`, which projects the embedding of a token when it is first looked up.
        """
        projection = self.fetch(EMBEDDING_PROJECTION, (self.shape.hidden, self.config.hidden))
        embedding = self.base.embedding()
        if uses_packed_kernels(self.fetch.quantization, self.fetch.device):
            return ProjectedTable(embedding, projection)
        ids = torch.arange(self.config.vocab, device=self.fetch.device)
        parts = (F.linear(look_up(embedding, some), projection) for some in ids.split(PROJECTED_AT_ONCE))
        return torch.cat(list(parts))

    def _lm_head(self) -> Linear:
        """Return the head's own lm_head, or the rows of the base model's that belong to the draft ids.

        The config's flag of tied embeddings is ignored, because it is copied from the base model. Raises
        HeadMismatch if the base model's lm_head would be needed and does not fit.

        With LM_HEAD_PROJECTION, the base model's rows are projected to the head's hidden size, so that
        another size fits as well. A head that drafts all ids shares the base model's lm_head as it is.
        """
        kind = lm_head_quantization(self.fetch.quantization)
        if "lm_head.weight" in self.fetch:
            weight = self.fetch("lm_head.weight", (self.shape.vocab, self.shape.hidden))
            return Linear(weight, None, kind)
        projected = LM_HEAD_PROJECTION in self.fetch
        if self.shape.hidden != self.config.hidden and not projected:
            raise HeadMismatch(
                f"{self.head.directory}: no lm_head.weight in it, which must be "
                f"[.., {self.shape.hidden}]; the base's is {[self.config.vocab, self.config.hidden]}"
            )
        offsets = read_offsets(self.head, self.shape, self.config, self.fetch.device)
        if offsets is None and not projected:
            return self.base.lm_head()
        drafted = None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)
        projection = (
            self.fetch(LM_HEAD_PROJECTION, (self.config.hidden, self.shape.hidden)) if projected else None
        )
        sources = [each for each in (drafted, projection) if each is not None]
        shape = self.config.vocab if drafted is None else len(drafted), self.shape.hidden

        def make() -> Table:
            """Return the rows of the base model's lm_head, projected if the head says so."""
            rows = self.base.lm_head_rows(drafted)
            weight = rows if projection is None else rows @ projection
            return hold_table(weight, self.fetch.quantization)

        return Linear(self.base.keep(f"lm_head-{_digest(*sources)}", shape, kind, make), None, kind)

    def _layers(self) -> HeadLayers:
        """Load the decoder layers, with the head's own RoPE settings, and return them.

        Raises ModelError if a layer lacks a tensor. Overrides may replace the theta of RoPE.
        """
        shape = self.shape
        rotary = Rotary(
            rope_of(self.head, self.overrides), shape.heads, shape.kv_heads, shape.head_dim, self.fetch.device
        )
        return HeadLayers(self.fetch, shape, rotary, self._eps, self._window())

    def _window(self) -> HeadWindow | None:
        """Return the attention window of the head's layers. Return None if no layer has one, or if the config
        switches windows off.

        Raises ModelError if a layer has a window but the config does not give a valid `sliding_window`.
        Layers beyond the head's are ignored.
        """
        fields = Fields(self.head.source, self.head.settings)
        kinds = self.head.settings.get("layer_types") or ()
        layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
        if not layers or not fields.flag("use_sliding_window", True):
            return None
        return HeadWindow(fields.count("sliding_window"), layers & frozenset(range(self.shape.layers)))

    @property
    def _positions(self) -> int:
        """Number of positions that the head drafts for.

        These are the base model's, or with dynamic RoPE scaling at most the head's own; see `_dynamic`.

        If the config gives no number of its own, 2048 counts.
        """
        max_positions = self.config.max_positions
        if not _dynamic(self.head):
            return max_positions
        return min(
            max_positions, Fields(self.head.source, self.head.settings).count("max_position_embeddings", 2048)
        )

    @property
    def _eps(self) -> float:
        """The epsilon of the head's norms."""
        return Fields(self.head.source, self.head.settings).number("rms_norm_eps", EPS)


def _digest(*tensors: Tensor) -> str:
    """Return 16 hex digits that differ for tensors of other numbers.

    tensors: The tensors.
    """
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def rope_of(head: Checkpoint, overrides: Overrides) -> Rope:
    """Return the head's RoPE settings, never the base model's; theta is 10000 if the config names none.

    head: The head's checkpoint.
    overrides: Settings that replace those of the config.

    With dynamic scaling, only the theta of the config counts. A theta in the overrides replaces that of the
    config.
    """
    settings = {"rope_theta": head.settings.get("rope_theta")} if _dynamic(head) else head.settings
    rope = read_rope(settings, head.source)
    theta = overrides.rope_theta
    return rope if theta is None else replace(rope, theta=theta)


def _dynamic(head: Checkpoint) -> bool:
    """Return whether the head uses dynamic RoPE scaling. Return False if its config names no scaling, or
    another kind.

    head: The head's checkpoint.

    Dynamic scaling changes nothing before the head's own number of positions, and this drafter does not draft
    beyond it. So the scaling is ignored, and the positions are limited.
    """
    scaling = head.settings.get("rope_scaling")
    return isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "dynamic"


def taps_of(head: Checkpoint, layers: int, overrides: Overrides) -> tuple[int, ...]:
    """Return the numbers of the base model's layers whose inputs the head reads, ascending; see
    `choose_taps`.

    head: The head's checkpoint.
    layers: Number of layers of the base model.
    overrides: Settings that replace those of the config, such as the taps.

    Raises InvalidRequest for impossible taps of the overrides, HeadMismatch for impossible taps of the
    config.
    """
    named = block_taps(head) if kind_of(head) in BLOCK_KINDS else None
    return choose_taps(head, layers, overrides.aux_layers, named)


def fusion_norms(head: Checkpoint) -> tuple[bool, bool]:
    """Return whether there is one norm over all states before fc, and whether there is one per state. Both
    are False for a head without such norms.

    head: The head's checkpoint.
    """
    joint = head.flag("norm_before_fc") or "input_norm.weight" in head
    return joint, head.flag("fc_norm") or "fc_norm.0.weight" in head


def _compare(own: Tensor, base: Table, directory: Path) -> None:
    """Log a warning if the head's embeddings differ from the base model's. Nothing is logged if they agree.

    own: The head's embeddings, [vocabulary, hidden].
    base: The base model's embeddings, [vocabulary, hidden].
    directory: Where the head is, for the message.

    Some heads were published with untrained embeddings; such heads draft, but badly.
    """
    compared = torch.arange(0, len(own), max(len(own) // COMPARED_ROWS, 1), device=own.device)
    if not torch.allclose(own[compared].float(), look_up(base, compared).float(), atol=1e-2):
        log.warning("the head's own embeddings are not the base's; they are used", head=str(directory))
