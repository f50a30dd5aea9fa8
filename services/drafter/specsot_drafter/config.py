"""The options of a drafter's process; read before torch is imported."""

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
    """The options of a drafter's process.

    draft: The draft model, and the base model that it drafts for.
    member: How the drafter joins a fleet: its name, its address and that of the master.
    service: The options that all services have, such as the address to listen on and how to log.
    """

    draft: Annotated[DraftModelOptions, OF_DRAFTER]
    member: MemberOptions = field(default_factory=MemberOptions)
    service: ServiceOptions = field(default_factory=ServiceOptions)

    def check(self) -> None:
        """Raise InvalidRequest for options that contradict each other, and ModelError if torch is missing.
        Otherwise do nothing.

        Contradictions are a drafter that needs a model without `--draft-model`, and a tree shape that is
        impossible for `--drafter eagle` and `--drafter mtp`.
        """
        draft = self.draft
        if draft.draft_model is None and draft.drafter not in (*MODELLESS, "mtp"):
            raise InvalidRequest(f"--drafter {draft.drafter} needs --draft-model")
        if draft.drafter in ("eagle", "mtp"):
            draft.drafting.shape()
        check_member(self.service)


def read_config(arguments: Sequence[str] | None = None) -> DrafterConfig:
    """Return the options of a drafter. Exits with status 2 and a message of one line if an option is wrong.

    arguments: The arguments without the program's name. None: those of the command line.
    """
    about = "Draft trees of tokens for a SpecSoT ring."
    return read("specsot-drafter", DrafterConfig, about, arguments, check=DrafterConfig.check)
