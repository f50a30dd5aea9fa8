"""`specsot bench precision`: what fewer bits cost: memory, perplexity, and tokens per step with a head.

Tokens per step are those of `specsot verify`: a whole tree in every step, and nothing but the head's drafts.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from specsot.checkpoint.config import read_config
from specsot.errors import ModelError
from specsot.members import QUANTIZATIONS, KvDtype, Quantization, Range
from specsot.params import Message
from specsot_bench.asking import counting_bar
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

# Token ids of a prompt.
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision of the base model and of its head.

    dtype: The type that base and head compute in.
    quantization: The quantization of the base; None: its weights are of type `dtype`.
    kv_dtype: The type of the base's KV rows; "auto": that in which it computes.
    draft_quantization: The quantization of the head; None: its weights are of type `dtype`.
    """

    dtype: str
    quantization: Quantization | None = None
    kv_dtype: KvDtype = "auto"
    draft_quantization: Quantization | None = None

    @property
    def base(self) -> Precision:
        """Return the same precision with a head that is not quantized. Precisions with equal bases share a
        loaded model.
        """
        return replace(self, draft_quantization=None)

    @property
    def name(self) -> str:
        """Return the name of the precision, such as "int8, head fp8".

        The name has up to three parts: the quantization of the base, or else its dtype; "<type> KV" unless
        the KV type is "auto"; and "head <quantization>" if the head is quantized.
        """
        weights = self.quantization or self.dtype
        kv = "" if self.kv_dtype == "auto" else f"{self.kv_dtype} KV"
        head = self.draft_quantization and f"head {self.draft_quantization}"
        return ", ".join(filter(None, (weights, kv, head)))


@dataclass(frozen=True, slots=True)
class HeadTrial:
    """What a head is tried on: the base model writes after each prompt, and its end tokens are ignored.

    head: Directory of the head.
    prompts: Token ids of each prompt.
    tokens: Number of tokens that are written after each prompt.
    """

    head: Path
    prompts: Sequence[Prompt]
    tokens: int


def head_trial_of(base: Path, head: Path | None, tokens: int, of_demo: bool) -> HeadTrial | None:
    """Return what the head is tried on: the questions of `specsot verify`. Return None if there is no head.

    base: Directory of the base model.
    head: Directory of the head, or None.
    tokens: Number of tokens that are written after each question.
    of_demo: True if the base model is the bundled small model, which gets questions on its own topics.

    Raises what reading the tokenizer or the chat template of the base model raises.
    """
    if head is None:
        return None
    prompts, questions = Prompts(base, Text(base)), choose_questions(None, of_demo)
    return HeadTrial(
        head, tuple(prompts.chat((Message("user", question),)) for question in questions), tokens
    )


def precisions(dtype: str, dtypes: Mapping[Quantization, str]) -> Iterator[Precision]:
    """Yield the precisions, each once: fp32 first, with which the others are compared. Those of one base
    follow each other.

    dtype: The type in which models compute that are not quantized.
    dtypes: The type in which models of each quantization compute.

    The order is fp32, `dtype`, bf16 and fp16, of which only `dtype` is combined with quantized heads; then
    each quantization of the base, without and with the same of the head; last `dtype` with KV of int8, and
    int4 weights with KV of int8.
    """
    for name in dict.fromkeys(("fp32", dtype, "bf16", "fp16")):
        heads = (None, *QUANTIZATIONS) if name == dtype else (None,)
        yield from (Precision(name, draft_quantization=kind) for kind in heads)
    for kind in QUANTIZATIONS:
        yield Precision(dtypes[kind], kind)
        yield Precision(dtypes[kind], kind, draft_quantization=kind)
    yield Precision(dtype, kv_dtype="int8")
    yield Precision(dtypes["int4"], "int4", "int8")


def measure(readings: Sequence[ReadingOptions], trial: HeadTrial | None, output: Path | None) -> int:
    """Measure every precision, and publish a table for each length of pieces. Return the exit status 0.

    readings: The text and the model, once for each length of pieces; at least one.
    trial: What the head is tried on; None: there is no head.
    output: The JSON file; None: the tables are only printed.

    Without a head, precisions that differ only in the head are left out. Each row is printed on stderr as
    soon as it is measured. With several lengths, the length is part of each row's name. Raises InvalidRequest
    for a length or a text that cannot be read in pieces; a model that cannot be loaded in one precision gives
    a skipped row instead.
    """
    names = {numbers: name for name, numbers in NAMES.items()}
    weights = readings[0].weights
    # int8 on a CPU computes in fp32 by default, where other models compute in bf16.
    dtypes = {kind: names[resolve_dtype(weights.dtype, weights.device, kind)] for kind in QUANTIZATIONS}
    candidates = precisions(names[resolve_dtype(weights.dtype, weights.device)], dtypes)
    measured = [precision for precision in candidates if trial or precision.draft_quantization is None]
    tables: list[list[Row]] = []
    with counting_bar(sys.stderr, "precisions", len(readings) * len(measured)) as count:
        for reading in readings:
            tables.append([])
            for base, same_base in groupby(measured, lambda precision: precision.base):
                for row in rows_of(_with_base(reading, base), trial, tuple(same_base)):
                    tables[-1].append({**row, "length": reading.length})
                    # The table is printed at the end, so that rows must be shown before.
                    print(line_of(row), file=sys.stderr, flush=True)
                    count()
    trial_settings: Row = {}
    if trial:
        trial_settings = {"head": str(trial.head), "prompts": len(trial.prompts), "tokens": trial.tokens}
    rows = [row for table in tables for row in table]
    settings = {**readings[0].settings, **trial_settings, "length": [reading.length for reading in readings]}
    page = "\n\n".join(page_of(table) for table in tables)
    publish("precision", settings, named(rows, "name", "length") if len(tables) > 1 else rows, page, output)
    return 0


