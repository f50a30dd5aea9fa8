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
    begin,
    begin_small,
    frame_like,
    frame_new,
    read_head,
    take,
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

ROWS = "rows.npz"


def kept_rows(wanted: TrainOptions) -> list[Row] | None:
    """Those in the run's folder; None: there are none. Raises ModelError: they are of other than is given."""
    path = wanted.training / ROWS
    if not path.exists():
        return None
    if found := _objection(stock.made_of(path), wanted):
        raise ModelError(f"{path} {found}; name another --output, or remove it")
    return stock.load(path)


def make_rows(wanted: TrainOptions, decoder: Decoder, watch: Watch) -> list[Row]:
    """Of the questions and texts that are given. Raises InvalidRequest: there are none."""
    made = _making(wanted)  # first: a file may change while the base answers
    text = Text(wanted.model)
    questions = [
        question for path in _files(wanted.questions) for question in read_questions(path, wanted.phrasings)
    ]
    rows: list[Row] = []
    if questions:
        writer = Writer(decoder, text.end_ids, wanted.asking.together)
        rows += answer_all(questions, Prompts(wanted.model, text), text, writer, wanted.asking, watch)
    for path in _files(wanted.data):
        _check_rows_file(path, made["model"])
        rows += rows_of(path, text, wanted.learning.length, 1 + max((row.group for row in rows), default=-1))
    if not rows:
        raise InvalidRequest("nothing to learn from: give --questions or --data", field="questions")
    stock.save(rows, wanted.training / ROWS, made)
    return rows


def _check_rows_file(path: Path, model: str) -> None:
    """Raise ModelError for stored rows that another base wrote: their token ids mean something else."""
    if path.suffix != ROWS_KIND:
        return
    made = stock.made_of(path)
    if made is None or made.get("model") != model:
        raise ModelError(f"{path} holds token ids of another base model; write it anew with this one")


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _objection(made: dict[str, Any] | None, wanted: TrainOptions) -> str | None:
    """What speaks against kept rows; None: nothing. Without --questions and --data only the base counts."""
    given = _making(wanted)
    again = bool(wanted.questions or wanted.data)
    if made is None:
        return "does not say what it was made of" if again else None
    names = sorted(given.keys() | made.keys()) if again else ["model"]
    differing = [f"--{name}" for name in names if given.get(name) != made.get(name)]
    return f"was made with other {', '.join(differing)}" if differing else None


def _making(wanted: TrainOptions) -> dict[str, Any]:
    """What rows are made of, by the names of the flags. --together says only how fast."""
    made: dict[str, Any] = {"model": fingerprint(wanted.model)}
    if wanted.questions:
        made |= {
            "questions": _digests(wanted.questions),
            "phrasing": list(wanted.phrasings),
            "direct": wanted.asking.direct,
            "plan-tokens": wanted.asking.plan_tokens,
            "answer-tokens": wanted.asking.answer_tokens,
        }
    if wanted.data:
        made |= {"data": _digests(wanted.data), "length": wanted.learning.length}
    return made


def _digests(paths: Sequence[Path]) -> list[str]:
    return [digest_of(path) for path in _files(paths)]


def _files(paths: Sequence[Path]) -> list[Path]:
    return [one for path in paths for one in files_in(path)]


def train(wanted: TrainOptions, out: TextIO, err: TextIO) -> int:
    """Train, or with no steps measure the head to start from; tell what came of it."""
    will_continue = wanted.start is None or wanted.plan.kind == "eagle3"
    require_field(will_continue, "start", "left out for a head of another kind than EAGLE-3", wanted.start)
    wanted = replace(wanted, model=resolve_model(wanted.model))
    kept = kept_rows(wanted)  # first: what cannot be need not wait for the base
    with bars(err) as progress:
        number = resolve_dtype(wanted.dtype, wanted.device)
        decoder = Decoder.load(wanted.model, None, number, wanted.device)
        made = kept or make_rows(wanted, decoder, _watch(progress))
        rows = list(stock.useful(made, wanted.learning.length))
        learnt, measured = stock.split(rows, wanted.learning.held_out, wanted.learning.seed)
        pupil = (_block_pupil if wanted.plan.kind == "dflash" else _eagle_pupil)(wanted, decoder, learnt)
        found = _run(wanted, decoder, pupil, learnt, measured, progress)
    out.write(_told(wanted, found, learnt, measured))
    return 0


def _watch(progress: Progress) -> Watch:
    def watch(what: str, done: int, total: int) -> Callable[[int], object]:
        task = progress.add_task(what, completed=done, total=total)
        return lambda more: progress.advance(task, more)

    return watch


@dataclass(frozen=True, slots=True)
class _Pupil:
    """Who learns: its weights, their lessons, how they are written, and what makes a run of it this one."""

    head: nn.Module
    training_batches: Unrolling | BlockLearning
    publish: Callable[[], object]
    frame: dict[str, Any]


