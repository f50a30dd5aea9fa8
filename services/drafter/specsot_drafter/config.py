"""What a drafter is started with, read once.

Refuses to know torch: it is not even imported before this is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsot.members import Overrides, WeightFormat
from specsot.process.flags import Flags, above_zero, layer_numbers
from specsot.process.setting import Setting, add_membership, add_setting, read_setting


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """model: the base the head was trained on (its embedding, its vocabulary). kv_memory in bytes."""

    setting: Setting
    model: Path
    draft_model: Path
    master: str
    advertise: str | None
    name: str | None
    dtype: str
    device: str
    kv_memory: int
    draft_format: WeightFormat
    model_format: WeightFormat
    overrides: Overrides


def read_config(arguments: Sequence[str] | None = None) -> DrafterConfig:
    """Exits with status 2 and one line when something is wrong."""
    flags = Flags("specsot-drafter", "Drafts trees of tokens for a SpecSoT ring with an EAGLE head.")
    add_membership(flags)
    flags.flag("draft-model", required=True, help="directory of the EAGLE head")
    flags.flag(
        "draft-format",
        default="safetensors",
        choices=("safetensors", "bin"),
        help="bin reads the head's pytorch_model.bin (weights only) where it has no safetensors file",
    )
    flags.flag("drafter-rope-theta", above_zero, help="rotary base of the head, if its config is wrong")
    flags.flag(
        "aux-layers",
        layer_numbers,
        help="the model's layers whose input the head reads, such as 2,16,29, if its config is wrong",
    )
    add_setting(flags, "127.0.0.1:0")
    given = flags.parse_args(arguments)
    return DrafterConfig(
        setting=read_setting(given),
        model=Path(given.model),
        draft_model=Path(given.draft_model),
        master=given.master,
        advertise=given.advertise,
        name=given.name,
        dtype=given.dtype,
        device=given.device,
        kv_memory=given.kv_memory,
        draft_format=given.draft_format,
        model_format=given.model_format,
        overrides=Overrides(given.drafter_rope_theta, given.aux_layers),
    )
