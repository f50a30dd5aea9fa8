"""A whole small language model as a draft head, which reads no features of the base model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.quantization_config import GROUP
from specsot.members import Quantization
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_model.attention import AttentionPlan, RowSpan
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.linear import LANES


def small_quantization(config: ModelConfig, wanted: Quantization | None, packed: bool) -> Quantization | None:
    """Return the form in which the matrices of a small model that drafts are stored: `wanted`, or int8
    instead of int4 if packed matrices cannot have int4, because the number of inputs of one of them is no
    multiple of GROUP, the number of inputs that share a scale.

    config: The model's config.
    wanted: The form that the options name. None: floats.
    packed: Whether int8 and int4 are packed for the CPU kernels, as they are on a CPU.
    """
    inputs = config.hidden, config.intermediate, config.heads * config.head_dim
    return "int8" if packed and wanted == "int4" and any(size % GROUP for size in inputs) else wanted


class DecoderHead(DraftHead):
    """A small language model as a `DraftHead`, and as a `GraphHead` if it is `capturable`.

    offsets: None, because draft ids are ids of the base model.
    window: None, because models with attention windows are not captured.
    decoder: The model's layers, all of them.
    asks_alone: False, because every row takes part in the attention of the next layer.
    """

    offsets = window = None
    asks_alone = False

    def __init__(
        self,
        decoder: Decoder,
        vocabulary: int,
        positions: int,
        spelled: Sequence[bytes | None] | None = None,
    ) -> None:
        """Wrap a model.

        decoder: The model's layers, all of them.
        vocabulary: Number of token ids of the base model; the head drafts no higher id.
        positions: Number of positions of the base model; the head drafts no later position.
        spelled: The bytes of each token's text by token id, or None for a token without text; as long as the
            base model's vocabulary. If the whole argument is None, all ids can be drafted from the beginning,
            see `include`.
        """
        config = decoder.config
        self.hidden = config.hidden
        self.layers = config.layers
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.group = config.heads // config.kv_heads
        self.draft_vocab = min(vocabulary, config.vocab)
        self.positions = min(positions, config.max_positions)
        self.dtype, self.device = decoder.dtype, decoder.device  # pyrefly: ignore[read-only]
        self.decoder = decoder
        self._spelled = spelled
        self._num_ids = self.draft_vocab if spelled is None else 0

    @property
    def capturable(self) -> bool:
        """True if the layers can be captured in graphs on this machine. Models with attention windows cannot:
        a graph does not compute where the window of a grown row begins.
        """
        return self.decoder.capturable and not self.decoder.config.windowed

    def make_kv(self, pages: int, page_rows: int) -> KVPages:
        """Return empty KV pages for the model's layers.

        pages: Number of pages.
        page_rows: Number of slots of a page.
        """
        return self.decoder.make_kv(pages, page_rows)

    def plan(self, spans: Sequence[RowSpan], page_rows: int) -> AttentionPlan:
        """Return the attention plan of one forward pass.

        spans: For each sequence, its query rows and the KV that they see.
        page_rows: Number of slots of a KV page.
        """
        return self.decoder.plan(spans, page_rows, "batched")

    def step(self, tokens: Tensor, features: Tensor, origins: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass like `forward`, for captured graphs (`GraphHead.step`), and return the outputs
        of the asked rows, [asked, hidden].

        tokens: Token ids, [rows].
        features: Ignored, because the model reads no features. A tensor of any shape.
        origins: Ignored, likewise.
        rows: Positions, slots and attention of the rows.
        """
        return self.forward(tokens, features, rows)

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass, and return the outputs of the asked rows, [asked, hidden]; see
        `DraftHead.forward`.

        tokens: Token ids, [rows].
        features: Ignored, because the model reads no features. A tensor of any shape.
        rows: Positions, slots and attention. The plan must have a query row for every row, not only for asked
            rows.

        Every row writes its keys and values. If `rows.asked` is None, all rows are returned.
        """
        assert rows.plan is not None
        embedded = self.decoder.embed(tokens)
        hidden, _ = self.decoder.forward(
            embedded, rows.positions, rows.slots, rows.plan, rows.kv, tokens=tokens
        )
        return hidden if rows.asked is None else hidden[rows.asked]

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of the ids that can be drafted, [rows, draft vocabulary].

        outputs: Outputs of `forward`, [rows, hidden].
        """
        return self.decoder.logits(outputs)[:, : self.draft_vocab]

    def choose(self, outputs: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Return log-probabilities and ids of the likeliest tokens of each row, [rows, count] each, best
        first. Only ids up to the highest that has occurred are considered, see `include`; their probabilities
        add up to 1. Return None if no CPU kernel computes logits and selection together, or if fewer than
        `count` ids are considered; the caller then computes all logits.

        outputs: Outputs of `forward`, [rows, hidden].
        count: Number of tokens per row.
        """
        num_ids = min(self._num_ids, self.draft_vocab)
        whole = num_ids == self.decoder.config.vocab or not num_ids % LANES
        return self.decoder.best_tokens(outputs, count, num_ids) if whole and count <= num_ids else None

    def include(self, tokens: Sequence[int]) -> None:
        """Let `choose` consider all ids up to the highest of these tokens, rounded up to whole vectors of
        LANES ids, from now on and for all sequences. The range never shrinks. Tokens without text, such as
        those that end an answer, do not count, because they have the highest ids of many vocabularies.
        Nothing happens if all ids are considered already.

        tokens: Ids of tokens of a sequence, in any order. Each must be below the base model's vocabulary.

            # LANES 16, tokens 5 and 40 -> ids 0..47 are considered; then token 20 -> still 0..47

        In byte-pair vocabularies rare tokens have high ids. For example, English answers of
        Qwen2.5-Coder-1.5B have no id above 98,304 of 151,936, so that a third of the lm_head is not read.
        """
        if self._spelled is not None:
            highest = max((token for token in tokens if self._spelled[token] is not None), default=0)
            self._num_ids = max(self._num_ids, (highest // LANES + 1) * LANES)
