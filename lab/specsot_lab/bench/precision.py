"""`specsot bench precision`: what fewer bits cost: memory, perplexity, and tokens a step with a head.

Tokens a step are those of `specsot verify`: a whole tree in every step, and
nothing but the head's drafts.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from specsot.checkpoint.config import read_config
from specsot.errors import ModelError
from specsot.members import QUANTIZATIONS, KvDtype, Quantization, Range
from specsot.params import Message
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.perplexity import losses
from specsot_bench.results import Row, named, publish
from specsot_bench.verify.pair import choose_questions, measure_acceptance
from specsot_drafter.heads.loading import load_head
from specsot_lab.bench.policies import ReadingOptions
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.kv import row_bytes
from specsot_model.linear import NAMES, check_quantization, resolve_dtype
from specsot_model.memory_fit import WeightForm, weights_of
from specsot_model.packed import row_itemsize
from specsot_model.published import open_weights

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Precision:
    """dtype: what base and head compute in. quantization, kv_dtype: of the base."""

    dtype: str
    quantization: Quantization | None = None
    kv_dtype: KvDtype = "auto"
    draft_quantization: Quantization | None = None

    @property
    def base(self) -> Precision:
        """The same with the whole head."""
        return replace(self, draft_quantization=None)

    @property
    def name(self) -> str:
        """Return the name of the precision, such as "int8, head fp8"."""
        held = self.quantization or self.dtype
        rows = "" if self.kv_dtype == "auto" else f"{self.kv_dtype} KV"
        head = self.draft_quantization and f"head {self.draft_quantization}"
        return ", ".join(filter(None, (held, rows, head)))


@dataclass(frozen=True, slots=True)
class Writing:
    """What a head is tried on: the base writes so many tokens behind each prompt, whatever ends come."""

    head: Path
    prompts: Sequence[Prompt]
    tokens: int


def writing_of(base: Path, head: Path | None, tokens: int, of_demo: bool) -> Writing | None:
    """Return what the head helps to write: the questions of `specsot verify`; None without a head. of_demo:
    the bundled small model answers.
    """
    if head is None:
        return None
    prompts, asked = Prompts(base, Text(base)), choose_questions(None, of_demo)
    return Writing(head, tuple(prompts.chat((Message("user", question),)) for question in asked), tokens)


def precisions(dtype: str) -> Iterator[Precision]:
    """Yield the precisions, first what others are compared with; those of one base together. Quantized ones
    compute in `dtype`.
    """
    for name in dict.fromkeys(("fp32", dtype, "bf16", "fp16")):
        heads = (None, *QUANTIZATIONS) if name == dtype else (None,)
        yield from (Precision(name, draft_quantization=kind) for kind in heads)
    for kind in QUANTIZATIONS:
        yield Precision(dtype, kind)
        yield Precision(dtype, kind, draft_quantization=kind)
    yield Precision(dtype, kv_dtype="int8")
    yield Precision(dtype, "int4", "int8")


def measure(readings: Sequence[ReadingOptions], writing: Writing | None, output: Path | None) -> int:
    """Measure every precision, and publish a table for each length of pieces; return the exit status.
    writing: None: nothing drafts. output: the JSON file; None: only print.
    """
    names = {numbers: name for name, numbers in NAMES.items()}
    weights = readings[0].weights
    every = precisions(names[resolve_dtype(weights.dtype, weights.device)])
    wanted = [one for one in every if writing or one.draft_quantization is None]
    tables: list[list[Row]] = []
    with counting_bar(sys.stderr, "precisions", len(readings) * len(wanted)) as count:
        for reading in readings:
            tables.append([])
            for base, ones in groupby(wanted, lambda one: one.base):
                for row in rows_of(_held_in(reading, base), writing, tuple(ones)):
                    tables[-1].append({**row, "length": reading.length})
                    print(line_of(row), file=sys.stderr, flush=True)  # the table comes at the end
                    count()
    tried: Row = {}
    if writing:
        tried = {"head": str(writing.head), "prompts": len(writing.prompts), "tokens": writing.tokens}
    rows = [row for table in tables for row in table]
    settings = {**readings[0].settings, **tried, "length": [reading.length for reading in readings]}
    page = "\n\n".join(page_of(table) for table in tables)
    publish("precision", settings, named(rows, "name", "length") if len(tables) > 1 else rows, page, output)
    return 0


def line_of(row: Row) -> str:
    """Return what is known of one precision, such as "int8: 9.7 MiB, perplexity 12.345, 2.31
    tokens a step".
    """
    told = [f"{row['weight_bytes'] / 2**20:.1f} MiB"]
    if "perplexity" in row:
        told.append(f"perplexity {row['perplexity']:.3f}")
    if "tokens_per_step" in row:
        told.append(f"{row['tokens_per_step']:.2f} tokens a step")
    if "skipped" in row:
        told.append(f"skipped: {row['skipped']}")
    return f"{row['name']}: {', '.join(told)}"


def rows_of(reading: ReadingOptions, writing: Writing | None, ones: Sequence[Precision]) -> Iterator[Row]:
    """Yield rows of one base, which is loaded once, with each of its heads; "skipped" says why one cannot be
    measured.
    """
    try:
        decoder, pieces = reading.load()
    except ModelError as error:
        yield from (_size(reading, one) | {"skipped": str(error)} for one in ones)
        return
    found = [loss for tokens in pieces for loss in losses(decoder, tokens)]
    for one in ones:
        told = _size(reading, one) | {"perplexity": math.exp(sum(found) / len(found))}
        yield told if writing is None else told | _with_head(decoder, reading, writing, one)


def _with_head(base: Decoder, reading: ReadingOptions, writing: Writing, one: Precision) -> dict[str, Any]:
    """Return the tokens per step with the head in this precision, bonus included, with its standard error; or
    why it was skipped.
    """
    kind = one.draft_quantization
    try:
        check_quantization(kind, base.device.type)
        head = load_head(writing.head, reading.weights.base, base.dtype, base.device, quantization=kind)
    except ModelError as error:
        return {"skipped": str(error)}
    accepted = measure_acceptance(base, head, [(prompt, writing.tokens) for prompt in writing.prompts])
    steps = len(accepted.lengths)
    error = statistics.stdev(accepted.lengths) / steps**0.5 if steps > 1 else None
    return {"tokens_per_step": accepted.per_step, "error": error, "steps": steps}


def _held_in(reading: ReadingOptions, base: Precision) -> ReadingOptions:
    """Return the same reading with the base in this precision."""
    held: dict[str, Any] = {"dtype": base.dtype, "quantization": base.quantization}
    return replace(reading, weights=replace(reading.weights, **held, kv_cache_dtype=base.kv_dtype))


def _size(reading: ReadingOptions, one: Precision) -> dict[str, Any]:
    """Return the bytes of the base's weights, and of one position's KV in all layers: counted,
    not measured.
    """
    config = read_config(reading.weights.base)
    numbers = NAMES[one.dtype].itemsize
    held = WeightForm.on_device(reading.weights.device, numbers, one.quantization)
    whole = Range(0, config.layers)
    row = row_bytes(config.head_dim, row_itemsize(config, numbers, held.packed), one.kv_dtype)
    weights = weights_of(open_weights(reading.weights.base), config, whole, held)
    kv = 2 * config.layers * config.kv_heads * row
    return {"name": one.name, "weight_bytes": weights, "kv_bytes": kv}


def page_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, with how much more or less than fp32's each figure is."""

    def against(key: str) -> Column:
        """Return a column with the ratio of a figure to the first row's."""
        whole = rows[0].get(key)

        def cell(row: Row) -> str:
            """Return the difference in per cent; "-" if either figure is missing."""
            value = row.get(key)
            return "-" if value is None or whole is None else f"{value / whole - 1:+.1%}"

        return Column("", cell)

    columns = (
        text("held in", "name"),
        figure("weights, MiB", "weight_bytes", 1, 2**-20),
        figure("KV, B", "kv_bytes", 0),
        figure("perplexity", "perplexity", 3),
        against("perplexity"),
        figure("tokens a step", "tokens_per_step"),
        against("tokens_per_step"),
    )
    read = f"; pieces of {rows[0]['length']} tokens" if "length" in rows[0] else ""
    return f"{markdown(columns, rows)}\n\nKV of one position; both figures beside fp32's{read}"
