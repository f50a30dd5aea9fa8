"""The tree functions as Triton kernels: `tensors`' functions, each in one or two launches.

Refuses to know checks of shapes (the caller's), and machines without Triton (the extra `gpu`). What a
kernel computes is `reference`'s, bit for bit, but for the order in which the last draw adds up a vocabulary.
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
