"""Drafts with a small language model of its own: a chain, a tree of fixed breadth, or a pruned one.

Refuses to know the base's features. Its KV is kept from round to round and rewound by index: of what it
was fed, as many rows stay as still agree with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specsot.arrange import window_of
from specsot.errors import Overloaded
from specsot.frames import Features
from specsot.model.attention import AttentionPlan, Span, plan_attention
from specsot.model.decoder import Decoder
from specsot.model.kv import KVPages
from specsot.pages import PageTable
from specsot_drafter.drafters.beams import Beam
from specsot_drafter.grammar import guide_of
from specsot_drafter.growth import Ground, Growth, find_ground
from specsot_drafter.selection import Deserves, Offer, for_all
from specsot_drafter.texts import Text

CHUNK = 512  # rows of one pass over what is due
LONG = 32  # rows from which a text is fed alone


class ModelHead:
    """A whole decoder as what grows trees: it wants no features, its own hidden rows are its outputs."""

    taps: tuple[int, ...] = ()
    width = 0

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

    @property
    def row_bytes(self) -> int:
        """KV bytes of one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def tap_slices(self) -> dict[int, Tensor]:
        return {}

    def features(self, fused: Tensor) -> Tensor:
        return fused

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan | None,
        kv: KVPages,
        asked: Tensor | None = None,
    ) -> Tensor:
        """See `DraftHead.forward`; every row needs its place in the plan."""
        assert plan is not None
        hidden, _ = self._decoder.forward(self._decoder.embed(tokens), positions, slots, plan, kv)
        return hidden if asked is None else hidden[asked]

    def log_probs(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] to [rows, base vocabulary or less], in fp32."""
        return torch.log_softmax(self._decoder.logits(outputs)[:, : self.draft_vocab].float(), dim=-1)

    def to_target(self, ids: Tensor) -> Tensor:
        return ids


@dataclass(slots=True)
class Fed:
    """A text, and the tokens whose KV rows lie in its first slots; the first `sure` are the text's."""

    text: Text
    tokens: list[int] = field(default_factory=list)
    sure: int = 0

    @property
    def due(self) -> list[int]:
        """Tokens to feed, once rewound."""
        return self.text.tokens[len(self.tokens) :]

    def rewind(self) -> None:
        """Forget the rows that are not the text's, and its root's, which is always due."""
        end = min(len(self.tokens), len(self.text.tokens) - 1)
        while self.sure < end and self.tokens[self.sure] == self.text.tokens[self.sure]:
            self.sure += 1
        self.sure = min(self.sure, end)
        del self.tokens[self.sure :]


