"""Offers the tree functions of `specsot_kernels`, with `InvalidRequest` for wrong arguments as everywhere in
SpecSoT.

The kernels do not know `specsot.errors`, because they can be imported alone. This module needs NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from specsot_bench.core.kernel_errors import as_invalid_request
from specsot_kernels import DraftResults, TreeArrays, TreeMaskMode, TreeStatistics, Verified, contract, trees

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

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function with the same arguments and result, with a kernel's InvalidArguments turned into
    InvalidRequest.

    Every other exception is passed on unchanged.

    function: A function of `specsot_kernels`.
    """

    @wraps(function)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        """Call the function, and raise InvalidRequest where it raises InvalidArguments.

        arguments: Positional arguments of the function.
        keywords: Keyword arguments of the function.
        """
        with as_invalid_request():
            return function(*arguments, **keywords)

    return call


arrange_trees = _checked(trees.arrange_trees)
build_tree_structure = _checked(trees.build_tree_structure)
compute_tree_statistics = _checked(contract.compute_tree_statistics)
organize_draft_results = _checked(trees.organize_draft_results)
tree_speculative_sampling = _checked(trees.tree_speculative_sampling)
verify_tree_greedy = _checked(trees.verify_tree_greedy)
write_tree_greedy = _checked(trees.write_tree_greedy)
write_tree_sampling = _checked(trees.write_tree_sampling)
write_tree_structure = _checked(trees.write_tree_structure)
