"""The drafter's service with acceptance replayed by node rank: `python -m specsot_lab.bench.gpu_drafter ...`.

All else is `specsot-drafter`, the head's own passes included; the
base must say the next number behind every token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specsot.members import TreeShape

if TYPE_CHECKING:
    from specsot.service.member import MemberProgram


def replay() -> None:
    """Let every EAGLE drafter of this process err as is published from now on."""
    from specsot_drafter import loader
    from specsot_drafter.heads.eagle import Eagle3Head
    from specsot_drafter.proposers.eagle import EagleProposer
    from specsot_lab.bench.gpu_replay import Replay, scaled_ranks
    from specsot_lab.bench.gpu_speculation import DEPTH, NODES, TAU, TOP_K

    ranks = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES)

    def replaying(head: Eagle3Head, shape: TreeShape, pages: int, page_rows: int) -> Replay:
        """Return a drafter of this head that replays published acceptance."""
        inner = EagleProposer(head, shape, pages, page_rows)
        return Replay(inner, ranks[: shape.top_k], head.table.shape[0], shape.top_k, shape.nodes - 1)

    loader.EagleProposer = replaying  # pyrefly: ignore[bad-assignment]


def program(arguments: Sequence[str] | None = None) -> MemberProgram:
    """Return the program of the drafter, for a process of its own or a worker's. arguments: its
    command line.
    """
    from specsot.service.runtime_env import set_runtime_defaults

    set_runtime_defaults()
    replay()
    from specsot_drafter.__main__ import program as drafter

    return drafter(arguments)


def main() -> int:
    """Run the drafter until it ends; return the exit status."""
    own = program()
    from specsot.service.member import run_members

    return run_members(own)


if __name__ == "__main__":
    sys.exit(main())
