"""What a drafter is started with, read once.

Refuses to know torch: it is not even imported before this is read.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsot.drafting import DRAFT_MODES, TUNERS, DraftOptions
from specsot.errors import InvalidRequest
from specsot.members import Overrides, Quantization, WeightFormat
from specsot.params import DrafterName
from specsot.process.flags import Flags, above_zero, layer_numbers, positive
from specsot.process.setting import Setting, add_membership, add_setting, read_member_setting


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """model: the base it drafts for. draft_model: what drafts, where that needs a model.

    kv_memory in bytes.
    """

    setting: Setting
    model: Path
    drafter: DrafterName
    draft_model: Path | None
    master: str
    advertise: str | None
    name: str | None
    dtype: str
    device: str
    kv_memory: int
    draft_format: WeightFormat
    model_format: WeightFormat
    overrides: Overrides
    options: DraftOptions
    quantization: Quantization | None


def read_config(arguments: Sequence[str] | None = None) -> DrafterConfig:
    """Exits with status 2 and one line when something is wrong."""
    flags = Flags("specsot-drafter", "Drafts trees of tokens for a SpecSoT ring.")
    add_membership(flags)
    ways = ("eagle", "model", "ngram")
    flags.flag("drafter", default="eagle", choices=ways, help="with a head, a small model, or the text alone")
    flags.flag("draft-model", help="directory of the EAGLE head, or of the small model")
    flags.flag(
        "draft-format",
        default="safetensors",
        choices=("safetensors", "bin"),
        help="bin reads its pytorch_model.bin (weights only) where it has no safetensors file",
    )
    flags.flag("drafter-rope-theta", above_zero, help="rotary base of the head, if its config is wrong")
    flags.flag(
        "aux-layers",
        layer_numbers,
        help="the model's layers whose input the head reads, such as 2,16,29, if its config is wrong",
    )
    add_drafting(flags)
    add_setting(flags, "127.0.0.1:0")
    given = flags.read(arguments)
    if given.draft_model is None and given.drafter != "ngram":
        flags.error(f"--drafter {given.drafter} needs --draft-model")
    return DrafterConfig(
        setting=read_member_setting(flags, given),
        model=Path(given.model),
        drafter=given.drafter,
        draft_model=None if given.draft_model is None else Path(given.draft_model),
        master=given.master,
        advertise=given.advertise,
        name=given.name,
        dtype=given.dtype,
        device=given.device,
        kv_memory=given.kv_memory,
        draft_format=given.draft_format,
        model_format=given.model_format,
        overrides=Overrides(given.drafter_rope_theta, given.aux_layers),
        options=read_drafting(flags, given),
        quantization=given.quantization,
    )


def add_drafting(flags: Flags) -> None:
    """How trees grow, and who decides how much of them."""
    usual = DraftOptions()
    flags.flag("draft-mode", choices=DRAFT_MODES, help="a chain, a tree, or (of a model) a pruned tree")
    flags.flag("draft-tokens", positive, help="how deep drafts go at most")
    flags.flag("draft-breadth", positive, help="children of every node of a tree that is fed")
    flags.flag("draft-nodes", positive, help="nodes of a tree at most, its root left out")
    flags.flag("draft-threshold", float, usual.threshold, "pruned: nothing grows below less likely nodes")
    flags.flag("tuner", default=usual.tuner, choices=TUNERS, help="who decides; seed, fixed: for comparisons")
    flags.flag("blend", default="yes", choices=("yes", "no"), help="what the text suggests may join drafts")


def read_drafting(flags: Flags, given: Namespace) -> DraftOptions:
    """Exits with status 2 and one line for numbers that cannot be."""
    sizes = given.draft_tokens, given.draft_breadth, given.draft_nodes
    try:
        options = DraftOptions(
            given.draft_mode, *sizes, given.draft_threshold, given.tuner, given.blend == "yes"
        )
        if given.drafter == "eagle":
            options.shape()
    except InvalidRequest as error:
        flags.error(str(error))
    return options
