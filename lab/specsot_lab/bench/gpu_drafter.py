"""The drafter's service with acceptance replayed by node rank: `python -m specsot_lab.bench.gpu_drafter ...`.

Everything else is `specsot-drafter`, the head's own forward passes included. The base model must predict the
next higher token id after every token, see `NextTokenWeights`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specsot.members import TreeShape

if TYPE_CHECKING:
    from specsot.service.member import MemberProgram


def replay_acceptance() -> None:
    """Make every EAGLE proposer of this process accept as many tokens as published, from now on.

    Proposers that exist already are not changed. The acceptance is that by node rank with which the published
    tree yields TAU tokens per step; it is right only for a base model that predicts the next higher token id.
    """
    from specsot_drafter import loader
    from specsot_drafter.heads.eagle import Eagle3Head
    from specsot_drafter.proposers.eagle import EagleProposer
    from specsot_lab.bench.gpu_replay import Replay, scaled_ranks
    from specsot_lab.bench.gpu_speculation import DEPTH, NODES, TAU, TOP_K

    ranks = scaled_ranks(TAU, TOP_K, DEPTH + 1, NODES)

    def make_replay(head: Eagle3Head, shape: TreeShape, pages: int, page_rows: int) -> Replay:
        """Return a proposer that runs this head and replays the published acceptance.

        head: The head, which runs for its cost.
        shape: The largest tree.
        pages: Number of KV pages.
        page_rows: Rows of a page.
        """
        inner = EagleProposer(head, shape, pages, page_rows)
        return Replay(inner, ranks[: shape.top_k], head.table.shape[0], shape.top_k, shape.nodes - 1)

    loader.EagleProposer = make_replay  # pyrefly: ignore[bad-assignment]


def program(arguments: Sequence[str] | None = None) -> MemberProgram:
    """Return the program of the drafter, for a process of its own or for that of a worker.

    arguments: Its command line; None: that of this process.

    From then on, every EAGLE proposer of this process replays acceptance. Raises what the drafter's own
    command line raises.
    """
    from specsot.service.runtime_env import set_runtime_defaults

    set_runtime_defaults()
    replay_acceptance()
    from specsot_drafter.__main__ import program as drafter

    return drafter(arguments)


def main() -> int:
    """Run the drafter until it ends, and return its exit status.

    Its options are those of `specsot-drafter`.
    """
    drafter_program = program()
    from specsot.service.member import run_members

    return run_members(drafter_program)


if __name__ == "__main__":
    sys.exit(main())
