"""`specsot bench policies`: perplexity of texts under each KV policy, and how much is attended to.

Refuses to know drafting and requests: under a policy, too, drafts do not change what is written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specsot.errors import InvalidRequest
from specsot.members import KvDtype, Quantization
from specsot.model.decoder import Decoder
from specsot.model.heads import FILE, read_heads, write_heads
from specsot.params import Pruning, Window
from specsot_app.bench.perplexity import Policy, load_whole, losses, rows_seen
from specsot_app.bench.results import write_results
from specsot_app.bench.tables import read_reference
from specsot_app.terminal.progress import counting
from specsot_lab.bench.head_classes import SKIPPED, keep_by_head, measure_heads
from specsot_master.text import Text

POLICIES: tuple[tuple[str, Policy], ...] = (
    ("full", None),
    ("sinks + window 256", Window(4, 252)),
    ("sinks + window 512", Window(4, 508)),
    ("sinks + window 1024", Window(4, 1020)),
    ("recent 512", Window(0, 512)),
    ("L2 norm, 0.8 every 64", Pruning(0.8, 64, 0)),
    ("L2 norm, 0.8 every 64, 2 layers whole", Pruning(0.8, 64, 2)),
    ("L2 norm, 0.8 every 256, 2 layers whole", Pruning(0.8, 256, 2)),
)


@dataclass(frozen=True, slots=True)
class Score:
    """rows: that the last token of a piece attends to, mean over layers and heads."""

    name: str
    perplexity: float
    rows: float


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read: pieces of `length` tokens from the beginning of a text on, `pieces` at most.

    text: None: the one that `specsot bench quick` reads. dtype, quantization, kv_dtype: what the model
    computes in, and what its matrices and KV rows are held in.
    """

    model: Path
    text: Path | None
    length: int
    pieces: int
    dtype: str
    device: str
    quantization: Quantization | None = None
    kv_dtype: KvDtype = "auto"

    def load(self) -> tuple[Decoder, list[tuple[int, ...]]]:
        """The model, and the pieces. Raises ModelError, InvalidRequest."""
        decoder = load_whole(self.model, self.dtype, self.device, self.quantization, self.kv_dtype)
        most = decoder.config.max_positions
        if not SKIPPED < self.length <= most:
            raise InvalidRequest(f"length must be in ({SKIPPED}, {most}], got {self.length}", "length")
        tokens = Text(self.model).encode_bare(read_reference(self.text))
        whole = range(0, len(tokens) - self.length + 1, self.length)
        if not whole:
            raise InvalidRequest(f"the text has {len(tokens)} tokens, a piece {self.length}", "text")
        return decoder, [tuple(tokens[at : at + self.length]) for at in whole[: self.pieces]]


def measure(reading: Reading, output: Path | None) -> int:
    """A table, and JSON where asked to."""
    decoder, pieces = reading.load()
    heads = read_heads(reading.model, decoder.config)
    named = POLICIES if heads is None else (*POLICIES, ("head-aware", heads))
    scores: list[Score] = []
    with counting(sys.stderr, "policies", len(named)) as count:
        for name, policy in named:
            scores.append(_score(decoder, pieces, name, policy))
            count()
    _show(scores, len(pieces), reading.length)
    if heads is None:
        print("head-aware: nothing was measured of this model's heads (--find-heads does)")
    if output:
        write_results(output, "policies", asdict(reading), [asdict(score) for score in scores])
    return 0


def find_heads(reading: Reading, gathering: int | None) -> int:
    """Writes what the model's heads look at beside its weights; gathering: see `keep_by_head`."""
    decoder, pieces = reading.load()
    looks, config = measure_heads(decoder, pieces), decoder.config
    layers = [keep_by_head(layer, config.kv_heads, gathering) for layer in looks]
    write_heads(reading.model / FILE, layers, {"pieces": len(pieces), "length": reading.length})
    table = Table("layer", "KV head", "its query heads", "sinks", "recent", box=SIMPLE_HEAD)
    for layer, heads in enumerate(layers):
        for number, head in enumerate(heads):
            recent = "all" if head["recent"] is None else str(head["recent"])
            table.add_row(str(layer), str(number), ", ".join(head["classes"]), str(head["sinks"]), recent)
    Console().print(table)
    print(f"written to {reading.model / FILE}")
    return 0


def _score(decoder: Decoder, read: Sequence[Sequence[int]], name: str, policy: Policy) -> Score:
    found = [loss for tokens in read for loss in losses(decoder, tokens, policy)]
    perplexity = math.exp(sum(found) / len(found))
    return Score(name, perplexity, rows_seen(decoder.config, len(read[0]), policy))


def _show(scores: Sequence[Score], pieces: int, length: int) -> None:
    table = Table("policy", "rows", "perplexity", "against full", box=SIMPLE_HEAD)
    for one in scores:
        more = f"{one.perplexity / scores[0].perplexity - 1:+.1%}" if one is not scores[0] else ""
        table.add_row(one.name, f"{one.rows:,.0f}", f"{one.perplexity:.3f}", more)
    Console().print(table)
    print(f"{pieces} pieces of {length} tokens")
