"""Options of drafting: the shape of draft trees, and which policy decides how large they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specsot.errors import InvalidRequest
from specsot.members import TreeShape
from specsot.params import require_field
from specsot.service.option_table import POSITIVE, option

DraftMode = Literal["linear", "tree", "pruned"]
TunerName = Literal["measured", "seed", "fixed"]

# The values of --draft-mode.
DRAFT_MODES: tuple[DraftMode, ...] = ("linear", "tree", "pruned")
# The values of --tuner.
TUNERS: tuple[TunerName, ...] = ("measured", "seed", "fixed")
# Levels below the root. Bounds --draft-depth, and so the memory of trees. Untuned.
MAX_DEPTH = 64
# Children per node. Bounds --draft-breadth, and so the memory of trees. Untuned.
MAX_BREADTH = 64
# Nodes without the root. Bounds --draft-nodes, and so the memory of trees. Untuned.
MAX_NODES = 1024
# Tokens of past requests that the suffix drafter keeps to draft from by default. Every tree searches all of
# them, which takes 25 us with this many.
PAST_TOKENS = 1 << 16
# Tokens. Bounds --draft-past. Untuned.
MAX_PAST = 1 << 22


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of drafting: how draft trees are shaped, and which policy sizes them. None leaves an option to
    the drafter.

    mode: "linear" for a chain; "tree" for `breadth` children of every expanded node; "pruned" for the same,
        but without children of nodes whose probability from the root is less than `threshold`.
    depth: the largest number of drafted tokens on a path from the root (K of a chain).
    breadth: number of children of an expanded node.
    nodes: the largest number of nodes of a tree, without its root.
    threshold: the smallest probability from the root with which a node of a "pruned" tree is expanded.
    tuner: the policy that decides how large trees are within these bounds. "measured": as large as is
        profitable by measured costs, including no drafts at all. "seed": the depth starts at 5 and follows a
        running mean of acceptance between 2 and 10, for comparisons. "fixed": always the largest tree.
    blend: True if n-grams of the sequence, and of past requests if `past` keeps any, may be added to the
        trees of other drafters.
    past: number of tokens of past requests that are kept to draft from. 0 keeps none.

    Raises InvalidRequest if a value is out of its range.
    """

    mode: DraftMode | None = option(
        None,
        "Shape of drafts: a chain, a tree, or (of a draft model) a pruned tree.",
        flag="draft-mode",
        unset="what suits the drafter",
    )
    depth: int | None = option(
        None,
        "Maximum depth of draft trees: tokens on their longest path, without the root.",
        flag="draft-depth",
        kind=POSITIVE,
    )
    breadth: int | None = option(
        None, "Children of each node of a draft tree.", flag="draft-breadth", kind=POSITIVE
    )
    nodes: int | None = option(
        None, "Maximum number of nodes in a draft tree, without its root.", flag="draft-nodes", kind=POSITIVE
    )
    threshold: float = option(
        0.03, "`pruned`: do not extend nodes that are less likely than this.", flag="draft-threshold"
    )
    tuner: TunerName = option(
        "measured",
        "`measured`: draft as much as is profitable; `fixed`: the largest tree; `seed`: the seed's rule.",
    )
    blend: bool = option(
        True, "Add n-grams of the text to other drafters' trees.", words=("no", "yes"), paired=True
    )
    past: int | None = option(
        None,
        "Tokens of past requests that the suffix drafter, and --blend, may draft from.",
        flag="draft-past",
        min_value=0,
        unset=f"{PAST_TOKENS} with --drafter suffix, otherwise 0",
    )

    def __post_init__(self) -> None:
        """Raise InvalidRequest, whose field is named as in a request, if a value is out of its range.

        `mode` and `tuner` must be among the known names, `depth` in 1..MAX_DEPTH, `breadth` in
        1..MAX_BREADTH, `nodes` in 1..MAX_NODES, `past` in 0..MAX_PAST, and `threshold` at least 0 and below
        1. None is allowed where it is the default.
        """
        modes = ", ".join(DRAFT_MODES)
        require_field(self.mode in (None, *DRAFT_MODES), "draft_mode", f"one of {modes}", self.mode)
        require_field(self.tuner in TUNERS, "tuner", f"one of {', '.join(TUNERS)}", self.tuner)
        _require_count("draft_depth", self.depth, MAX_DEPTH)
        _require_count("draft_breadth", self.breadth, MAX_BREADTH)
        _require_count("draft_nodes", self.nodes, MAX_NODES)
        valid_past = self.past is None or 0 <= self.past <= MAX_PAST
        require_field(valid_past, "draft_past", f"in 0 .. {MAX_PAST}", self.past)
        require_field(0 <= self.threshold < 1, "draft_threshold", "a probability below 1", self.threshold)

    def shape(self) -> TreeShape | None:
        """Return the shape of a draft head's trees, or None if the options do not differ from the default.

        The head's `depth` does not count the first level, and its `nodes` counts the root. Raises
        InvalidRequest for mode "pruned", which a draft head does not have.

        Mode "linear" has a breadth of 1. The number of nodes is at most that of the candidates which depth
        and breadth allow. Options that are None have the values of the default shape.
        """
        if self.mode == "pruned":
            message = (
                "draft_mode pruned is for a draft model; a head keeps only the likeliest nodes in any mode"
            )
            raise InvalidRequest(message, "draft_mode")
        default_shape = TreeShape()
        linear = self.mode == "linear"
        breadth = 1 if linear else self.breadth or default_shape.top_k
        depth = default_shape.depth if self.depth is None else self.depth - 1
        # The root has `breadth` children, and each of the `depth` later expansions offers breadth ** 2
        # candidates.
        num_candidates = breadth + depth * breadth**2
        nodes = min(self.nodes or default_shape.nodes - 1, num_candidates) + 1
        shape = TreeShape(depth, breadth, nodes)
        return None if shape == default_shape else shape


def _require_count(name: str, count: int | None, max_count: int) -> None:
    """Raise InvalidRequest unless a number is in 1 .. `max_count`, or None.

    name: name of the field, for the error message.
    count: the number to check.
    max_count: the largest allowed number.
    """
    require_field(count is None or 1 <= count <= max_count, name, f"in 1 .. {max_count}", count)
