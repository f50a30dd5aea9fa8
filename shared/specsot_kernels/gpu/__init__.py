"""EAGLE's tree functions as Triton kernels: the functions of `trees` in one or two launches each.

The callers check shapes. Machines without Triton (the extra `gpu`) are not supported. Every kernel computes
the same bits as `reference`, except that the last draw adds up a vocabulary in another order.
"""

from specsot_kernels.gpu.building import arrange_trees, build_trees, organize_draft_results, write_trees
from specsot_kernels.gpu.verifying import can_hold, tree_speculative_sampling, verify_tree_greedy

__all__ = [
    "arrange_trees",
    "build_trees",
    "can_hold",
    "organize_draft_results",
    "tree_speculative_sampling",
    "verify_tree_greedy",
    "write_trees",
]
