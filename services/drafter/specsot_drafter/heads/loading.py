"""Loads a published head against its base: which family it is, its parts, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    Checkpoint,
    HeadShape,
    check_supported,
    kind_of,
    read_offsets,
    read_shape,
)
from specsot_drafter.heads.dflash import MASK, BlockHead, block_plan, block_taps, depth_of, mask_of
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
from specsot_model.layers import Edges, Norm, stored_edges
from specsot_model.linear import Linear, Table, hold_table, look_up, of_lm_head
from specsot_model.published import open_weights
from specsot_model.rotary import Rotary
from specsot_model.weights import Fetch

log = structlog.get_logger()

EPS = 1e-6  # of the reference's config class, where a head's config names none
EMBEDDING = "embed_tokens.weight"
# A head narrower than its base may hold projections in place of tables of its own. The tables are made when
# the head is loaded: embeddings = base_embeddings [vocab, base_hidden] @ embed_proj.T, and
# lm_head = base_lm_head[draft ids] [draft vocabulary, base_hidden] @ lm_proj.
EMBEDDING_PROJECTION = "embed_proj.weight"  # [hidden, base_hidden]
LM_HEAD_PROJECTION = "lm_proj.weight"  # [base_hidden, hidden]
COMPARED_ROWS = 1024  # rows of the embeddings that are compared with the base's; not measured


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
    """An EAGLE-1, EAGLE-2, EAGLE-3, P-EAGLE or DFlash head in any published layout, fitted to its base.

    Embeddings of its own win over the base's. allow_pickle_bin, allow_pickle_base: see `WeightFiles`.
    quantization: what its matrices are held in, an lm_head that it borrows included; slices of fc are not.
    Raises ModelError for either directory, HeadMismatch with both shapes where they do not fit,
    InvalidRequest for an override that cannot be.
    """
    base = Fetch(open_weights(base_directory, allow_pickle_base), dtype, device, quantization)
    edges = stored_edges(read_config(base_directory), base)
    head = Checkpoint.open(directory, allow_pickle_bin)
    return fit_head(head, edges, dtype, device, overrides, quantization)


@torch.inference_mode()
def fit_head(
    head: Checkpoint,
    base: Edges,
    dtype: torch.dtype,
    device: torch.device | str,
    overrides: Overrides = AS_PUBLISHED,
    quantization: Quantization | None = None,
) -> EagleHead:
    """The same, for a head that may be in memory, and a base of which only the edges are at hand."""
    check_supported(head)
    fetch = Fetch(head, dtype, device, quantization)
    loader = _HeadLoader(head, fetch, base, read_shape(head, base.config), overrides)
    return getattr(loader, kind_of(head))()


@dataclass(frozen=True, slots=True)
class _HeadLoader:
    """One head on its way into memory. fetch: its own tensors; base: what its base lends."""

    head: Checkpoint
    fetch: Fetch
    base: Edges
    shape: HeadShape
    overrides: Overrides

    @property
    def config(self) -> ModelConfig:
        """The base's."""
        return self.base.config

    def eagle1(self) -> Eagle1Head:
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
        hidden = self.shape.hidden
        taps = taps_of(self.head, self.config.layers, self.overrides)
        return BlockHead(
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
        """fc where the taps are, unless a norm comes before it; some heads have none at all."""
        if not self.head.settings.get("use_aux_hidden_state", True):
            return self._final()
        taps = taps_of(self.head, self.config.layers, self.overrides)
        weight, bias = self._fc(len(taps))
        norms = self._fusion_norms(len(taps))
        if not norms:
            return SummedTaps(taps, weight, bias)
        return ConcatenatedTaps(taps, norms, Linear(weight, bias, self.fetch.quantization), self.fetch.dtype)

    def _final(self) -> FinalHidden:
        hidden = self.config.hidden
        if self.shape.hidden != hidden:
            raise HeadMismatch(
                f"{self.head.directory}: it takes the base's last state as it is, which is [{hidden}], "
                f"but its own are [{self.shape.hidden}]"
            )
        return FinalHidden(self.config.layers, hidden, self.base.final_norm(), self.fetch.dtype)

    def _fc(self, states: int) -> tuple[Tensor, Tensor | None]:
        """fc's weight [hidden, states * base hidden], and its bias if it has one."""
        weight = self.fetch("fc.weight", (self.shape.hidden, states * self.config.hidden))
        return weight, self.fetch("fc.bias", weight.shape[:1]) if "fc.bias" in self.fetch else None

    def _mask(self, fusion: Fusion) -> DraftMask | None:
        """P-EAGLE's, None for others: the states that stand in for unknown ones are fused here once."""
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
        """One norm over all states before fc, one for each of them, or none."""
        joint, each = fusion_norms(self.head)
        if joint and each:
            raise ModelError(f"{self.head.directory}: norm_before_fc and fc_norm exclude each other")
        if joint:
            return [fetch_norm(self.fetch, "input_norm", states * self.config.hidden, self._eps)]
        names = [f"fc_norm.{state}" for state in range(states)] if each else []
        return [fetch_norm(self.fetch, name, self.config.hidden, self._eps) for name in names]

    def _table(self) -> Table:
        """Embeddings of its own, or the base's."""
        wanted = (self.config.vocab, self.shape.hidden)
        if EMBEDDING in self.fetch:
            own = self.fetch(EMBEDDING, wanted)
            if self.shape.hidden == self.config.hidden:
                _compare(own, self.base.embedding(), self.head.directory)
            return hold_table(own, self.fetch.quantization)
        if self.config.embedding_scale != 1:
            raise HeadMismatch(f"{self.head.directory}: no {EMBEDDING} in it, and the base scales its own")
        if EMBEDDING_PROJECTION in self.fetch:
            projection = self.fetch(EMBEDDING_PROJECTION, (self.shape.hidden, self.config.hidden))
            ids = torch.arange(self.config.vocab, device=self.fetch.device)
            embeddings = look_up(self.base.embedding(), ids)
            return hold_table(F.linear(embeddings, projection), self.fetch.quantization)
        if self.shape.hidden != self.config.hidden:
            raise HeadMismatch(
                f"{self.head.directory}: no {EMBEDDING} in it, which must be {list(wanted)}; "
                f"the base's is {[self.config.vocab, self.config.hidden]}"
            )
        return self.base.embedding()

    def _lm_head(self) -> Linear:
        """Its own, or the base's. A config's flag of tying is copied from the base and says nothing."""
        kind = of_lm_head(self.fetch.quantization)
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
        rows = self.base.lm_head_rows(drafted)
        if projected:
            rows = rows @ self.fetch(LM_HEAD_PROJECTION, (self.config.hidden, self.shape.hidden))
        return Linear(rows, None, kind)

    def _layers(self) -> HeadLayers:
        shape = self.shape
        rotary = Rotary(
            rope_of(self.head, self.overrides), shape.heads, shape.kv_heads, shape.head_dim, self.fetch.device
        )
        return HeadLayers(self.fetch, shape, rotary, self._eps, self._window())

    def _window(self) -> HeadWindow | None:
        """None where every layer sees everything."""
        fields = Fields(self.head.source, self.head.settings)
        kinds = self.head.settings.get("layer_types") or ()
        layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
        if not layers or not fields.flag("use_sliding_window", True):
            return None
        return HeadWindow(fields.count("sliding_window"), layers & frozenset(range(self.shape.layers)))

    @property
    def _positions(self) -> int:
        """How far it drafts: as far as the base reaches."""
        most = self.config.max_positions
        if not _dynamic(self.head):
            return most
        return min(most, Fields(self.head.source, self.head.settings).count("max_position_embeddings", 2048))

    @property
    def _eps(self) -> float:
        return Fields(self.head.source, self.head.settings).number("rms_norm_eps", EPS)


def rope_of(head: Checkpoint, overrides: Overrides) -> Rope:
    """The head's own, never the base's; 10000 where nothing is said."""
    settings = {"rope_theta": head.settings.get("rope_theta")} if _dynamic(head) else head.settings
    rope = read_rope(settings, head.source)
    theta = overrides.rope_theta
    return rope if theta is None else replace(rope, theta=theta)


def _dynamic(head: Checkpoint) -> bool:
    """Dynamic scaling sets in behind the head's own positions; before, it is none. We end there."""
    scaling = head.settings.get("rope_scaling")
    return isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "dynamic"


def taps_of(head: Checkpoint, layers: int, overrides: Overrides) -> tuple[int, ...]:
    """See `choose_taps`."""
    named = block_taps(head) if kind_of(head) == "dflash" else None
    return choose_taps(head, layers, overrides.aux_layers, named)


def fusion_norms(head: Checkpoint) -> tuple[bool, bool]:
    """Whether there is one norm over all states before fc, and whether there is one for each of them."""
    joint = head.flag("norm_before_fc") or "input_norm.weight" in head
    return joint, head.flag("fc_norm") or "fc_norm.0.weight" in head


def _compare(own: Tensor, base: Table, directory: Path) -> None:
    """Some heads were published with embeddings nobody trained; they draft, but badly."""
    compared = torch.arange(0, len(own), max(len(own) // COMPARED_ROWS, 1), device=own.device)
    if not torch.allclose(own[compared].float(), look_up(base, compared).float(), atol=1e-2):
        log.warning("the head's own embeddings are not the base's; they are used", head=str(directory))
