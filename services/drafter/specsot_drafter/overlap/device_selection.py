"""Lets a GPU select nodes of the trees that it has grown, so that a step is launched with them at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specsot.core.overlap import OverlapEvent, OverlappedWork, OverlapState
from specsot_drafter.core.selection import ChosenNodes, Floats
from specsot_kernels.device_waits import record_on, wait_for
from specsot_kernels.growing import WORD, CandidatePool, ChoiceNumbers, TreeRows
from specsot_model.kv import Numbers, Staging, size_of, views

# Nodes. Bounds a tree whose nodes the device selects, root included: the kernel writes two words of mask
# bits.
MAX_CHOSEN_NODES = 2 * WORD


@dataclass(frozen=True, slots=True)
class GrownPool:
    """The candidates that a graph has grown, on the device.

    pool: Tokens, scores and parents of all candidates, [trees, n] each.
    depths: Depth of each candidate, int32 [n], on the device. The same for all trees.
    levels: Number of levels of every tree.
    chooser: Selects nodes from these candidates.
    """

    pool: CandidatePool
    depths: Tensor
    levels: int
    chooser: TreeChooser


@dataclass(slots=True)
class DeviceChoice(OverlappedWork):
    """A selection of nodes that the device makes when a step reads it; see `DeviceTrees`.

    sequences: Sequence id of each tree, in the order of the trees in the next frame.
    nodes: Number of nodes of every tree, root included.
    places: Index of each tree in the pool.
    grown: The candidates from which the nodes are selected.
    trust: What is added to a candidate's score at each depth, [levels], see `ChoiceNumbers`.
    _failure: Error that `choose` met, until `take` raises it. None: there was none.

    States: PREPARED while no step has asked for the nodes, LAUNCHED once the kernel that selects is launched,
    CONFIRMED once the host has read the nodes, so that the drafts consist of them.
    """

    sequences: tuple[int, ...]
    nodes: int
    places: tuple[int, ...]
    grown: GrownPool
    trust: Floats
    _failure: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Record that the number of nodes is fixed."""
        self.apply(OverlapEvent.WRITTEN)

    def choose(self, tokens: Tensor, positions: Tensor, bits: Tensor, vocabulary: int) -> None:
        """Launch the selection, and write the trees into the tensors from which the next step reads its
        batch; see `DeviceTrees.choose`. An error is kept, and raised by `take`.

        tokens: Gets the token id of every node.
        positions: Gets the position of every node.
        bits: Gets the ancestors of every node as a bit set.
        vocabulary: Number of token ids of the base model.

        The state is LAUNCHED afterwards, even after an error.
        """
        self.apply(OverlapEvent.LAUNCHED)
        try:
            self.grown.chooser.choose(self, TreeRows(tokens, positions, bits), vocabulary)
        except Exception as error:  # The caller runs the step, which must go on if the drafter fails.
            self._failure = error

    def take(self) -> ChosenNodes | None:
        """Wait for the device and return the selected nodes of all trees, in the order of `sequences`.

        Return None if `choose` was not called, or if the nodes were taken before. Raises the error that
        `choose` met.

        After an error, no state changes.
        """
        if self._failure:
            raise self._failure
        if self.state is not OverlapState.LAUNCHED:
            return None
        self.apply(OverlapEvent.MATCHED)
        return self.grown.chooser.read()