class ModelDrafter:
    """See `Drafter`."""

    def __init__(self, head: ModelHead, beam: Beam, pages: int, page_rows: int) -> None:
        self.widths = beam.widths
        self._head, self._beam = head, beam
        self._table = PageTable(pages, page_rows)
        self._kv = KVPages(
            head.layers, pages, page_rows, head.kv_heads, head.head_dim, head.dtype, head.device
        )
        self._fed: dict[int, Fed] = {}

    @property
    def free_pages(self) -> int:
        return self._table.free

    def due(self, texts: Sequence[Text]) -> int:
        fed = [self._fed[text.sequence] for text in texts if text.sequence in self._fed]
        return sum(max(len(one.text.tokens) - len(one.tokens), 1) for one in fed)

    def open(self, text: Text) -> None:
        """Nothing is computed or shared yet: perhaps nothing will ever be drafted."""
        self._fed[text.sequence] = Fed(text)

    def hear(self, batch: Features) -> None:
        """The texts know."""

    def close(self, sequence: int) -> None:
        self._fed.pop(sequence, None)
        self._wipe(self._table.close(sequence))

    def catch_up(self) -> None:
        """Nothing: what is due goes along with the next root."""

    def most_levels(self, text: Text) -> int:
        if text.sequence not in self._fed:
            return 0
        depth = min(text.room - 1, text.reach(self._head.positions) - 1 - text.committed)
        return max(min(len(self.widths) + 1, depth), 0)

    def offer(self, texts: Sequence[Text], levels: int, deserves: Deserves | None = None) -> Offer | None:
        grounds = [self._ground(text) for text in texts]
        growing = [(text, ground) for text, ground in zip(texts, grounds) if ground]
        if not growing:
            return None
        last = self._feed([self._fed[text.sequence] for text, _ in growing])
        guide = guide_of(self._head, [text for text, _ in growing])
        grown = Growth(
            self._head,
            self._kv,
            [ground for _, ground in growing],
            self._beam.breadth,
            guide,
            self._beam.widths,
            self._beam.floor,
        )
        offer = grown.run(last, levels, deserves)
        if self._beam.breadth == 1:
            self._keep_chains([text for text, _ in growing], offer)
        return for_all(offer, [ground is not None for ground in grounds])

    def _ground(self, text: Text) -> Ground | None:
        """Room behind everything that is known; a text that was never drafted for begins here."""
        fed = self._fed.get(text.sequence)
        if fed is None or not (text.sequence in self._table or self._begin(fed)):
            return None
        self._trim(fed)
        return find_ground(self._table, text.sequence, len(text.tokens), sum(self.widths))

    def _begin(self, fed: Fed) -> bool:
        """Share with the source all that the two have in common; the source is fed that far first."""
        fork, sequence = fed.text.opening.fork, fed.text.sequence
        source = self._fed.get(fork.sequence) if fork else None
        if fork is None or source is None:
            self._table.open(sequence, window_of(fed.text.opening))
            return True
        try:
            if source.text.sequence not in self._table:
                self._table.open(source.text.sequence, window_of(source.text.opening))
            source.rewind()
            self._feed_up_to(source, fork.length)
            copy = self._table.fork(sequence, source.text.sequence, fork.length)
        except Overloaded:
            return False
        if copy is not None:
            self._kv.copy_page(copy.source, copy.target, copy.rows)
        fed.tokens = source.tokens[: fork.length]
        return True

    def _trim(self, fed: Fed) -> None:
        """Give back what a window hides from all rows to come. Here a row sees all that is left."""
        self._wipe(self._table.trim(fed.text.sequence, fed.sure))

    def _wipe(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._kv.clear_page(page)

    def _feed_up_to(self, fed: Fed, stop: int) -> None:
        for start in range(len(fed.tokens), stop, CHUNK):
            chunk = fed.text.tokens[start : min(start + CHUNK, stop)]
            self._trim(fed)
            self._table.reserve(fed.text.sequence, start + len(chunk))
            self._run([(fed, chunk)])

    def _feed(self, texts: Sequence[Fed]) -> Tensor:
        """Feed what is due of each, its root last; returns the roots' outputs [texts, hidden]."""
        for fed in texts:
            fed.rewind()
            if len(fed.due) > LONG:
                self._feed_up_to(fed, len(fed.text.tokens) - 1)
        return self._run([(fed, fed.due) for fed in texts])

    def _run(self, parts: Sequence[tuple[Fed, Sequence[int]]]) -> Tensor:
        """One pass over the next tokens of several texts; returns [parts, hidden], outputs of the last."""
        table, head = self._table, self._head
        spans, slots, rows, tokens, last = list[Span](), list[int](), list[int](), list[int](), list[int]()
        for fed, chunk in parts:
            first, sequence = len(fed.tokens), fed.text.sequence
            stop, column = first + len(chunk), table.column(sequence, first)
            pages = table.pages(sequence)[: table.pages_for(column + len(chunk))]
            spans.append(Span(len(chunk), column, len(chunk), pages))
            slots += table.slots(sequence, first, stop)
            rows += range(first, stop)
            tokens += chunk
            last.append(len(tokens) - 1)
            fed.tokens += chunk
        plan = plan_attention(spans, table.page_rows, head.group, "batched", head.dtype, head.device)
        as_tensor = partial(torch.tensor, device=head.device)
        fed_rows = as_tensor(tokens)
        return head.forward(
            fed_rows, fed_rows, as_tensor(rows), as_tensor(slots), plan, self._kv, as_tensor(last)
        )

    def _keep_chains(self, texts: Sequence[Text], offer: Offer) -> None:
        """A chain's rows lie where its tokens will stand, if they are accepted."""
        for text, tokens in zip(texts, offer.tokens.tolist()):
            self._fed[text.sequence].tokens += tokens[:-1]
