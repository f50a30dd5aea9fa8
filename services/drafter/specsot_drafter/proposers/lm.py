"""Proposes with a small language model: a chain, a tree of fixed breadth, or a pruned tree.

Its KV is kept from round to round and rewound by index: of what it was fed, as many rows stay as still
agree with the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from specsot.core.kv_plan import window_of
from specsot.core.pages import PageTable
from specsot.drafting import DraftOptions
from specsot.errors import Overloaded
from specsot.members import TreeShape
from specsot.model.attention import AttentionPlan, RowSpan
from specsot.model.decoder import Decoder
from specsot_drafter.core.selection import Candidates, KeepGrowing, pad_rows
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.grammar import make_guide
from specsot_drafter.growth import TreeGrowth, TreeRoom, reserve_room
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_drafter.proposers import Proposer

# Tokens, children per node and nodes by default; not measured.
DEFAULT_DEPTH, DEFAULT_BREADTH, DEFAULT_NODES = 5, 2, 32


@dataclass(frozen=True, slots=True)
class BeamShape:
    """breadth: children of every node that is fed. widths: nodes of level 1, 2, ... that are fed at most.
    floor: cumulative log-probability below which no node is fed. nodes: of a whole tree, its root included.
    """

    breadth: int
    widths: tuple[int, ...]
    floor: float
    nodes: int

    @property
    def tree_shape(self) -> TreeShape:
        """The same as the ring must know it."""
        return TreeShape(len(self.widths), self.breadth, self.nodes)


def beam_shape(options: DraftOptions) -> BeamShape:
    """A chain of `tokens`; or a tree as deep, in which every node that is fed has `breadth` children."""
    tokens = options.tokens or DEFAULT_DEPTH
    if options.mode in (None, "linear"):
        return BeamShape(1, (1,) * (tokens - 1), -math.inf, tokens + 1)
    breadth, nodes = options.breadth or DEFAULT_BREADTH, options.nodes or DEFAULT_NODES
    whole = [breadth**level for level in range(1, tokens)]
    fed = [min(size, max(nodes - before, 0)) for size, before in zip(whole, accumulate([0, *whole]))]
    floor = math.log(options.threshold or 1e-30) if options.mode == "pruned" else -math.inf
    return BeamShape(breadth, tuple(width for width in fed if width), floor, nodes + 1)


PREFILL_ROWS = 512  # rows of one pass over uncached text: as a frame has (--rows); not measured
LONG_PROMPT_ROWS = 32  # rows from which a text is fed alone; not measured


class DecoderHead(DraftHead):
    """A whole decoder as what grows trees: it wants no features, its own hidden rows are its outputs."""

    def __init__(self, decoder: Decoder, vocabulary: int, positions: int) -> None:
        """vocabulary, positions: of the base; no more of either are drafted."""
        config = decoder.config
        self.hidden, self.layers = config.hidden, config.layers
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self.group = config.heads // config.kv_heads
        self.draft_vocab = min(vocabulary, config.vocab)
        self.positions = min(positions, config.max_positions)
        self.dtype, self.device = decoder.dtype, decoder.device
        self._decoder = decoder

    def plan(self, spans: Sequence[RowSpan], page_rows: int) -> AttentionPlan:
        return self._decoder.plan(spans, page_rows, "batched")

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """See `DraftHead`; every row needs its place in the plan."""
        assert rows.plan is not None
        embedded = self._decoder.embed(tokens)
        hidden, _ = self._decoder.forward(embedded, rows.positions, rows.slots, rows.plan, rows.kv)
        return hidden if rows.asked is None else hidden[rows.asked]

    def logits(self, outputs: Tensor) -> Tensor:
        return self._decoder.logits(outputs)[:, : self.draft_vocab]


@dataclass(slots=True)
class FedTokens:
    """A text, and the tokens whose KV rows lie in its first slots; the first `confirmed` are the text's."""

    sequence: DraftSequence
    tokens: list[int] = field(default_factory=list)
    confirmed: int = 0

    @property
    def due(self) -> list[int]:
        """Tokens to feed, once rewound."""
        return self.sequence.tokens[len(self.tokens) :]

    def rewind(self) -> None:
        """Forget the rows that are not the text's, and its root's, which is always due."""
        end = min(len(self.tokens), len(self.sequence.tokens) - 1)
        while self.confirmed < end and self.tokens[self.confirmed] == self.sequence.tokens[self.confirmed]:
            self.confirmed += 1
        self.confirmed = min(self.confirmed, end)
        del self.tokens[self.confirmed :]


