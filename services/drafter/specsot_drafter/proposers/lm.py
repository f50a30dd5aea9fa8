"""Proposes with a small language model: a chain, a tree of fixed breadth, or a pruned tree.

The model's KV cache is kept from one draft round to the next and rewound by index: of the tokens that the
model was fed, as many rows stay as agree with the sequence. On a GPU, catching up and growing run as captured
graphs. If more tokens are due than such a graph has room for, as those of a prompt, they are fed before it,
in graphs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.core.frames import TreeSegment
from specsot.drafting import DraftOptions
from specsot.errors import HeadMismatch, Overloaded
from specsot.members import TreeShape
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import DraftPages, DueRows, compute_rows, step_rows
from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads.decoder import DecoderHead
from specsot_drafter.overlap.graph_growth import TreeGraphs
from specsot_drafter.proposers.trees import TreeProposer
from specsot_model.core.kv_plan import window_of
from specsot_model.cuda_graphs import Capture, CapturedSteps

# Tokens, children per node, and nodes. The defaults of a tree's depth, breadth and size. Untuned.
DEFAULT_DEPTH = 5
DEFAULT_BREADTH = 2
DEFAULT_NODES = 32


@dataclass(frozen=True, slots=True)
class BeamShape:
    """The shape of a small model's trees.

    breadth: Number of children of every node that is fed. 1: a chain.
    widths: Maximum number of nodes of level 1, 2, ... that are fed. Empty: only the root is fed.
    floor: Cumulative log-probability below which a node is not fed. -inf: every node may be fed.
    nodes: Maximum number of nodes of a tree, its root included.
    """

    breadth: int
    widths: tuple[int, ...]
    floor: float
    nodes: int

    @property
    def tree_shape(self) -> TreeShape:
        """The shape in the form that the ring needs."""
        return TreeShape(len(self.widths), self.breadth, self.nodes)


def read_small(directory: Path) -> ModelConfig:
    """Return the config of a model that drafts.

    directory: Where the model is.

    Raises ModelError for an unreadable config, and HeadMismatch for a model with gated delta layers.
    """
    config = read_config(directory)
    if config.delta:
        raise HeadMismatch(
            f"{directory}: gated delta layers cannot draft: they keep no states after draft tokens"
        )
    return config


def beam_shape(options: DraftOptions) -> BeamShape:
    """Return the shape of trees: a chain, or a tree in which each fed node has children.

    options: The options of drafting: depth, breadth, nodes, mode and threshold. None stands for a default.

    5 tokens, linear: breadth 1, widths (1, 1, 1, 1). 4 tokens, breadth 2, 32 nodes: widths (2, 4, 8). With 10
    nodes instead, level 3 may feed 10 - 2 - 4 nodes: widths (2, 4, 4).

    The mode None counts as linear. The floor is -inf unless the mode is pruned; there, a missing or zero
    threshold counts as 1e-30. Levels that may feed no node are left out, so that the tree has fewer levels.
    """
    tokens = options.depth or DEFAULT_DEPTH
    if options.mode in (None, "linear"):
        return BeamShape(1, (1,) * (tokens - 1), -math.inf, tokens + 1)
    breadth = options.breadth or DEFAULT_BREADTH
    nodes = options.nodes or DEFAULT_NODES
    whole = [breadth**level for level in range(1, tokens)]
    fed = [min(size, max(nodes - before, 0)) for size, before in zip(whole, accumulate([0, *whole]))]
    floor = math.log(options.threshold or 1e-30) if options.mode == "pruned" else -math.inf
    return BeamShape(breadth, tuple(width for width in fed if width), floor, nodes + 1)


# Rows. The rows of one forward pass over uncached tokens, as many as a frame has by default (`--rows`).
# Untuned.
PREFILL_ROWS = 512
# Rows. Sizes of the graphs that feed due tokens without growing a tree, such as the tokens of prompts. These
# graphs compute no logits. Untuned.
PROMPT_SIZES = (64, 128, 256, PREFILL_ROWS)
# Rows. A sequence with more due rows is fed alone. Untuned.
LONG_PROMPT_ROWS = 32
# Trees. The numbers of trees that graphs are captured for. There are fewer than for EAGLE heads, because each
# graph has all layers of the model. Untuned.
MODEL_TREES = (1, 2, 4, 8, 16)
# Candidates. Maximum number of candidates of a level of a tree that grows in a graph, because one GPU program
# chooses among them. Untuned.
MAX_GRAPH_CANDIDATES = 256


def can_capture_beam(beam: BeamShape) -> bool:
    """Return whether trees of a shape can grow in graphs, if the model's layers can be captured. Return False
    if a level has more than MAX_GRAPH_CANDIDATES candidates.

    beam: The shape.
    """
    return beam.breadth * max((1, *beam.widths)) <= MAX_GRAPH_CANDIDATES


@dataclass(slots=True)
class FedTokens:
    """A sequence, and the tokens that the model was fed for it.

    sequence: What the drafter knows of the sequence.
    tokens: The tokens whose KV rows lie in the sequence's first slots, in order. The last of them may be
        drafted tokens of a chain, which the sequence need not contain.
    confirmed: Number of leading `tokens` that were compared with the sequence and are equal to its tokens.
    included: Number of leading tokens of the sequence that were passed to `DecoderHead.include`, so that
        their ids can be drafted.
    """

    sequence: DraftSequence
    tokens: list[int] = field(default_factory=list)
    confirmed: int = 0
    included: int = 0

    @property
    def extended(self) -> int:
        """The number of tokens that the model was fed."""
        return len(self.tokens)

    @property
    def due(self) -> int:
        """The number of tokens of the sequence that are still to be fed, the root included. Before `rewind`
        the number may be too small, because rejected tokens of a chain are still among the fed ones.
        """
        return max(len(self.sequence.tokens) - len(self.tokens), 0)

    def take(self, asked: bool, rows: int | None = None) -> DueRows:
        """Return the next tokens to feed as rows, and count them as fed; see `FollowedRows.take`. `rewind`
        must be called first, so that no rejected token counts as fed.

        asked: True if the output of the last token is needed. If no token is due, the last fed token is fed
            again.
        rows: Number of tokens to feed. None: all that are due.

        Row j is fed token j: with the sequence [a b c d] and the fed tokens [a b], the rows 2 and 3 are fed c
        and d.
        """
        if asked and not self.due:
            self.tokens.pop()
        first = len(self.tokens)
        self.tokens += self.sequence.tokens[first : None if rows is None else first + rows]
        return DueRows(self.sequence.id, first, tuple(self.tokens[first:]), asked)

    def rewind(self, length: int | None = None) -> None:
        """Drop the fed tokens from the first one on that differs from the sequence's token, and all after
        `length` tokens.

        length: Maximum number of tokens that remain, at most the sequence's number of tokens. None: all but
            the sequence's last token, which is the root, so that the root is due afterwards.

        fed [a b x y], sequence [a b c] -> fed [a b]; c is the root, and due
        fed [a b c x], sequence [a b c] -> fed [a b]; c is fed again, since its output is needed
        fed [a b c x], sequence [a b c], length 3 -> fed [a b c]

        Tokens that were confirmed before are not compared again. `confirmed` becomes the number of tokens
        that remain.
        """
        end = min(len(self.tokens), len(self.sequence.tokens) - 1 if length is None else length)
        while self.confirmed < end and self.tokens[self.confirmed] == self.sequence.tokens[self.confirmed]:
            self.confirmed += 1
        self.confirmed = min(self.confirmed, end)
        del self.tokens[self.confirmed :]


class LanguageModelProposer(TreeProposer):
    """Proposer that grows trees with a small language model, in captured graphs if it is `capturable`.

    Nothing is computed for a sequence before its first tree is requested.
    """

    first_due = 1
    _followed: dict[int, FedTokens]

    def __init__(
        self, head: DecoderHead, beam: BeamShape, pages: int, page_rows: int, capture: Capture | None = None
    ) -> None:
        """Allocate the KV pages, and capture the graphs.

        head: The small model.
        beam: The shape of the trees.
        pages: Number of KV pages.
        page_rows: Number of KV slots of a page.
        capture: Captures graphs, for a `capturable` head. None: no graphs.
        """
        pages_of_model = DraftPages(head, pages, page_rows)
        super().__init__(head, pages_of_model, beam.breadth, beam.widths, beam.floor, beam.nodes - 1)
        self._table = pages_of_model.table
        self._include = head.include
        self._graphs = _graphs(head, self._pages, beam, capture) if capture else None
        self.at_once = self._graphs is not None
        # Graphs that feed due tokens, see PROMPT_SIZES. None if the model cannot be captured.
        self._prompts = (
            CapturedSteps(head.decoder, self._pages.kv, {}, capture, PROMPT_SIZES, short_sizes=())
            if capture
            else None
        )

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        """Return the number of tokens that must be fed before trees can grow, at least one for each sequence.
        The number may be too small if the sequence has rejected tokens of a chain, see `FedTokens.due`.

        sequences: The sequences whose trees are to grow. Unknown ones count 0.
        """
        fed = [self._followed[sequence.id] for sequence in sequences if sequence.id in self._followed]
        return sum(max(one.due, 1) for one in fed)

    def open(self, sequence: DraftSequence) -> None:
        """Follow a sequence. Nothing is computed or shared yet, as perhaps no tree will ever be requested.

        sequence: What the drafter knows of the sequence.
        """
        self._followed[sequence.id] = FedTokens(sequence)

    def close(self, sequence: int) -> None:
        """Free the pages of a sequence, and forget it. An unknown sequence is ignored.

        sequence: Id of the sequence.
        """
        self._followed.pop(sequence, None)
        self._pages.close(sequence)

    def _take_due(self, followed: Sequence[FedTokens]) -> list[DueRows]:
        """Return the due tokens of each sequence as rows, the root last, and count them as fed. If the root
        was fed already, it is the only row of its sequence.

        followed: The sequences, with the tokens that were fed for them.

        A sequence with more than LONG_PROMPT_ROWS due tokens is fed all but its root beforehand, alone.
        Raises Overloaded if no page is free for that.
        """
        for fed in followed:
            if fed.due > LONG_PROMPT_ROWS:
                self._feed_up_to(fed, len(fed.sequence.tokens) - 1)
        return [fed.take(asked=True) for fed in followed]

    def _compute_too_long(self, followed: Sequence[FedTokens]) -> None:
        """Feed the due tokens of sequences that have more of them than a graph has room for; see
        `TreeProposer`.

        followed: These sequences, with the tokens that were fed for them. Empty: nothing happens.
        """
        if followed:
            self._feed(self._take_due(followed))

    def _catch_up_to(self, trees: Sequence[TreeSegment]) -> bool:
        """Return whether all tokens up to the roots of these trees are fed; see `TreeProposer`. At most
        PREFILL_ROWS tokens that are not fed yet are fed here, in one forward pass, including those of short
        prompts.

        trees: The trees that are being verified.

        Return False if more tokens are not fed yet, if no page is free for them, if a sequence has a window,
        or if a sequence is unknown or does not end with its tree's root. Then the next trees do not grow
        asynchronously, and the tokens are fed before those trees grow. Rows of drafted tokens after the roots
        may be dropped in this case, too.
        """
        followed = list[FedTokens]()
        for tree in trees:
            fed = self._followed.get(tree.sequence)
            if not (fed and fed.sequence.committed == tree.committed == len(fed.sequence.tokens) - 1):
                return False
            # Pages that a window hides must be freed between forward passes, see `_feed_up_to`.
            if window_of(fed.sequence.opening):
                return False
            fed.rewind(tree.committed + 1)
            followed.append(fed)
        if sum([fed.due for fed in followed]) > PREFILL_ROWS or not all(map(self._open_pages, followed)):
            return False
        incomplete = [fed for fed in followed if fed.due]
        reserve = self._pages.reserve_tree
        if not all(reserve(fed.sequence.id, len(fed.sequence.tokens), 0) for fed in incomplete):
            return False
        if incomplete:
            self._feed([fed.take(asked=False) for fed in incomplete])
        return True

    def _record_grown(self, followed: Sequence[FedTokens], candidates: Candidates) -> Candidates:
        """If the trees are chains, count their drafted tokens as fed, except the last token of each chain,
        which was not fed. Return the candidates unchanged.

        followed: The sequences, with the tokens that were fed for them.
        candidates: The candidates of the grown trees, one tree per sequence.

        The KV rows of a chain lie in the slots that its tokens will have if they are accepted, so that these
        rows need not be computed again. The KV rows of a tree with branches do not, and nothing is counted.

            # fed [a b], chain [x y z] -> fed [a b x y]
        """
        if self._top_k == 1:
            for fed, tokens in zip(followed, candidates.tokens.tolist()):
                fed.tokens += tokens[:-1]
        return candidates

    def _reserve(self, sequence: DraftSequence) -> TreeRoom | None:
        """Reserve the rows of a tree after a sequence's tokens, and return where they are. Return None if the
        sequence is unknown, or if no page is free.

        sequence: The sequence. If it is drafted for the first time, it gets its pages here.

        Rows of rejected tokens and of the root are dropped (`FedTokens.rewind`), and pages that a window
        hides are freed.
        """
        fed = self._followed.get(sequence.id)
        if fed is None or not self._open_pages(fed):
            return None
        self._include(fed.sequence.tokens[fed.included :])
        fed.included = len(fed.sequence.tokens)
        fed.rewind()
        self._pages.trim(fed.sequence.id, fed.confirmed)
        return self._pages.reserve_tree(sequence.id, len(sequence.tokens), self._grown)

    def _open_pages(self, fed: FedTokens) -> bool:
        """Open the pages of a sequence unless they are open, and return True. Return False if no page is free
        for a fork.

        fed: The sequence.

        A fork shares the rows of the tokens that it has in common with its source, and these tokens count as
        fed afterwards. The source is fed up to the fork first. A fork of an unknown sequence shares nothing.
        """
        fork = fed.sequence.opening.fork
        sequence = fed.sequence.id
        if sequence in self._table:
            return True
        source = self._followed.get(fork.sequence) if fork else None
        if fork is None or source is None:
            self._table.open(sequence, window_of(fed.sequence.opening))
            return True
        try:
            if source.sequence.id not in self._table:
                self._table.open(source.sequence.id, window_of(source.sequence.opening))
            source.rewind(len(source.sequence.tokens))
            self._feed_up_to(source, fork.length)
            self._pages.share(sequence, source.sequence.id, fork.length)
        except Overloaded:
            return False
        fed.tokens = source.tokens[: fork.length]
        return True

    def _feed_up_to(self, fed: FedTokens, stop: int) -> None:
        """Feed a sequence's tokens, PREFILL_ROWS at a time. Nothing happens if they were fed already. Raises
        Overloaded if no page is free.

        fed: The sequence, with the tokens that were fed for it.
        stop: Number of tokens of the sequence that are fed afterwards, including those that were fed already.

        The tokens are appended to the fed ones. Pages that a window hides are freed before each forward pass.
        """
        for start in range(len(fed.tokens), stop, PREFILL_ROWS):
            rows = min(PREFILL_ROWS, stop - start)
            self._pages.trim(fed.sequence.id, fed.confirmed)
            self._table.reserve(fed.sequence.id, start + rows)
            self._feed([fed.take(asked=False, rows=rows)])

    def _feed(self, due: Sequence[DueRows]) -> None:
        """Compute the KV of due rows: in a captured graph if one fits, else kernel by kernel. Outputs are not
        returned, even if they are asked for.

        due: The rows to compute, at least one. They must have slots already.
        """
        if not (self._prompts and self._prompts.run(step_rows(self._pages, due))):
            compute_rows(self._head, self._pages, due)


def _graphs(head: DecoderHead, pages: DraftPages, beam: BeamShape, capture: Capture) -> TreeGraphs | None:
    """Return the captured graphs for trees of a shape. Return None if its levels are too large.

    head: The small model.
    pages: Its KV pages.
    beam: The shape of the trees.
    capture: Captures a function as a graph.

    Graphs are captured for MODEL_TREES numbers of trees.
    """
    if not can_capture_beam(beam):
        return None
    from specsot_kernels.gpu.growing import grow

    shape = beam.breadth, len(beam.widths) + 1
    return TreeGraphs(head, pages, *shape, capture, grow, MODEL_TREES, beam.widths, beam.floor)
