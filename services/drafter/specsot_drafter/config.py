"""The options of a drafter's process.

Torch is not even imported before these are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from specsot.errors import InvalidRequest
from specsot.params import MODELLESS
from specsot.service.command import read
from specsot.service.options import OF_DRAFTER, DraftModelOptions, MemberOptions, ServiceOptions, check_member


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """draft: what drafts, and the base it drafts for."""

    draft: Annotated[DraftModelOptions, OF_DRAFTER]
    member: MemberOptions = field(default_factory=MemberOptions)
    service: ServiceOptions = field(default_factory=ServiceOptions)

    def check(self) -> None:
        """Raises InvalidRequest for options that do not go together."""
        draft = self.draft
        if draft.draft_model is None and draft.drafter not in MODELLESS:
            raise InvalidRequest(f"--drafter {draft.drafter} needs --draft-model")
        if draft.drafter == "eagle":
            draft.drafting.shape()
        check_member(self.service)


def read_config(arguments: Sequence[str] | None = None) -> DrafterConfig:
    """Exits with status 2 and one line when something is wrong."""
    about = "Draft trees of tokens for a SpecSoT ring."
    return read("specsot-drafter", DrafterConfig, about, arguments, check=DrafterConfig.check)