def _eagle_pupil(wanted: TrainOptions, decoder: Decoder, rows: list[Row]) -> _Pupil:
    frame, head = _head(wanted, decoder, rows)
    drafted = frame.drafted.to(decoder.device)
    mixed = decoder.dtype != torch.float32
    teacher = Teacher(decoder, frame.taps)
    training_batches = Unrolling(head.to(decoder.device), teacher, drafted, wanted.learning.depth, mixed)
    publish = partial(write_head, wanted.output, head, frame, decoder.config, decoder.dtype)
    masked = {} if frame.mask is None else {"layers": frame.layers, "mask": frame.mask}
    return _Pupil(
        head, training_batches, publish, {"sizes": asdict(frame.sizes), "taps": list(frame.taps), **masked}
    )


def _block_pupil(wanted: TrainOptions, decoder: Decoder, rows: list[Row]) -> _Pupil:
    """Its mask is the id that is rarest in what it learns from."""
    base = decoder.config
    mask = _rarest(rows, base.vocab)
    frame = block_format(base, wanted.plan, wanted.learning.depth, mask)
    head = LearningBlockHead(frame)
    lm_head, norm = _lent(decoder, torch.arange(base.vocab))
    begin_small(head, head.norm, norm, wanted.learning.seed)
    mixed = decoder.dtype != torch.float32
    teacher = Teacher(decoder, frame.taps)
    training_batches = BlockLearning(head.to(decoder.device), teacher, lm_head.to(decoder.device), mixed)
    publish = partial(write_block_head, wanted.output, head, base, decoder.dtype)
    return _Pupil(head, training_batches, publish, {"block": asdict(frame)})


def _rarest(rows: list[Row], vocabulary: int) -> int:
    return int(stock.frequencies(rows, vocabulary).argmin())


def _head(wanted: TrainOptions, decoder: Decoder, rows: list[Row]) -> tuple[HeadFormat, LearningHead]:
    """A new head, or one to go on from: with another vocabulary or a wider MLP, if that is wanted."""
    base = decoder.config
    plan = wanted.plan
    found = read_head(wanted.start, base) if wanted.start is not None else None
    if found is not None and plan.vocabulary is None:
        drafted = found[0].drafted
    else:
        counts = stock.frequencies(rows, base.vocab)
        drafted = torch.from_numpy(stock.most_frequent(counts, plan.vocabulary or VOCABULARY))
    frame = frame_new(base, drafted, plan) if found is None else frame_like(found[0], drafted, plan)
    if plan.kind == "p-eagle":
        mask = _rarest(rows, base.vocab)
        depth = wanted.learning.depth
        frame = replace(frame, layers=plan.layers or LAYERS, mask=mask, depth=depth)
    head = LearningHead(frame.sizes, frame.layers, frame.mask)
    begin(head, *_lent(decoder, drafted), wanted.learning.seed)
    if found is not None:
        take(head, found[1], torch.isin(drafted, found[0].drafted), torch.isin(found[0].drafted, drafted))
    return frame, head


@torch.inference_mode()
def _lent(decoder: Decoder, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The base's lm_head rows [draft vocabulary, hidden] of the draft ids, and its last norm's weight."""
    rows = decoder.edges.lm_head_rows(drafted.to(decoder.device))
    norm = decoder.edges.final_norm()
    return rows.cpu(), norm.weight.cpu() if isinstance(norm, Norm) else None


def _run(
    wanted: TrainOptions,
    decoder: Decoder,
    pupil: _Pupil,
    learnt: list[Row],
    measured: list[Row],
    progress: Progress,
) -> Measured:
    learning = wanted.learning
    trainer = Trainer(pupil.training_batches, pupil.head, learning, decoder.device)
    if learning.steps == 0:
        return Measured(0, None, 0.0, trainer.measure(measured))
    task = progress.add_task("training", total=learning.steps)

    def told(step: int, found: Measured | None) -> None:
        said = f"training: {found.acceptance.per_step:.3f} accepted a step" if found else None
        progress.update(task, completed=step, description=said)

    asked = _asked(wanted) | pupil.frame
    return trainer.train(learnt, measured, wanted.training, asked, told, pupil.publish)


def _asked(wanted: TrainOptions) -> dict[str, Any]:
    """What makes a run this one beside the head's frame: settings, the base, and the very rows."""
    return {
        "base": fingerprint(wanted.model),
        "learning": asdict(wanted.learning),
        "start": str(wanted.start) if wanted.start else None,
        "dtype": wanted.dtype,
        "rows": digest_of(wanted.training / ROWS),
    }


def _told(wanted: TrainOptions, found: Measured, learnt: list[Row], measured: list[Row]) -> str:
    of = found.acceptance
    drafts = " ".join(f"{share:.2f}" for share in of.by_depth)
    tokens = sum(int(row.learned.sum()) for row in learnt)
    where = f"head: {wanted.output}\n" if wanted.learning.steps else ""
    return (
        f"{where}rows: {len(learnt)} to learn from ({tokens} tokens to guess), {len(measured)} held out\n"
        f"held out, greedy chains of {len(of.by_depth)}: {of.per_step:.3f} accepted a step, "
        f"{of.tokens_per_step:.2f} tokens a step; by depth {drafts}\n"
    )
