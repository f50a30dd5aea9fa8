"""`specsot train`: from a model's directory and files of text to a head's directory.

It brings together those who do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.progress import Progress
from torch import nn

from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.resolving import resolve_model
from specsot.errors import InvalidRequest, ModelError
from specsot.params import require_field
from specsot_app.terminal.show import bars
from specsot_lab.train import rows as stock
from specsot_lab.train.answers import Watch, Writer, answer_all
from specsot_lab.train.block import LAYERS, BlockLearning, LearningBlockHead, block_format, write_block_head
from specsot_lab.train.head import (
    HeadFormat,
    LearningHead,
    copy_weights,
    initialise,
    initialise_small,
    new_format,
    read_head,
    widened_format,
    write_head,
)
from specsot_lab.train.rows import Row
from specsot_lab.train.settings import VOCABULARY, TrainOptions
from specsot_lab.train.text_files import ROWS_KIND, files_in, read_questions, rows_of
from specsot_lab.train.trainer import Measured, Trainer
from specsot_lab.train.unrolling import Teacher, Unrolling
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.layers import Norm
from specsot_model.linear import resolve_dtype

# Name of the file with a run's rows.
ROWS = "rows.npz"


def stored_rows_of(options: TrainOptions) -> list[Row] | None:
    """Return the rows in the run's folder; None if there are none.

    options: of the run. Raises ModelError if the rows were made of other questions, texts or another base
        than given.
    """
    path = options.training / ROWS
    if not path.exists():
        return None
    if objection := _why_not_reusable(stock.made_of(path), options):
        raise ModelError(f"{path} {objection}; name another --output, or remove it")
    return stock.load(path)


def make_rows(options: TrainOptions, decoder: Decoder, report_progress: Watch) -> list[Row]:
    """Return rows of the questions and texts that are given, and store them in the run's folder.

    options: of the run. decoder: the base, which answers the questions. report_progress: called for each kind
        of answer.
    Raises InvalidRequest if no questions and no texts are given.
    """
    made = _sources_of(options)  # first: a file may change while the base answers
    text = Text(options.model)
    questions = [
        question for path in _files(options.questions) for question in read_questions(path, options.phrasings)
    ]
    rows: list[Row] = []
    if questions:
        writer = Writer(decoder, text.end_ids, options.asking.together)
        rows += answer_all(
            questions, Prompts(options.model, text), text, writer, options.asking, report_progress
        )
    for path in _files(options.data):
        _check_rows_file(path, made["model"])
        rows += rows_of(path, text, options.learning.length, 1 + max((row.group for row in rows), default=-1))
    if not rows:
        raise InvalidRequest("nothing to learn from: give --questions or --data", field="questions")
    stock.save(rows, options.training / ROWS, made)
    return rows


def _check_rows_file(path: Path, model: str) -> None:
    """Raise ModelError for stored rows that another base wrote: their token ids mean something else."""
    if path.suffix != ROWS_KIND:
        return
    made = stock.made_of(path)
    if made is None or made.get("model") != model:
        raise ModelError(f"{path} holds token ids of another base model; write it anew with this one")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _why_not_reusable(made: dict[str, Any] | None, options: TrainOptions) -> str | None:
    """Return why stored rows cannot be used; None if they can. Without --questions and --data only the base
    counts.

    made: what the rows were made of; None: unknown. options: of the run.
    """
    given = _sources_of(options)
    checks_sources = bool(options.questions or options.data)
    if made is None:
        return "does not say what it was made of" if checks_sources else None
    names = sorted(given.keys() | made.keys()) if checks_sources else ["model"]
    differing = [f"--{name}" for name in names if given.get(name) != made.get(name)]
    return f"was made with other {', '.join(differing)}" if differing else None


def _sources_of(options: TrainOptions) -> dict[str, Any]:
    """Return what rows are made of, by the names of the flags. --together is left out, since it changes only
    the speed.
    """
    made: dict[str, Any] = {"model": fingerprint(options.model)}
    if options.questions:
        made |= {
            "questions": _digests(options.questions),
            "phrasing": list(options.phrasings),
            "direct": options.asking.direct,
            "plan-tokens": options.asking.plan_tokens,
            "answer-tokens": options.asking.answer_tokens,
        }
    if options.data:
        made |= {"data": _digests(options.data), "length": options.learning.length}
    return made


def _digests(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of every file that the paths name."""
    return [digest_of(path) for path in _files(paths)]


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return the files that the paths name; a folder names all its readable files."""
    return [file for path in paths for file in files_in(path)]


def train(options: TrainOptions, out: TextIO, err: TextIO) -> int:
    """Train a head, or with no steps measure the head to start from; write the result as text, and return the
    exit status 0.

    options: of the run. out: gets the result. err: shows progress.
    """
    will_continue = options.start is None or options.plan.kind == "eagle3"
    require_field(will_continue, "start", "left out for a head of another kind than EAGLE-3", options.start)
    options = replace(options, model=resolve_model(options.model))
    stored_rows = stored_rows_of(options)  # first: what cannot be need not wait for the base
    with bars(err) as progress:
        dtype = resolve_dtype(options.dtype, options.device)
        decoder = Decoder.load(options.model, None, dtype, options.device)
        all_rows = stored_rows or make_rows(options, decoder, _watch(progress))
        rows = list(stock.useful(all_rows, options.learning.length))
        training_rows, measured_rows = stock.split(rows, options.learning.held_out, options.learning.seed)
        learner = (_block_learner if options.plan.kind == "dflash" else _eagle_learner)(
            options, decoder, training_rows
        )
        result = _run(options, decoder, learner, training_rows, measured_rows, progress)
    out.write(_report_text(options, result, training_rows, measured_rows))
    return 0


def _watch(progress: Progress) -> Watch:
    """Return a function that shows a progress bar for each kind of answer."""

    def watch(kind: str, done: int, total: int) -> Callable[[int], object]:
        """Show a bar, and return a function that advances it by a number. kind: its label. done: where it
        begins. total: where it ends.
        """
        task = progress.add_task(kind, completed=done, total=total)
        return lambda count: progress.advance(task, count)

    return watch


@dataclass(frozen=True, slots=True)
class _Learner:
    """Who learns: its weights, their lessons, how they are written, and what makes a run of it this one."""

    head: nn.Module
    training_batches: Unrolling | BlockLearning
    publish: Callable[[], object]
    frame: dict[str, Any]


def _eagle_learner(options: TrainOptions, decoder: Decoder, rows: list[Row]) -> _Learner:
    """Return an EAGLE-3 or P-EAGLE head that learns. options: of the run. decoder: the base. rows: decide on
    a new vocabulary.
    """
    head_format, head = _head(options, decoder, rows)
    draft_ids = head_format.drafted.to(decoder.device)
    mixed_precision = decoder.dtype != torch.float32
    teacher = Teacher(decoder, head_format.taps)
    training_batches = Unrolling(
        head.to(decoder.device), teacher, draft_ids, options.learning.depth, mixed_precision
    )
    publish = partial(write_head, options.output, head, head_format, decoder.config, decoder.dtype)
    mask_fields = {} if head_format.mask is None else {"layers": head_format.layers, "mask": head_format.mask}
    return _Learner(
        head,
        training_batches,
        publish,
        {"sizes": asdict(head_format.sizes), "taps": list(head_format.taps), **mask_fields},
    )


def _block_learner(options: TrainOptions, decoder: Decoder, rows: list[Row]) -> _Learner:
    """Return a DFlash head that learns. Its mask is the id that is rarest in the rows it learns from.

    options: of the run. decoder: the base. rows: to learn from.
    """
    base = decoder.config
    mask = _rarest_id(rows, base.vocab)
    head_format = block_format(base, options.plan, options.learning.depth, mask)
    head = LearningBlockHead(head_format)
    lm_head, norm = _base_weights(decoder, torch.arange(base.vocab))
    initialise_small(head, head.norm, norm, options.learning.seed)
    mixed_precision = decoder.dtype != torch.float32
    teacher = Teacher(decoder, head_format.taps)
    training_batches = BlockLearning(
        head.to(decoder.device), teacher, lm_head.to(decoder.device), mixed_precision
    )
    publish = partial(write_block_head, options.output, head, base, decoder.dtype)
    return _Learner(head, training_batches, publish, {"block": asdict(head_format)})


def _rarest_id(rows: list[Row], vocab_size: int) -> int:
    """Return the token id that is guessed least in the rows; the lowest of several."""
    return int(stock.frequencies(rows, vocab_size).argmin())


def _head(options: TrainOptions, decoder: Decoder, rows: list[Row]) -> tuple[HeadFormat, LearningHead]:
    """Return the format and the weights of a new head, or of one to continue from: with another vocabulary or
    a wider MLP, if that is asked for.

    options: of the run. decoder: the base. rows: to learn from.
    """
    base = decoder.config
    plan = options.plan
    start_head = read_head(options.start, base) if options.start is not None else None
    if start_head is not None and plan.vocabulary is None:
        draft_ids = start_head[0].drafted
    else:
        counts = stock.frequencies(rows, base.vocab)
        draft_ids = torch.from_numpy(stock.most_frequent(counts, plan.vocabulary or VOCABULARY))
    head_format = (
        new_format(base, draft_ids, plan)
        if start_head is None
        else widened_format(start_head[0], draft_ids, plan)
    )
    if plan.kind == "p-eagle":
        mask = _rarest_id(rows, base.vocab)
        depth = options.learning.depth
        head_format = replace(head_format, layers=plan.layers or LAYERS, mask=mask, depth=depth)
    head = LearningHead(head_format.sizes, head_format.layers, head_format.mask)
    initialise(head, *_base_weights(decoder, draft_ids), options.learning.seed)
    if start_head is not None:
        copy_weights(
            head,
            start_head[1],
            torch.isin(draft_ids, start_head[0].drafted),
            torch.isin(start_head[0].drafted, draft_ids),
        )
    return head_format, head


@torch.inference_mode()
def _base_weights(decoder: Decoder, draft_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the base's lm_head rows [draft_vocab_size, hidden] of the draft ids, and its last norm's weight,
    or None if that norm is of another kind.
    """
    rows = decoder.edges.lm_head_rows(draft_ids.to(decoder.device))
    norm = decoder.edges.final_norm()
    return rows.cpu(), norm.weight.cpu() if isinstance(norm, Norm) else None


