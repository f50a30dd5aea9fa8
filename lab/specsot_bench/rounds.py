"""Runs `specsot bench quick` and `full`: every method of the tables on the same questions, round by round.

Within a round the methods run one after another, so that a machine whose speed drifts affects all alike;
every ratio is taken within a round.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch

from specsot.checkpoint.resolving import resolve_model
from specsot.errors import InvalidRequest, ModelError, SpecsotError
from specsot.service.options import DraftModelOptions
from specsot_app.fleet.demo import is_small, small_pair
from specsot_app.fleet.options import FleetOptions
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_bench import results
from specsot_bench.asking import counting_bar
from specsot_bench.core.aggregate import Recording, baseline_of, name_of, row_of, runs_of, skipped, unwritten
from specsot_bench.core.method_page import latex_of, page_of, recommend
from specsot_bench.core.methods import PLAIN, Method, MethodTable
from specsot_bench.core.pairing import order
from specsot_bench.core.tables import Row
from specsot_bench.perplexity import Scores
from specsot_bench.plots import draw
from specsot_bench.results import Clock, Stopwatch, now
from specsot_bench.runners import PAGE_ROWS, ModelSet, Runners

# The answers of all rounds, by method and requested length.
Answers = dict[tuple[str, int], list[Recording]]

# Tokens that each method writes before it is measured; a plan needs as many.
WARM_UP_TOKENS = 64
# Positions. Bounds what drafts need after the last token. Untuned.
DRAFT_POSITIONS = 16

# Questions that are asked unless --prompts names a file.
QUESTIONS = (
    "Explain how a steam engine works, part by part.",
    "Describe the water cycle and why it matters.",
    "What led to the invention of printing, and what came of it?",
    "How do vaccines protect a population?",
    "Give an overview of how a computer stores numbers.",
)


@dataclass(frozen=True, slots=True)
class TableRun:
    """What is measured.

    table: Methods, lengths and number of rounds.
    models: Models of the run.
    questions: Questions, one for each round; from the first one on again if there are more rounds.
    reference: Text for perplexity; None: no text is read.
    seconds: Seconds after which the first round has no answers except those without drafts, not even one in
        progress; no further round begins that would not end in time.
    """

    table: MethodTable
    models: ModelSet
    questions: tuple[str, ...]
    reference: str | None
    seconds: float = math.inf

    def question(self, round_number: int) -> str:
        """Return the question of a round.

        round_number: Number of the round, counted from 0; beyond the last question it begins again with the
            first.
        """
        return self.questions[round_number % len(self.questions)]


def models_of(options: FleetOptions, small_model: str | None) -> ModelSet:
    """Return the models of a run; the demo model brings a head and a small model.

    The demo's models are used only if the fleet's options name no model; a draft model or small model that
    is given then replaces the demo's. With a model, a missing draft or small model stays missing (None).

    options: Options of the fleet.
    small_model: Directory or name of the small language model; None: no small model.
    Raises ModelError if a model is not found.
    """
    directories = [path and resolve_model(path) for path in (options.model, options.draft_model, small_model)]
    if directories[0] is None:
        directories = [
            path or small_pair() / default_name
            for path, default_name in zip(directories, ("base", "eagle3", "small"))
        ]
    fields_of_set: dict[str, Any] = {
        field.name: getattr(options, field.name) for field in fields(DraftModelOptions)
    }
    fields_of_set |= {"model": directories[0], "head": directories[1], "small": directories[2]}
    return ModelSet(**fields_of_set)


def read_reference(file: Path | None) -> str:
    """Return a text for perplexity: the file's, or passages of an encyclopedia without a file.

    The passages are joined by line breaks, without their first lines.

    file: Path of a UTF-8 text; None: no file was given.
    Raises InvalidRequest for a file that is not UTF-8, OSError for a file that cannot be read.
    """
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"text: {file} is no text in UTF-8 ({error})", field="text") from None
    lines = (files("specsot_bench") / "data" / "multi-doc-qa.jsonl").read_text(encoding="utf-8").splitlines()
    return "\n".join(json.loads(line)["turns"][0].partition("\n")[2].strip() for line in lines)


def measure(table_run: TableRun) -> tuple[Row, list[Row]]:
    """Run everything; return the settings and the rows of the table, those of skipped methods last.

    Raises ModelError if the baseline cannot write, InvalidRequest for a reference text that cannot be used,
    and KeyboardInterrupt at Ctrl-C.

    table_run: Methods, models and questions of the run.
    """
    quiet_logs()
    # Made first, so that a text that cannot be used is reported at once.
    scores = Scores(table_run.models, table_run.reference)
    settings, answers, left_out = run_until_signal(_write(table_run))
    return settings, _rows(table_run, answers, scores) + left_out


async def _write(task: TableRun) -> tuple[Row, Answers, list[Row]]:
    """Load everything and write all answers; return the settings, the answers, and the rows that were left
    out.

    Rows are left out for methods that lack a model or cannot write, for lengths that exceed the context, and
    for methods that failed during the rounds.

    task: Methods, models and questions of the run.
    Raises ModelError if the baseline cannot write.
    """
    async with Runners(task.models) as runners:
        failed = await _warm_up(task, runners)
        left_out = [row for method in task.table.methods for row in _left_out(task, runners, method, failed)]
        missing = {row["name"] for row in left_out}
        to_write = [
            (method, tokens)
            for method in task.table.methods
            for tokens in _lengths_to_write(method, task.table.lengths_of(method), missing)
        ]
        answers, broken = await write_rounds(task, runners, to_write)
        left_out += unwritten(task.table, broken, missing)
        return _settings(task, runners), answers, left_out


class MethodWriter(Protocol):
    """Something that answers a question with a method."""

    async def write(
        self, method: Method, question: str, tokens: int, seconds: float | None = None
    ) -> Recording:
        """Return the answer to a question, written with a method.

        method: The method that writes.
        question: The question as plain text.
        tokens: Number of tokens of the answer.
        seconds: Seconds after which TimeoutError is raised; None: no limit.
        """
        ...


async def write_rounds(
    task: TableRun, writer: MethodWriter, to_write: Sequence[tuple[Method, int]], clock: Clock = now
) -> tuple[Answers, dict[tuple[str, int], str]]:
    """Return all answers, and why there are none of a method that failed on any question or was not reached.

    The methods are written in the order of `order`, so that a drifting machine affects all alike.

    A method that failed once is not written again, and its earlier answers are dropped. The first round
    always runs; a later one begins only if it would end in `task.seconds`, estimated from the mean of
    the rounds so far. In the first round a method that is reached after that time fails with
    "not reached in time".

    task: Methods, models and questions of the run.
    writer: Answers a question with a method.
    to_write: Methods, and the number of tokens that each writes.
    clock: Returns seconds.
    Raises SpecsotError if the baseline fails.
    """
    answers: Answers = {(method.name, tokens): [] for method, tokens in to_write}
    failures: dict[tuple[str, int], str] = {}
    stopwatch = Stopwatch(clock)
    with counting_bar(sys.stderr, "answers", len(to_write) * task.table.rounds) as advance:
        for round_number in range(task.table.rounds):
            if round_number and stopwatch.seconds * (round_number + 1) / round_number > task.seconds:
                # The next round would not end in time, and half a round is no comparison.
                break
            for method, tokens in order(to_write, round_number):
                key = method.name, tokens
                seconds_left = None if round_number else _seconds_left(task, method, stopwatch.seconds)
                if seconds_left is not None and seconds_left < 0:
                    failures[key] = "not reached in time"
                if key not in failures:
                    recording = await _recording_or_reason(
                        writer, method, task.question(round_number), tokens, seconds_left
                    )
                    if isinstance(recording, str):
                        failures[key] = recording
                    else:
                        answers[key].append(recording)
                advance()
    return {key: recording for key, recording in answers.items() if key not in failures}, failures


def _seconds_left(task: TableRun, method: Method, seconds_passed: float) -> float | None:
    """Return the seconds left for an answer, negative if the time is over; None if unlimited.

    The baseline is not limited, since without it there is nothing to compare with.

    task: Methods, models and questions of the run, with the limit in seconds.
    method: The method that is next.
    seconds_passed: Seconds since the first answer began.
    """
    return None if method.name == PLAIN or task.seconds == math.inf else task.seconds - seconds_passed


async def _recording_or_reason(
    writer: MethodWriter, method: Method, question: str, tokens: int, seconds: float | None
) -> Recording | str:
    """Return an answer, or why there is none.

    The reason is "not finished in time" after the limit, else "cannot write: " and the error.

    writer: Answers a question with a method.
    method: The method that writes.
    question: The question as plain text.
    tokens: Number of tokens of the answer.
    seconds: Seconds that the answer may take; None: no limit.
    Raises SpecsotError if the baseline fails.
    """
    try:
        return await writer.write(method, question, tokens, seconds)
    except TimeoutError:
        return "not finished in time"
    except SpecsotError as error:
        if method.name == PLAIN:
            raise
        return f"cannot write: {error}"


def _lengths_to_write(method: Method, lengths: Sequence[int], names_left_out: set[object]) -> Sequence[int]:
    """Return the lengths that are written: each length of a planned method, since its branches share it; of
    other methods the longest alone, of which shorter answers are prefixes. Without a length that is measured,
    the result is empty.

    method: The method that writes.
    lengths: Numbers of tokens at which the method is measured, ascending.
    names_left_out: Names of rows that are not measured.
    """
    remaining = [tokens for tokens in lengths if name_of(method, tokens) not in names_left_out]
    return remaining if method.planned else remaining[-1:]


async def _warm_up(task: TableRun, runners: Runners) -> dict[str, str]:
    """Load every method and let it write once; return why methods cannot write, by their names.

    A method that lacks a model is not tried. A method that can write has no entry.

    task: Methods, models and questions of the run.
    runners: Opens fleets and answers questions.
    Raises ModelError if the baseline cannot write.
    """
    failed: dict[str, str] = {}
    with counting_bar(sys.stderr, "loading", len(task.table.methods)) as advance:
        for method in task.table.methods:
            reason = task.models.lacks(method)
            try:
                if reason is None:
                    await runners.write(method, task.question(task.table.rounds), WARM_UP_TOKENS)
            except SpecsotError as error:
                reason = f"cannot write: {error}"
            if reason:
                failed[method.name] = reason
            advance()
    if PLAIN in failed:
        raise ModelError(f"plain decoding {failed[PLAIN]}")
    return failed


def _left_out(task: TableRun, runners: Runners, method: Method, failures: dict[str, str]) -> list[Row]:
    """Return the rows of a method that cannot be measured, one for each length.

    A failure takes precedence over a length that is too long. A method that can be measured gives no rows.

    task: Methods, models and questions of the run.
    runners: Answers questions, and has the model's context.
    method: The method.
    failures: Reasons why methods cannot write, by name of the method.
    """
    rows: list[Row] = []
    for tokens in task.table.lengths_of(method):
        reason = failures.get(method.name) or _why_too_long(task, runners, tokens)
        if reason:
            rows.append(skipped(method, tokens, reason))
    return rows


def _why_too_long(task: TableRun, runners: Runners, tokens: int) -> str | None:
    """Return why a length is too long for the model's context; None if it fits.

    A window could write more, but there would be no baseline to compare it with.

    Needed are the longest prompt of all rounds, the answer, and DRAFT_POSITIONS.

    task: Methods, models and questions of the run.
    runners: Answers questions, and has the model's context.
    tokens: Number of tokens of each answer.
    """
    prompt = max(len(runners.prompt(task.question(number))) for number in range(task.table.rounds))
    needed = prompt + tokens + DRAFT_POSITIONS
    positions = runners.config.max_positions
    return (
        f"plain decoding needs {needed} positions, the model has {positions}" if needed > positions else None
    )


def _rows(task: TableRun, answers: Answers, scores: Scores) -> list[Row]:
    """Return the measured rows, by length, then in the methods' order.

    A bar on stderr counts the rows.

    task: Methods, models and questions of the run.
    answers: Answers by the method's name and requested length.
    scores: Computes perplexities.
    """
    runs = runs_of(answers, task.table)
    with counting_bar(sys.stderr, "perplexity", len(runs)) as advance:
        rows: list[Row] = []
        for run in runs:
            rows.append(row_of(run, baseline_of(runs, run.tokens), scores.quality(run)))
            advance()
    return rows


def _settings(task: TableRun, runners: Runners) -> Row:
    """Return the settings of the run, by name, as they are written to the results. Models that are not used
    are None.

    task: Methods, models and questions of the run.
    runners: Answers questions, and has the model's data type.
    """
    models = task.models
    return {
        "model": "demo" if is_small(models.base) else models.base.name,
        "draft_model": models.head.name if models.head else None,
        "small_model": models.small.name if models.small else None,
        "dtype": runners.dtype,
        "quantization": models.quantization,
        "kv_cache_dtype": models.kv_cache_dtype,
        "draft_dtype": models.draft_dtype,
        "draft_quantization": models.draft_quantization,
        "device": torch.cuda.get_device_name(models.device) if "cuda" in models.device else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": task.table.rounds,
        "lengths": list(task.table.lengths),
        "page_rows": PAGE_ROWS,
        "questions": [task.question(number) for number in range(task.table.rounds)],
    }


def publish(table_run: TableRun, name: str, output: Path | None = None) -> int:
    """Measure, show and save; return the exit status 0.

    The page is printed; see `results.publish`. With `output`, an existing file is replaced.

    table_run: Methods, models and questions of the run.
    name: Name of the benchmark, "quick" or "full".
    output: Path of the JSON file; Markdown, LaTeX and plots get the same name with other endings. None:
        nothing is saved.
    """
    settings, rows = measure(table_run)
    title = f"specsot bench {name}, {settings['model']}"
    page = page_of(title, _description(name, settings), rows, recommend(rows))
    results.publish(name, settings, rows, page, output, lambda stem: draw(rows, title, stem))
    if output is not None:
        output.with_suffix(".tex").write_text(latex_of(title, rows), encoding="utf-8")
    return 0


def _description(name: str, settings: Row) -> str:
    """Return the paragraph that says what was measured on which machine.

    name: Name of the benchmark.
    settings: Settings of the run.
    """
    machine = results.describe_machine()
    return (
        f"`specsot bench {name}`: {settings['model']}, {precision_of(settings)}, {settings['device']}"
        f" ({machine['cores']} cores, {machine['processor']}), rounds: {settings['rounds']}, greedy,"
        " end-of-sequence tokens ignored by all."
        f" Load average at the end: {os.getloadavg()[0]:.1f}; figures are comparable within this run alone."
    )


def precision_of(settings: Row) -> str:
    """Return the precision in words, as far as it differs from the default.

    The parts are the data type, the quantization, "int8 KV" and the drafter's precision, separated by
    commas; what is not set is left out.

    settings: Settings of a run by name.
    """
    kv_format = {"auto": None, "int8": "int8 KV"}.get(str(settings.get("kv_cache_dtype")))
    drafts = settings.get("draft_quantization") or settings.get("draft_dtype")
    parts = settings["dtype"], settings.get("quantization"), kv_format, drafts and f"drafts {drafts}"
    return ", ".join(str(part) for part in parts if part)
