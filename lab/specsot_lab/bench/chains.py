"""`specsot bench chains`: simulates several frames of one sequence in flight, compared with the best tree.

The drafts are those that a real head proposed. `draft_record` records them, and `frame_chains` replays them.
Steps and draft levels take the times of one of the HOSTS; every stage runs on a host of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from specsot.core.cost_curve import CostCurve
from specsot.errors import InvalidRequest
from specsot.members import Curve
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.results import Row, named, publish
from specsot_lab.bench.draft_record import read_record
from specsot_lab.bench.frame_chains import ChainPolicy, DraftedText, RingCosts, WrittenInFrames, write


@dataclass(frozen=True, slots=True)
class Host:
    """Computing times of one kind of machine, in seconds.

    step: One forward pass of the whole model, by the frame's rows.
    level: One level of a draft tree, by the rows that the head computes.
    frame: Overhead of a stage's host per frame, in addition to computing.
    proposal: Overhead of the drafter's host per proposal, in addition to its levels.
    """

    step: Curve
    level: Curve
    frame: float
    proposal: float


def _scaled(seconds: float, multiples: Curve) -> Curve:
    """Return a curve that is a multiple of one row's seconds.

    seconds: Seconds of one row.
    multiples: By rows, multiples of these seconds.
    """
    return tuple((rows, multiple * seconds) for rows, multiple in multiples)


# Time of a step with so many rows, as a multiple of that with one row (lab/results/cpu-rows.json). The value
# for 97 rows is extrapolated.
VNNI: Final[Curve] = (
    *((1, 1.0), (2, 1.01), (4, 1.2), (6, 1.14), (8, 1.16), (12, 1.64), (16, 1.87), (24, 2.4)),
    *((64, 5.35), (97, 7.8)),
)
# Seconds. Overhead of a frame in one stage: a quarter of the 1.6 ms that a step with drafts takes in addition
# to computing. Overhead of a proposal, in addition to its levels. Measured with SmolLM2 in int8 on two cores.
FRAME: Final = 0.4e-3
PROPOSAL: Final = 0.8e-3
# The machines whose costs can be simulated.
HOSTS: Final[Mapping[str, Host]] = {
    # SmolLM2 in int8, measured on two cores with VNNI.
    "smollm2-vnni": Host(_scaled(7.3e-3, VNNI), ((1, 0.45e-3), (4, 0.5e-3), (16, 0.9e-3)), FRAME, PROPOSAL),
    # SmolLM2 in int8, measured on two cores with AVX2 (lab/results/cpu-rows-avx2.json).
    "smollm2-avx2": Host(
        (
            *((1, 11.08e-3), (2, 12.23e-3), (4, 17.61e-3), (6, 23.57e-3), (8, 31.59e-3), (12, 45.12e-3)),
            *((16, 52.03e-3), (24, 77.26e-3), (32, 0.1046), (48, 0.1676), (64, 0.2297), (97, 0.3657)),
        ),
        ((1, 1.62e-3), (4, 2.29e-3), (10, 4.11e-3)),
        FRAME,
        PROPOSAL,
    ),
    # Qwen2.5-Coder-1.5B in int8: assumed to read its 1.6 GB at 32 GB/s, with the multiples of SmolLM2.
    "1.5b-vnni": Host(_scaled(50e-3, VNNI), ((1, 1.5e-3), (4, 1.6e-3), (16, 2.5e-3)), FRAME, PROPOSAL),
    # Qwen2.5-Coder-1.5B in int8, measured on two cores with AVX2 (lab/results/cpu-rows-avx2.json).
    "1.5b-avx2": Host(
        (
            *((1, 0.1118), (2, 0.1264), (4, 0.1286), (6, 0.2335), (8, 0.3255), (12, 0.4515), (16, 0.596)),
            *((24, 0.9308), (32, 1.1413), (48, 1.8029), (64, 2.519), (97, 3.8637)),
        ),
        ((1, 1.84e-3), (4, 2.01e-3), (10, 3.64e-3)),
        FRAME,
        PROPOSAL,
    ),
    # Qwen2.5-Coder-1.5B in bf16 on an H200, measured; the overheads of hosts are assumed to be half of the
    # above.
    "1.5b-h200": Host(
        ((1, 1.66e-3), (2, 1.99e-3), (16, 2.1e-3), (32, 2.29e-3), (64, 2.44e-3), (128, 2.57e-3)),
        ((1, 0.04e-3), (4, 0.05e-3), (16, 0.06e-3)),
        FRAME / 2,
        PROPOSAL / 2,
    ),
}
# Nodes and levels of the single trees that are compared. With its root, a tree of 3 or 7 nodes has as many
# rows as a later frame of a chain with 4 or 8 nodes, where step curves have knees.
TREE_NODES: Final = (1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 23, 24, 31, 48, 63, 96)
TREE_LEVELS: Final = (1, 2, 3, 4, 6, 8, 10, 12)
# Frames in flight, and nodes and levels of each, of the chains that are compared.
CHAIN_FRAMES: Final = (2, 4, 8, 16)
CHAIN_NODES: Final = (3, 4, 8, 16, 24)
CHAIN_LEVELS: Final = (4, 8, 12)
# Levels of the chains whose drafting takes no time.
FREE_LEVELS: Final = (4, 8, 12, 14)

Tried = tuple[ChainPolicy, WrittenInFrames]


def best_of(texts: Sequence[DraftedText], costs: RingCosts, policies: Iterable[ChainPolicy]) -> Tried:
    """Return the policy with the most tokens per second, and the totals of writing the answers with it.

    texts: The recorded answers.
    costs: Times of the ring.
    policies: At least one policy.
    """
    return max(
        ((policy, write(texts, costs, policy)) for policy in policies), key=lambda tried: tried[1].rate
    )


def single_trees() -> list[ChainPolicy]:
    """Return the policies of single trees: all sizes, with no more levels than nodes."""
    return [
        ChainPolicy(1, nodes, levels) for nodes in TREE_NODES for levels in TREE_LEVELS if levels <= nodes
    ]


def chain_policies(frames: Sequence[int] = CHAIN_FRAMES) -> list[ChainPolicy]:
    """Return the policies of chains whose root is sent first and whose frames follow at once.

    frames: Numbers of frames in flight.
    """
    return [
        ChainPolicy(count, nodes, levels, root_first=True, spread=False)
        for count in frames
        for nodes in CHAIN_NODES
        for levels in CHAIN_LEVELS
    ]


def best_chain(texts: Sequence[DraftedText], costs: RingCosts) -> Tried:
    """Return the policy of the best chain, and the totals of writing the answers with it.

    First the number and the size of frames are chosen. For the best ones, all variants are tried: the root is
    sent first or with its first nodes, and frames are sent at once or spread over a round trip.

    texts: The recorded answers.
    costs: Times of the ring.
    """
    policy, _ = best_of(texts, costs, chain_policies())
    variants = [
        replace(policy, root_first=root_first, spread=spread)
        for root_first in (True, False)
        for spread in (False, True)
    ]
    return best_of(texts, costs, variants)


def compare(texts: Sequence[DraftedText], costs: RingCosts) -> Row:
    """Return how chains compare with the best single tree at one distance, as the figures of a row.

    texts: The recorded answers.
    costs: Times of the ring; the drafter shares the host of the last stage.

    "plain" are tokens per second without drafts, "tree" the best single tree's as a multiple of them. The
    other ratios are multiples of the best single tree: "free_tree" if drafting took no time, "cut" one tree
    whose rows are sent in several frames, "two" and "chain" with at most two and with any number of frames in
    flight, "apart" if the drafter had a host of its own next to the last stage, and "free_chain" if drafting
    took no time. "tree_rows" and "chain_rows" are rows per token.

    Every figure is of the best policy in hindsight, chosen for its own column.
    """
    plain = write(texts, costs, ChainPolicy(1, 0, 0))
    tree_policy, tree = best_of(texts, costs, single_trees())
    free_trees = [
        replace(policy, free_drafting=True)
        for policy in single_trees()
        if tree_policy.nodes <= policy.nodes <= 3 * tree_policy.nodes
    ]
    free_tree = best_of(texts, costs, free_trees)[1]
    cuts = [replace(policy, root_first=False, one_draft=True) for policy in chain_policies()]
    two = best_of(texts, costs, chain_policies((2,)))[1]
    policy, chain = best_chain(texts, costs)
    apart_policy, apart = best_chain(texts, replace(costs, shared_host=False))
    free = [
        replace(tried, free_drafting=True, levels=levels, spread=spread)
        for tried in {policy, apart_policy}
        for levels in FREE_LEVELS
        for spread in (False, True)
    ]
    return {
        "plain": plain.rate,
        "tree": tree.rate / plain.rate,
        "tree_shape": _shape(tree_policy),
        "tau": tree.tokens / tree.frames,
        "tree_rows": tree.rows / tree.tokens,
        "free_tree": free_tree.rate / tree.rate,
        "cut": best_of(texts, costs, cuts)[1].rate / tree.rate,
        "two": two.rate / tree.rate,
        "chain": chain.rate / tree.rate,
        "chain_shape": f"{policy.frames}; {_shape(policy)}",
        "chain_rows": chain.rows / chain.tokens,
        "apart": apart.rate / tree.rate,
        "apart_shape": f"{apart_policy.frames}; {_shape(apart_policy)}",
        "free_chain": best_of(texts, costs, free)[1].rate / tree.rate,
    }


def _shape(policy: ChainPolicy) -> str:
    """Return the levels and nodes of a policy's frames, for a cell.

    policy: The policy.
    """
    return f"{policy.levels}, {policy.nodes}"


def _shapes(heading: str, key: str) -> Column:
    """Return a column of shapes among columns of figures.

    heading: Heading of the column.
    key: Key of the entry in a row.
    """
    return Column(heading, lambda row: str(row[key]))


# The columns of the table.
COLUMNS: Final[tuple[Column, ...]] = (
    text("host", "host"),
    figure("RTT ms", "rtt_ms", 0),
    figure("plain, tokens/s", "plain", 2),
    figure("best tree, of plain", "tree", 2),
    _shapes("levels, nodes", "tree_shape"),
    figure("tokens a step", "tau", 2),
    figure("rows a token", "tree_rows", 1),
    figure("chain, of best tree", "chain", 2),
    _shapes("frames; levels, nodes", "chain_shape"),
    figure("its rows a token", "chain_rows", 1),
    figure("one tree, cut", "cut", 2),
    figure("two frames", "two", 2),
    figure("drafter apart", "apart", 2),
    _shapes("its frames; levels, nodes", "apart_shape"),
    figure("drafting free: tree", "free_tree", 2),
    figure("chain", "free_chain", 2),
)


def measure(
    record: Path, hosts: Sequence[str], rtts: Sequence[float], stages: int, output: Path | None
) -> int:
    """Simulate every host at every distance, and publish the table. Return the exit status 0.

    record: File of recorded drafts.
    hosts: Names of HOSTS.
    rtts: Round trips between neighbours, in milliseconds; a hop takes half of one.
    stages: Number of stages.
    output: The JSON file; None: the table is only printed.

    Raises InvalidRequest for an unknown host, or for a record that cannot be read.
    """
    if unknown := [name for name in hosts if name not in HOSTS]:
        raise InvalidRequest(f"hosts must be of {', '.join(HOSTS)}, got {unknown[0]!r}", field="hosts")
    try:
        texts = [recorded for recorded in read_record(record) if len(recorded.tokens) > 1]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"record: {record}: {error}", field="record") from None
    rows = list[Row]()
    for name in hosts:
        host = HOSTS[name]
        for rtt in rtts:
            costs = RingCosts(
                *(stages, rtt / 2000, CostCurve(host.step), CostCurve(host.level)), host.frame, host.proposal
            )
            rows += named([{"host": name, "rtt_ms": rtt} | dict(compare(texts, costs))], "host", "rtt_ms")
            print(markdown(COLUMNS, rows[-1:]), file=sys.stderr)
    settings: Row = {
        "record": record.name,
        "texts": len(texts),
        "tokens": sum(len(recorded.tokens) - 1 for recorded in texts),
        "stages": stages,
    }
    publish("chains", settings, rows, markdown(COLUMNS, rows), output)
    return 0