def line_of(row: Row) -> str:
    """Return what is known of one precision, such as "int8: 9.7 MiB, perplexity 12.345, 2.31 tokens a step".

    row: The row of the precision.

    Figures that the row does not have are left out. The memory is always named.
    """
    figures = [f"{row['weight_bytes'] / 2**20:.1f} MiB"]
    if "perplexity" in row:
        figures.append(f"perplexity {row['perplexity']:.3f}")
    if "tokens_per_step" in row:
        figures.append(f"{row['tokens_per_step']:.2f} tokens a step")
    if "skipped" in row:
        figures.append(f"skipped: {row['skipped']}")
    return f"{row['name']}: {', '.join(figures)}"


def rows_of(
    reading: ReadingOptions, trial: HeadTrial | None, same_base: Sequence[Precision]
) -> Iterator[Row]:
    """Yield the rows of one base model, which is loaded once, with each of its heads. The entry "skipped"
    says why a precision could not be measured.

    reading: The text, and the model in this precision.
    trial: What the head is tried on; None: there is no head.
    same_base: The precisions, which have equal bases.

    If the base model cannot be loaded, every row has only computed sizes and "skipped". If the head cannot be
    loaded, its row has a perplexity and "skipped". Raises InvalidRequest for a length or text that cannot be
    used.
    """
    try:
        decoder, pieces = reading.load()
    except ModelError as error:
        yield from (_sizes_of(reading, precision) | {"skipped": str(error)} for precision in same_base)
        return
    token_losses = [loss for tokens in pieces for loss in losses(decoder, tokens)]
    for precision in same_base:
        row = _sizes_of(reading, precision) | {"perplexity": math.exp(sum(token_losses) / len(token_losses))}
        yield row if trial is None else row | _acceptance_of(decoder, reading, trial, precision)


def _acceptance_of(
    base: Decoder, reading: ReadingOptions, trial: HeadTrial, precision: Precision
) -> dict[str, Any]:
    """Return the tokens per step with the head in one precision, the bonus token included, and their standard
    error, which is None for a single step. If the head cannot be loaded, return {"skipped": why}.

    base: The loaded base model.
    reading: Names the directory of the base model.
    trial: What the head is tried on.
    precision: The precision, of which the head's quantization is read.

    The keys are "tokens_per_step", "error" and "steps" (the number of forward passes).
    """
    quantization = precision.draft_quantization
    try:
        check_quantization(quantization, base.device.type)
        head = load_head(trial.head, reading.weights.base, base.dtype, base.device, quantization=quantization)
    except ModelError as error:
        return {"skipped": str(error)}
    accepted = measure_acceptance(base, head, [(prompt, trial.tokens) for prompt in trial.prompts])
    steps = len(accepted.lengths)
    error = statistics.stdev(accepted.lengths) / steps**0.5 if steps > 1 else None
    return {"tokens_per_step": accepted.per_step, "error": error, "steps": steps}


def _with_base(reading: ReadingOptions, base: Precision) -> ReadingOptions:
    """Return the same reading with the base model in another precision.

    reading: The text and the model.
    base: The precision.
    """
    base_options: dict[str, Any] = {"dtype": base.dtype, "quantization": base.quantization}
    return replace(reading, weights=replace(reading.weights, **base_options, kv_cache_dtype=base.kv_dtype))


def _sizes_of(reading: ReadingOptions, precision: Precision) -> dict[str, Any]:
    """Return the name of a precision, and computed, not measured: the bytes of the base's weights, and the
    bytes of one position's KV in all layers.

    reading: Names the directory and the device of the base model.
    precision: The precision.

    The keys are "name", "weight_bytes" and "kv_bytes".
    """
    config = read_config(reading.weights.base)
    itemsize = NAMES[precision.dtype].itemsize
    form = WeightForm.on_device(reading.weights.device, itemsize, precision.quantization)
    all_layers = Range(0, config.layers)
    kv_row = row_bytes(config.head_dim, row_itemsize(config, itemsize, form.packed), precision.kv_dtype)
    weights = weights_of(open_weights(reading.weights.base), config, all_layers, form)
    kv = 2 * config.layers * config.kv_heads * kv_row
    return {"name": precision.name, "weight_bytes": weights, "kv_bytes": kv}


def page_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown. Next to perplexity and tokens per step is how much they differ from those
    of the first row, fp32.

    rows: The rows of one length; at least one.

    If the first row has no such figure, all differences are "-". The note names the length of the pieces if
    the rows have one.
    """

    def change_column(key: str) -> Column:
        """Return a column with the difference of a figure from that of the first row.

        key: The figure's entry in a row.
        """
        reference = rows[0].get(key)

        def cell(row: Row) -> str:
            """Return the difference in per cent; "-" if either figure is missing.

            row: A row of the table.
            """
            value = row.get(key)
            return "-" if value is None or reference is None else f"{value / reference - 1:+.1%}"

        return Column("", cell)

    columns = (
        text("held in", "name"),
        figure("weights, MiB", "weight_bytes", 1, 2**-20),
        figure("KV, B", "kv_bytes", 0),
        figure("perplexity", "perplexity", 3),
        change_column("perplexity"),
        figure("tokens a step", "tokens_per_step"),
        change_column("tokens_per_step"),
    )
    note = f"; pieces of {rows[0]['length']} tokens" if "length" in rows[0] else ""
    return f"{markdown(columns, rows)}\n\nKV of one position; changes are relative to fp32{note}"
