"""Pipelines whose trees always travel in parts, or never, whatever that costs."""

from __future__ import annotations

from collections.abc import Callable

from specsot.members import Configuration
from specsot_worker.core.pipeline import PipelineDepth


class CutTrees(PipelineDepth):
    """Cuts every tree into so many parts, or into single nodes."""

    def __init__(self, cut: int, stages: int = 1, overlap: bool = True) -> None:
        super().__init__(stages, overlap=overlap)
        self._cut = cut

    def tree_parts(self, num_nodes: int) -> int:
        return min(self._cut, num_nodes)


class WholeTrees(PipelineDepth):
    """Cuts no tree."""

    def tree_parts(self, num_nodes: int) -> int:
        return 1


def cut_into(parts: int) -> Callable[[Configuration], PipelineDepth]:
    """What a worker makes its pipeline with."""
    return lambda configuration: CutTrees(parts, len(configuration.stages), configuration.flight > 1)