def _run(
    options: TrainOptions,
    decoder: Decoder,
    learner: _Learner,
    training_rows: list[Row],
    measured_rows: list[Row],
    progress: Progress,
) -> Measured:
    """Train, or measure with no steps; return the last measurement.

    options: of the run. decoder: the base. learner: the head. training_rows: to train on. measured_rows: to
        measure on. progress: shows a bar.
    """
    learning = options.learning
    trainer = Trainer(learner.training_batches, learner.head, learning, decoder.device)
    if learning.steps == 0:
        return Measured(0, None, 0.0, trainer.measure(measured_rows))
    task = progress.add_task("training", total=learning.steps)

    def on_progress(step: int, measurement: Measured | None) -> None:
        """Advance the bar to this step; after a measurement, show the acceptance."""
        description = (
            f"training: {measurement.acceptance.per_step:.3f} accepted a step" if measurement else None
        )
        progress.update(task, completed=step, description=description)

    run_identity = _run_identity(options) | learner.frame
    return trainer.train(
        training_rows, measured_rows, options.training, run_identity, on_progress, learner.publish
    )


def _run_identity(options: TrainOptions) -> dict[str, Any]:
    """Return what makes a run this one beside the head's format: settings, the base, and the very rows."""
    return {
        "base": fingerprint(options.model),
        "learning": asdict(options.learning),
        "start": str(options.start) if options.start else None,
        "dtype": options.dtype,
        "rows": digest_of(options.training / ROWS),
    }


def _report_text(
    options: TrainOptions, result: Measured, training_rows: list[Row], measured_rows: list[Row]
) -> str:
    """Return the result as text: where the head is, how many rows there were, and the acceptance."""
    acceptance = result.acceptance
    drafts = " ".join(f"{share:.2f}" for share in acceptance.by_depth)
    tokens = sum(int(row.learned.sum()) for row in training_rows)
    head_line = f"head: {options.output}\n" if options.learning.steps else ""
    return (
        f"{head_line}rows: {len(training_rows)} to learn from ({tokens} tokens to guess), "
        f"{len(measured_rows)} held out\n"
        f"held out, greedy chains of {len(acceptance.by_depth)}: {acceptance.per_step:.3f} accepted a step, "
        f"{acceptance.tokens_per_step:.2f} tokens a step; by depth {drafts}\n"
    )