class TreeChooser:
    """Buffers for the inputs and outputs of the kernel of `prepare_choose_rows`. They hold one selection at a
    time.
    """

    def __init__(self, trees: int, candidates: int, levels: int, device: torch.device) -> None:
        """Allocate the buffers.

        trees: Maximum number of trees of a selection.
        candidates: Maximum number of candidates per tree.
        levels: Maximum number of levels.
        device: Where the candidates are.
        """
        on_gpu = device.type == "cuda"
        self._max_trees = trees
        self._levels = levels
        shapes = (trees,), (levels,)
        self._numbers = torch.zeros(size_of(shapes), dtype=torch.int32, device=device)
        self._places, factors = views(self._numbers, shapes)
        self._trust = factors.view(torch.float32)
        self._staging = Staging(len(self._numbers), device)
        self._ranks = self._numbers.new_zeros(trees * candidates)
        # `_outputs` receives the outputs `chosen` and `masses` of the kernel, see `ChoiceNumbers`. `_host`
        # receives a copy of them on the host.
        self._outputs = self._numbers.new_zeros(size_of(_output_shapes(trees, MAX_CHOSEN_NODES - 1, levels)))
        self._host = torch.empty(self._outputs.shape, dtype=torch.int32, pin_memory=on_gpu)
        # The places and factors that were sent last. Those of the next selection are mostly the same, and are
        # not sent again then.
        self._sent: tuple[tuple[int, ...], list[float]] = ((), [])
        self._copied = torch.Event(device, enable_timing=False) if on_gpu else None
        # What the last selection was prepared for: the sizes, and the identities of the candidates and of the
        # tensors that are written. Empty before the first call of `choose`.
        self._prepared_for: tuple[int, ...] = ()
        # The last selection, which is made again if the next one has the same sizes and objects, as mostly.
        self._prepared: _PreparedChoice

    def warm_up(self, grown: GrownPool) -> None:
        """Compile the kernel, so that no request waits for that.

        grown: Candidates of the sizes that will be selected from.

        Makes one selection of a tree of two nodes, whose result is not read.
        """
        token_ids = self._numbers.new_zeros(2)
        rows = TreeRows(token_ids, torch.zeros_like(token_ids), token_ids.new_zeros((2, 1)))
        self.choose(DeviceChoice((0,), 2, (0,), grown, np.zeros(1)), rows, 1)

    def choose(self, choice: DeviceChoice, rows: TreeRows, vocabulary: int) -> None:
        """Launch the selection, and the copy of its result to the host. See `prepare_choose_rows`.

        choice: The trees, their number of nodes, and the candidates.
        rows: Tensors of the next step that get tokens, positions and ancestors of the nodes.
        vocabulary: Number of token ids of the base model.

        Summands of `choice.trust` for depths beyond the chooser's levels are ignored. The launch of the
        kernel is prepared anew if the sizes, the candidates or the tensors are others than those of the last
        selection.
        """
        trees = len(choice.places)
        numbers = choice.places, choice.trust.tolist()
        if numbers != self._sent:
            self._sent = numbers
            places = np.zeros(self._max_trees, np.int32)
            trust = np.zeros(self._levels, np.float32)
            places[:trees], trust[: len(choice.trust)] = choice.places, choice.trust[: self._levels]
            self._staging.send([places, trust.view(np.int32)], self._numbers)
        # Identities can stand for objects here: the prepared selection keeps its objects alive (`owners`), so
        # that no new object gets the identity of one of them.
        wanted = trees, choice.nodes, vocabulary, id(choice.grown), *map(id, rows)
        if wanted != self._prepared_for:
            self._prepared = self._prepare(trees, choice.nodes - 1, choice.grown, rows, vocabulary)
            self._prepared_for = wanted
        prepared = self._prepared
        prepared.choose_rows()
        prepared.host.copy_(prepared.outputs, non_blocking=True)
        if self._copied:
            record_on(self._copied, self._outputs.device)

    def _prepare(
        self, trees: int, nodes: int, grown: GrownPool, rows: TreeRows, vocabulary: int
    ) -> _PreparedChoice:
        """Return what `choose` needs to launch the kernel with these sizes and tensors, for any number of
        steps.

        trees: Number of trees of the selection.
        nodes: Number of nodes of each tree, without its root.
        grown: The candidates.
        rows: Tensors that get tokens, positions and ancestors of the nodes.
        vocabulary: Number of token ids of the base model.
        """
        from specsot_kernels.gpu.choosing import prepare_choose_rows

        shapes = _output_shapes(trees, nodes, grown.levels)
        outputs, host = (whole[: size_of(shapes)] for whole in (self._outputs, self._host))
        (chosen, masses), (host_chosen, host_masses) = views(outputs, shapes), views(host, shapes)
        ranks = self._ranks[: trees * len(grown.depths)]
        numbers = ChoiceNumbers(
            self._places, grown.depths, self._trust, ranks, chosen, masses.view(torch.float32)
        )
        return _PreparedChoice(
            prepare_choose_rows(grown.pool, numbers, rows, nodes + 1, vocabulary),
            outputs,
            host,
            host_chosen.numpy(),
            host_masses.view(torch.float32).numpy(),
            (grown, rows),
        )

    def read(self) -> ChosenNodes:
        """Wait for the last selection, and return its nodes as lists, which later selections do not change.
        `choose` must have been called.
        """
        if self._copied:
            wait_for(self._copied)
        return ChosenNodes(self._prepared.chosen.tolist(), self._prepared.masses.tolist())


class _PreparedChoice(NamedTuple):
    """What `TreeChooser` needs to make the same selection for many steps. All arrays are views of the
    chooser's buffers, which every selection overwrites.

    choose_rows: Launches the kernel, see `prepare_choose_rows`.
    outputs: The kernel's outputs on the device, one after the other, see `_output_shapes`. int32.
    host: The memory on the host to which `outputs` is copied.
    chosen: The output `chosen` in `host`, int32 [trees, 2, nodes].
    masses: The output `masses` in `host`, fp32 [trees, levels].
    owners: The candidates, and the tensors that are written, which must live as long as the selection.
    """

    choose_rows: Callable[[], None]
    outputs: Tensor
    host: Tensor
    chosen: Numbers
    masses: Floats
    owners: tuple[GrownPool, TreeRows]


def _output_shapes(trees: int, nodes: int, levels: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the kernel's outputs `chosen` and `masses`, which lie in one buffer in this order;
    see `ChoiceNumbers`.

    trees: Number of trees of the selection.
    nodes: Number of nodes of each tree, without its root.
    levels: Number of levels of the candidates.
    """
    return (trees, 2, nodes), (trees, levels)
