"""EAGLE's tree arrays for any framework: build draft trees, verify them greedily or by sampling.

Refuses to know models, services and devices. The package can be imported alone: it needs NumPy, and torch
only for callers who bring tensors.
"""

from specsot_kernels.contract import (
    DraftResults,
    TreeArrays,
    TreeMaskMode,
    TreeStatistics,
    Verified,
    compute_tree_statistics,
)
from specsot_kernels.trees import (
    arrange_trees,
    build_tree_structure,
    organize_draft_results,
    tree_speculative_sampling,
    verify_tree_greedy,
)

__all__ = [
    "DraftResults",
    "TreeArrays",
    "TreeMaskMode",
    "TreeStatistics",
    "Verified",
    "arrange_trees",
    "build_tree_structure",
    "compute_tree_statistics",
    "organize_draft_results",
    "tree_speculative_sampling",
    "verify_tree_greedy",
]
