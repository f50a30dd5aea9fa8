"""The base class of the proposers with an EAGLE head and with a small language model.

Trees grow in captured graphs, and level by level where there are no graphs. In graphs they may also grow
asynchronously: the growth is launched before the host has read the verification result that it follows
(`specsot_drafter.overlap` has the timing).

Rows that are *due* are rows of committed tokens whose draft KV could be computed and is not computed yet.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from specsot.core.device_verification import DeviceVerification
from specsot.core.frames import TreeSegment
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.selection import Candidates, Floats, KeepGrowing, pad_rows
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import DraftPages, DueRows, compute_rows
from specsot_drafter.grammar import filter_candidates, make_guide
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead
from specsot_drafter.overlap.device_growth import DeviceGrowth
from specsot_drafter.overlap.graph_growth import GraphInput, TreeGraphs
from specsot_drafter.proposers import ChosenTrees, Offer, Proposer
from specsot_model.inference import inference_mode


class TreeProposer(Proposer):
    """Proposer that grows trees with a draft head, in captured graphs where the head and the machine allow
    it.

    A subclass decides which rows are due, and stores a `FollowedRows` for each sequence in `_followed`.

    first_due: Number of the draft row that is fed the target token of a tree's root, minus the root's
        position. 0 for an EAGLE head, whose row j is fed token j + 1; 1 for a language model, whose row j is
        fed token j. With a root at position 10, the target token has position 11, so that it is fed to row 10
        of an EAGLE head, and to row 11 of a language model.
    """

    first_due: ClassVar[int]

    def __init__(
        self,
        head: DraftHead,
        pages: DraftPages,
        top_k: int,
        widths: tuple[int, ...],
        floor: float,
        max_nodes: int,
    ) -> None:
        """Start without graphs and without sequences. A subclass sets `_graphs` if it has captured graphs.

        head: The draft head.
        pages: Its KV pages and features.
        top_k: Number of children of every node that is fed.
        widths: Maximum number of nodes of level 1, 2, ... that are fed.
        floor: Cumulative log-probability below which a node is not fed. -inf: every node may be fed.
        max_nodes: Maximum number of nodes of a tree, without its root.
        """
        self.widths = widths
        self.positions = head.positions
        # Number of KV rows that growing the largest tree takes.
        self._grown = sum(widths)
        self._head = head
        self._pages = pages
        self._top_k = top_k
        self._floor = floor
        self._max_nodes = max_nodes
        self._followed = {}
        self._graphs: TreeGraphs | None = None
        # The growth that was launched before the host has read the verification result it follows.
        self._async_growth: DeviceGrowth | None = None

    @property
    def free_pages(self) -> int:
        """Number of free KV pages of the head."""
        return self._pages.table.free

    @abstractmethod
    def _reserve(self, sequence: DraftSequence) -> TreeRoom | None:
        """Reserve the rows of a tree after a sequence's own rows, and return where they are. Return None if
        no tree can grow for the sequence, or if no page is free.

        sequence: The sequence that a tree is to grow for.
        """

    @abstractmethod
    def _take_due(self, followed: Sequence[Any]) -> list[DueRows]:
        """Return the due rows of some sequences, and count them as computed. The result has the last row of a
        sequence without due rows, which is computed again. Only the output of each sequence's last row is
        asked for. Due rows of other sequences may follow, without outputs.

        followed: The followed sequences whose trees grow.
        """

    @abstractmethod
    def _compute_too_long(self, followed: Sequence[Any]) -> None:
        """Compute all due rows for which a graph has no room, and count them as computed. A subclass may also
        compute due rows of sequences that have no tree in this step.

        followed: The followed sequences whose trees grow, and which have more due rows than a graph has room
            for. May be empty.
        """

    @abstractmethod
    def _catch_up_to(self, trees: Sequence[TreeSegment]) -> bool:
        """Return whether the draft rows of all sequences are complete up to the roots of their trees, so that
        the next row is the one that is fed the root's target token. Outstanding rows are computed for that
        where possible. If the result is True, rows after the roots are no longer counted as computed, because
        asynchronous growth overwrites them.

        trees: The trees that are being verified.
        """

    def _record_grown(self, followed: Sequence[Any], candidates: Candidates) -> Candidates:
        """Record which rows hold KV of drafted tokens after trees have grown, and return the candidates
        unchanged. The base class records nothing.

        followed: The followed sequence of each tree.
        candidates: The candidates of the grown trees.
        """
        return candidates

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Return candidates for one tree per sequence, or None if there are none; see `Proposer.propose`.

        sequences: The sequences to draft for.
        levels: Number of levels to grow.
        keep_growing: Asked before each further level. None: all levels grow.
        """
        return self.begin(sequences, levels, keep_growing)()

    def begin(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Offer:
        """Launch the growth of one tree per sequence, and return a function that waits for the candidates.

        sequences: The sequences to draft for.
        levels: Number of levels to grow; a graph may grow more.
        keep_growing: Asked before each further level if no graph is used. None: all levels grow.

        The trees come from the first of three ways that is possible: asynchronous growth is continued, a
        graph is launched, or the trees grow level by level when the returned function is called. Due rows are
        computed before the trees grow. Asynchronous growth that cannot be continued is discarded.

        Sequences without free KV pages get barred candidates; if no sequence has pages, the function returns
        None.
        """
        async_growth = self._async_growth
        self._async_growth = None
        if async_growth and (offer := self._continue(async_growth, sequences, levels)):
            return offer
        rooms = [self._reserve(sequence) for sequence in sequences]
        growing = [(sequence, room) for sequence, room in zip(sequences, rooms) if room]
        if not growing:
            return lambda: None
        grow = self._begin_graph(growing, levels) or partial(self._grow, growing, levels, keep_growing)
        has_room = [room is not None for room in rooms]
        return grow if all(has_room) else lambda: pad_rows(grow(), has_room)

    def _grow(
        self, growing: Sequence[tuple[DraftSequence, TreeRoom]], levels: int, keep: KeepGrowing | None
    ) -> Candidates:
        """Compute the due rows, then grow the trees level by level, without a graph. Return the candidates.

        growing: The sequences, each with the reserved rows of its tree.
        levels: Number of levels to grow.
        keep: Asked before each further level how many nodes to feed. None: all levels grow.

        If a sequence has a grammar, tokens that the grammar forbids are left out between the levels.
        """
        sequences, rooms = zip(*growing)
        followed = [self._followed[sequence.id] for sequence in sequences]
        outputs = compute_rows(self._head, self._pages, self._take_due(followed))
        guide = make_guide(self._head, sequences)
        kv = self._pages.kv
        growth = TreeGrowth(self._head, kv, rooms, self._top_k, guide, self.widths, self._floor)
        return self._record_grown(followed, growth.run(outputs, levels, keep))

    def _begin_graph(
        self, growing: Sequence[tuple[DraftSequence, TreeRoom]], levels: int
    ) -> Callable[[], Candidates] | None:
        """Launch one graph that computes the due rows and grows the trees. Return a function that waits for
        the candidates, or None if there are no graphs or they have no room.

        growing: The sequences, each with the reserved rows of its tree.
        levels: Number of levels to grow; a deeper graph may be used.

        The graph grows all levels without asking the policy or a grammar in between: one more level costs
        less than asking whether the level is profitable, and a draft that a grammar forbids costs less than
        asking the grammar. Forbidden candidates are barred afterwards.

        If a sequence has more due rows than the graph has room for, they are computed beforehand, and the
        graph computes the last one again. If the graph has no room for other reasons, all due rows are
        computed here. At most as many candidates as a tree may have nodes remain of each tree with a grammar.
        """
        if (graphs := self._graphs) is None:
            return None
        sequences, rooms = zip(*growing)
        followed = [self._followed[sequence.id] for sequence in sequences]
        self._compute_too_long([one for one in followed if one.due > graphs.due])
        due = [one.take(asked=True) for one in followed]
        grown = graphs.begin([GraphInput(*each) for each in zip(due, rooms)], levels)
        if grown is None:
            compute_rows(self._head, self._pages, due)
            return None
        return lambda: self.bar_forbidden(self._record_grown(followed, grown()), sequences)

    def _continue(
        self, growth: DeviceGrowth, sequences: Sequence[DraftSequence], levels: int
    ) -> Offer | None:
        """Return a function that waits for the candidates of asynchronous growth, if the growth has a tree
        for each of these sequences at its present end (`DeviceGrowth.take`). Otherwise discard the growth and
        return None; the caller then launches another growth.

        growth: The growth that was launched before the host had read the verification result.
        sequences: The sequences to draft for.
        levels: Number of levels to grow if the trees must grow again.

        The returned function compares what the device accepted with the host's verification result. If they
        differ for any tree, it discards the growth and grows all trees again. Candidates that a grammar
        forbids are not barred, see `bar_forbidden`.
        """
        followed = [self._followed.get(sequence.id) for sequence in sequences]
        if not (due := growth.take(followed)):
            return None

        def offer() -> Candidates | None:
            """Wait for the candidates and return them, which are never None. If the device accepted other
            tokens than the host, the trees are grown again from the host's result.
            """
            candidates = growth.candidates_for(due)
            if candidates is None and self._graphs:
                rooms = [self._pages.reserve_tree(one.sequence, one.stop, self._grown) for one in due]
                inputs = [GraphInput(one, room) for one, room in zip(due, rooms) if room]
                candidates = self._graphs.run(inputs, levels)
            assert candidates is not None, "the graphs had room for as many trees in the asynchronous growth"
            return self._record_grown(followed, candidates)

        return offer

    def bar_forbidden(self, candidates: Candidates, sequences: Sequence[DraftSequence]) -> Candidates:
        """Return candidates with those barred that the grammars of their sequences forbid; see
        `Proposer.bar_forbidden`.

        candidates: Candidates of the grown trees.
        sequences: The sequence of each tree.
        """
        return filter_candidates(candidates, sequences, self._max_nodes)

    @inference_mode
    def start_growth(self, verification: DeviceVerification, ids: int, levels: int) -> AsyncGrowth | None:
        """Launch the growth of the next trees before the host has read the verification result of the current
        ones; see `Proposer.start_growth`. Return None if nothing was launched.

        verification: The trees that are being verified, and their results on the device.
        ids: Number of token ids that may be fed; token 0 is fed instead of a target outside 0 .. ids - 1.
        levels: Number of levels of the trees that grow.

        Growth is launched only if there are graphs with enough room, if the rows of every sequence are
        complete up to its tree's root, if the pages of every sequence can be reserved, and if no sequence has
        a KV policy. A head that reads features also needs the features of the verification. Outstanding rows
        are computed first. Growth that was launched before is dropped in any case.
        """
        self._async_growth = None
        graphs = self._graphs
        head = self._head
        # The features as the stages send them, [num_tokens, head.width]; `head.features` converts them.
        fused_features = verification.features
        if graphs is None or (head.taps and fused_features is None):
            return None
        if not self._catch_up_to(verification.trees):
            return None
        if trees := self._pages.cover_trees(verification.trees, graphs.async_rows, self.first_due):
            # A head that reads no features has features of 0 columns, of which the device copies nothing.
            features = self._pages.features
            if head.taps and fused_features is not None:
                features = head.features(fused_features.to(head.device, head.dtype))
            targets = verification.targets.to(head.device)
            self._async_growth = graphs.begin_async(trees, targets, features, ids, levels)
        return self._async_growth

    def select(
        self, growth: AsyncGrowth, sequences: Sequence[int], nodes: int, max_levels: int, trust: Floats
    ) -> ChosenTrees | None:
        """Let the device select nodes of the trees that grow asynchronously; see `DeviceGrowth.choose`.
        Return None if it cannot.

        growth: The trees that are growing, from `start_growth`.
        sequences: Ids of the sequences, in the order of the trees in the next frame.
        nodes: Maximum number of nodes per tree, root included.
        max_levels: Maximum number of levels that every sequence can have.
        trust: What is added to a candidate's log-probability at each depth, [levels].
        """
        return (
            growth.choose(sequences, nodes, max_levels, trust) if isinstance(growth, DeviceGrowth) else None
        )