class LanguageModelProposer(Proposer):
    """See `Proposer`."""

    def __init__(self, head: DraftHead, beam: BeamShape, pages: int, page_rows: int) -> None:
        self.widths, self.positions = beam.widths, head.positions
        self._head, self._beam = head, beam
        self._table = PageTable(pages, page_rows)
        self._kv = head.make_kv(pages, page_rows)
        self._fed: dict[int, FedTokens] = {}

    @property
    def free_pages(self) -> int:
        return self._table.free

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        fed = [self._fed[text.id] for text in sequences if text.id in self._fed]
        return sum(max(len(one.sequence.tokens) - len(one.tokens), 1) for one in fed)

    def open(self, sequence: DraftSequence) -> None:
        """Nothing is computed or shared yet: perhaps nothing will ever be drafted."""
        self._fed[sequence.id] = FedTokens(sequence)

    def follows(self, sequence: int) -> bool:
        return sequence in self._fed

    def close(self, sequence: int) -> None:
        self._fed.pop(sequence, None)
        self._wipe(self._table.close(sequence))

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        rooms = [self._reserve(text) for text in sequences]
        growing = [(text, ground) for text, ground in zip(sequences, rooms) if ground]
        if not growing:
            return None
        last = self._feed([self._fed[text.id] for text, _ in growing])
        guide = make_guide(self._head, [text for text, _ in growing])
        grown = TreeGrowth(
            self._head,
            self._kv,
            [ground for _, ground in growing],
            self._beam.breadth,
            guide,
            self._beam.widths,
            self._beam.floor,
        )
        candidates = grown.run(last, levels, keep_growing)
        if self._beam.breadth == 1:
            self._keep_chains([text for text, _ in growing], candidates)
        return pad_rows(candidates, [ground is not None for ground in rooms])

    def _reserve(self, sequence: DraftSequence) -> TreeRoom | None:
        """Room behind everything that is known; a text that was never drafted for begins here."""
        fed = self._fed.get(sequence.id)
        if fed is None or not (sequence.id in self._table or self._start(fed)):
            return None
        self._trim(fed)
        return reserve_room(self._table, sequence.id, len(sequence.tokens), sum(self.widths))

    def _start(self, fed: FedTokens) -> bool:
        """Share with the source all that the two have in common; the source is fed that far first."""
        fork, sequence = fed.sequence.opening.fork, fed.sequence.id
        source = self._fed.get(fork.sequence) if fork else None
        if fork is None or source is None:
            self._table.open(sequence, window_of(fed.sequence.opening))
            return True
        try:
            if source.sequence.id not in self._table:
                self._table.open(source.sequence.id, window_of(source.sequence.opening))
            source.rewind()
            self._feed_up_to(source, fork.length)
            copy = self._table.fork(sequence, source.sequence.id, fork.length)
        except Overloaded:
            return False
        if copy is not None:
            self._kv.copy_page(copy.source, copy.target, copy.rows)
        fed.tokens = source.tokens[: fork.length]
        return True

    def _trim(self, fed: FedTokens) -> None:
        """Give back what a window hides from all rows to come. Here a row sees all that is left."""
        self._wipe(self._table.trim(fed.sequence.id, fed.confirmed))

    def _wipe(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._kv.clear_page(page)

    def _feed_up_to(self, fed: FedTokens, stop: int) -> None:
        for start in range(len(fed.tokens), stop, PREFILL_ROWS):
            chunk = fed.sequence.tokens[start : min(start + PREFILL_ROWS, stop)]
            self._trim(fed)
            self._table.reserve(fed.sequence.id, start + len(chunk))
            self._run([(fed, chunk)])

    def _feed(self, feds: Sequence[FedTokens]) -> Tensor:
        """Feed what is due of each, its root last; returns the roots' outputs [texts, hidden]."""
        for fed in feds:
            fed.rewind()
            if len(fed.due) > LONG_PROMPT_ROWS:
                self._feed_up_to(fed, len(fed.sequence.tokens) - 1)
        return self._run([(fed, fed.due) for fed in feds])

    def _run(self, parts: Sequence[tuple[FedTokens, Sequence[int]]]) -> Tensor:
        """One pass over the next tokens of several texts; returns [parts, hidden], outputs of the last."""
        table, head = self._table, self._head
        spans, slots, rows, tokens, last = list[RowSpan](), list[int](), list[int](), list[int](), list[int]()
        for fed, chunk in parts:
            first, sequence = len(fed.tokens), fed.sequence.id
            stop, column = first + len(chunk), table.column(sequence, first)
            pages = table.pages(sequence)[: table.pages_for(column + len(chunk))]
            spans.append(RowSpan(len(chunk), column, len(chunk), pages))
            slots += table.slots(sequence, first, stop)
            rows += range(first, stop)
            tokens += chunk
            last.append(len(tokens) - 1)
            fed.tokens += chunk
        plan = head.plan(spans, table.page_rows)
        as_tensor = partial(torch.tensor, device=head.device)
        fed = as_tensor(tokens)
        return head.forward(
            fed, fed, HeadRows(as_tensor(rows), as_tensor(slots), plan, self._kv, as_tensor(last))
        )

    def _keep_chains(self, sequences: Sequence[DraftSequence], candidates: Candidates) -> None:
        """A chain's rows lie where its tokens will stand, if they are accepted."""
        for text, tokens in zip(sequences, candidates.tokens.tolist()):
            self._fed[text.id].tokens += tokens[:-1]
