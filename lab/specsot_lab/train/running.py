"""`specsot train`: from the directory of a model and files of text to the directory of a head.

It connects the parts that read, answer, train and write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
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
from specsot_lab.train import rows as row_files
from specsot_lab.train.answers import ReportProgress, Writer, answer_all
from specsot_lab.train.block import (
    DEFAULT_LAYERS,
    BlockLearning,
    LearningBlockHead,
    block_format,
    write_block_head,
)
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
from specsot_lab.train.mtp import LearningMtp, check_trainable, initialise_mtp, write_mtp
from specsot_lab.train.rows import Row
from specsot_lab.train.settings import VOCABULARY, HeadPlan, TrainOptions
from specsot_lab.train.text_files import ROWS_SUFFIX, files_in, read_questions, rows_of
from specsot_lab.train.trainer import Trainer, TrainingMeasurement
from specsot_lab.train.unrolling import Teacher, Unrolling
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.layers import Norm
from specsot_model.linear import resolve_dtype
from specsot_model.published import open_weights

# Name of the file with the rows of a run.
ROWS_FILE = "rows.npz"


def stored_rows_of(options: TrainOptions) -> list[Row] | None:
    """Return the rows in the run's folder; None if there are none.

    options: Options of the run.
    Raises ModelError if the rows were made of other questions or texts, or with another base model, or if the
    file is damaged.

    What makes rows unusable is described at `_why_not_reusable`; the error advises another --output, or
    removing the file.
    """
    path = options.training / ROWS_FILE
    if not path.exists():
        return None
    if objection := _why_not_reusable(row_files.read_sources(path), options):
        raise ModelError(f"{path} {objection}; name another --output, or remove it")
    return row_files.load(path)


def make_rows(options: TrainOptions, decoder: Decoder, report_progress: ReportProgress) -> list[Row]:
    """Return rows of the questions and texts that the options name, and store them in the run's folder.

    options: Options of the run.
    decoder: The base model, which answers the questions.
    report_progress: Called once for each kind of answers.
    Raises InvalidRequest if neither questions nor texts are named, ModelError for a file that cannot be read
    or rows of another base model.

    InvalidRequest is also raised if the files yield no row, or if a path names no readable file. Each file of
    `options.data` gets groups of its own, counted on from the highest group of the rows before. The folder's
    existing rows file is replaced.
    """
    # The digests are computed first, because a file may change while the base model answers.
    sources = _sources_of(options)
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
        _check_rows_file(path, sources["model"])
        rows += rows_of(path, text, options.learning.length, 1 + max((row.group for row in rows), default=-1))
    if not rows:
        raise InvalidRequest("nothing to learn from: give --questions or --data", field="questions")
    row_files.save(rows, options.training / ROWS_FILE, sources)
    return rows


def _check_rows_file(path: Path, model: str) -> None:
    """Raise ModelError if a file has rows that another base model wrote, whose token ids mean something else.
    Return if it is not a file of rows.

    path: A file of texts, conversations or rows.
    model: Fingerprint of the base model.

    Raises it also if the file does not say which base model wrote it. A file of rows is recognised by its
    suffix ROWS_SUFFIX.
    """
    if path.suffix != ROWS_SUFFIX:
        return
    sources = row_files.read_sources(path)
    if sources is None or sources.get("model") != model:
        raise ModelError(f"{path} holds token ids of another base model; write it again with this one")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    path: The file.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _why_not_reusable(stored_sources: dict[str, Any] | None, options: TrainOptions) -> str | None:
    """Return why stored rows cannot be used, as the end of an error message; None if they can be used.
    Without --questions and --data, only the base model is compared.

    stored_sources: What the rows were made of. None: unknown, which is accepted without --questions and
        --data.
    options: Options of the run.

    Unknown sources with --questions or --data give "does not say what it was made of". A difference gives
    "was made with other --x, --y", with the names of all flags that differ, sorted; a flag that only one side
    has counts as a difference.
    """
    given_sources = _sources_of(options)
    checks_sources = bool(options.questions or options.data)
    if stored_sources is None:
        return "does not say what it was made of" if checks_sources else None
    names = sorted(given_sources.keys() | stored_sources.keys()) if checks_sources else ["model"]
    differing = [f"--{name}" for name in names if given_sources.get(name) != stored_sources.get(name)]
    return f"was made with other {', '.join(differing)}" if differing else None


def _sources_of(options: TrainOptions) -> dict[str, Any]:
    """Return what rows are made of, by the names of the flags. --together is left out, because it changes
    only the speed.

    options: Options of the run.

    "model" is always there. "questions", "phrasing", "direct", "plan-tokens" and "answer-tokens" are there
    only with questions, "data" and "length" only with data. Files are represented by their SHA-256, so that
    renaming a file changes nothing. Raises InvalidRequest if a path names no readable file.
    """
    sources: dict[str, Any] = {"model": fingerprint(options.model)}
    if options.questions:
        sources |= {
            "questions": _digests(options.questions),
            "phrasing": list(options.phrasings),
            "direct": options.asking.direct,
            "plan-tokens": options.asking.plan_tokens,
            "answer-tokens": options.asking.answer_tokens,
        }
    if options.data:
        sources |= {"data": _digests(options.data), "length": options.learning.length}
    return sources


def _digests(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of every file that the paths name, in order.

    paths: Files and folders.
    """
    return [digest_of(path) for path in _files(paths)]


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return the files that the paths name, in order. A folder names all of its readable files.

    paths: Files and folders.
    Raises InvalidRequest if a path does not exist, or names no readable file.
    """
    return [file for path in paths for file in files_in(path)]


def train(options: TrainOptions, out: TextIO, err: TextIO) -> int:
    """Train a head, or with 0 steps measure the head to start from. Write the result as text, and return the
    exit status 0.

    options: Options of the run.
    out: Gets the result.
    err: Gets progress bars.
    Raises InvalidRequest for options that cannot be combined, ModelError for a model, file or checkpoint that
    cannot be used, HeadMismatch for a head that cannot be continued from.

    InvalidRequest is raised for a `start` with another kind of head than "eagle3". Rows in the run's folder
    are used again if they fit. Rows without any token to learn within the length are left out, and some are
    held out by group. The head is written to `options.output`, unless the run has 0 steps.
    """
    will_continue = options.start is None or options.plan.kind == "eagle3"
    require_field(will_continue, "start", "left out for a head of another kind than EAGLE-3", options.start)
    options = replace(options, model=resolve_model(options.model))
    # Rows that cannot be used are reported before the base model is loaded, which takes long.
    stored_rows = stored_rows_of(options)
    with bars(err) as progress:
        dtype = resolve_dtype(options.dtype, options.device)
        decoder = Decoder.load(options.model, None, dtype, options.device)
        all_rows = stored_rows or make_rows(options, decoder, _progress_bars(progress))
        rows = list(row_files.useful_rows(all_rows, options.learning.length))
        training_rows, held_out_rows = row_files.split(rows, options.learning.held_out, options.learning.seed)
        learner = LEARNERS[options.plan.kind](options, decoder, training_rows)
        result = _train_or_measure(options, decoder, learner, training_rows, held_out_rows, progress)
    out.write(_report_text(options, result, training_rows, held_out_rows))
    return 0


def _progress_bars(progress: Progress) -> ReportProgress:
    """Return a function that starts a progress bar for each kind of answers.

    progress: Shows the bars.

    The function gets the kind of answers, the number that is done already and the total; it returns a
    function that advances the bar by a number of answers.
    """

    def watch(kind: str, done: int, total: int) -> Callable[[int], object]:
        """Start a bar, and return a function that advances it by a number of answers.

        kind: Label of the bar.
        done: Number at which the bar begins.
        total: Number at which the bar ends.
        """
        task = progress.add_task(kind, completed=done, total=total)
        return lambda count: progress.advance(task, count)

    return watch


@dataclass(frozen=True, slots=True)
class _Learner:
    """A head in training, and what belongs to it.

    head: The head, whose weights are trained.
    objective: Computes losses and greedy drafts of the head.
    publish: Writes the head to the run's output.
    identity: Format of the head, which is part of the run's identity: a checkpoint of another format is
        refused.
    """

    head: nn.Module
    objective: Unrolling | BlockLearning
    publish: Callable[[], object]
    identity: dict[str, Any]


def _eagle_learner(options: TrainOptions, decoder: Decoder, rows: list[Row]) -> _Learner:
    """Return an EAGLE-3 or P-EAGLE head in training.

    options: Options of the run.
    decoder: The base model.
    rows: Rows to learn from, by which the vocabulary of a new head is chosen.

    The head is trained in mixed precision unless the base model is in fp32. Its identity has sizes and taps,
    and for P-EAGLE also layers and mask. Raises what `_eagle_head` raises.
    """
    head_format, head = _eagle_head(options, decoder, rows)
    draft_ids = head_format.draft_ids.to(decoder.device)
    mixed_precision = decoder.dtype != torch.float32
    teacher = Teacher(decoder, head_format.taps)
    objective = Unrolling(
        head.to(decoder.device), teacher, draft_ids, options.learning.depth, mixed_precision
    )
    publish = partial(write_head, options.output, head, head_format, decoder.config, decoder.dtype)
    mask_fields = {} if head_format.mask is None else {"layers": head_format.layers, "mask": head_format.mask}
    return _Learner(
        head,
        objective,
        publish,
        {"sizes": asdict(head_format.sizes), "taps": list(head_format.taps), **mask_fields},
    )


def _block_learner(options: TrainOptions, decoder: Decoder, rows: list[Row]) -> _Learner:
    """Return a DFlash or DSpark head in training. Its mask is the token id that is rarest in the rows.

    options: Options of the run.
    decoder: The base model.
    rows: Rows to learn from.

    The head is trained in mixed precision unless the base model is in fp32. Its weights begin as noise, and
    its last norm as that of the base model if that is an RMSNorm. The lm_head is the base model's, over the
    whole vocabulary, and is not learned. Raises InvalidRequest if `block_format` refuses the plan.
    """
    base = decoder.config
    mask = _rarest_id(rows, base.vocab)
    head_format = block_format(base, options.plan, options.learning.depth, mask)
    head = LearningBlockHead(head_format)
    lm_head, norm = _base_weights(decoder, torch.arange(base.vocab))
    initialise_small(head, head.norm, norm, options.learning.seed)
    mixed_precision = decoder.dtype != torch.float32
    teacher = Teacher(decoder, head_format.taps)
    objective = BlockLearning(head.to(decoder.device), teacher, lm_head.to(decoder.device), mixed_precision)
    publish = partial(write_block_head, options.output, head, base, decoder.dtype)
    return _Learner(head, objective, publish, {"block": asdict(head_format)})


def _mtp_learner(options: TrainOptions, decoder: Decoder, rows: list[Row]) -> _Learner:
    """Return an MTP layer in training.

    options: Options of the run.
    decoder: The base model.
    rows: Rows to learn from, by which the learned token ids are chosen if the plan names their number.

    The layer is trained in mixed precision unless the base model is in fp32. It learns all token ids if the
    plan names no number of them; it drafts all ids in any case. Raises InvalidRequest if `check_trainable`
    refuses the base model, or if the plan asks for a format that an MTP layer cannot have.
    """
    base = decoder.config
    plan = options.plan
    check_trainable(base)
    has_format = plan != HeadPlan("mtp", vocabulary=plan.vocabulary)
    require_field(not has_format, "kind", "without options of a head's format, for an MTP layer", plan.kind)
    ids = torch.arange(base.vocab)
    if plan.vocabulary is not None:
        counts = row_files.frequencies(rows, base.vocab)
        ids = torch.from_numpy(row_files.most_frequent(counts, plan.vocabulary))
    lm_head, norm = _base_weights(decoder, ids)
    assert norm is not None, "see check_trainable"
    layer = LearningMtp(base, lm_head, norm)
    initialise_mtp(layer, open_weights(options.model), base, options.learning.seed)
    mixed_precision = decoder.dtype != torch.float32
    teacher = Teacher(decoder, (base.layers,))
    objective = Unrolling(
        layer.to(decoder.device), teacher, ids.to(decoder.device), options.learning.depth, mixed_precision
    )
    publish = partial(write_mtp, options.output, layer, options.model, decoder.dtype)
    return _Learner(layer, objective, publish, {"mtp": asdict(layer.sizes)})


# Makes what is trained, by the kind that the user asks for.
LEARNERS: Mapping[str, Callable[[TrainOptions, Decoder, list[Row]], _Learner]] = {
    "eagle3": _eagle_learner,
    "p-eagle": _eagle_learner,
    "dflash": _block_learner,
    "dspark": _block_learner,
    "mtp": _mtp_learner,
}


def _rarest_id(rows: list[Row], vocab_size: int) -> int:
    """Return the token id that is to be predicted least often in the rows; the lowest of several.

    rows: Rows to learn from.
    vocab_size: Size of the base model's vocabulary.
    """
    return int(row_files.frequencies(rows, vocab_size).argmin())


def _eagle_head(options: TrainOptions, decoder: Decoder, rows: list[Row]) -> tuple[HeadFormat, LearningHead]:
    """Return the format and the weights of an EAGLE-3 or P-EAGLE head. It is a new head, or continues one,
    perhaps with another vocabulary or a wider MLP.

    options: Options of the run.
    decoder: The base model.
    rows: Rows to learn from, by which a vocabulary is chosen.

    A head that is continued keeps its vocabulary if the plan names no size; otherwise the ids that are most
    frequent in the rows are chosen, as many as the plan names, or VOCABULARY if it names no size. A P-EAGLE
    head has DEFAULT_LAYERS layers if the plan names none, and the rarest token id as its mask. Raises
    InvalidRequest if the plan does not fit the base model or the head to continue, and HeadMismatch if that
    head cannot be read.
    """
    base = decoder.config
    plan = options.plan
    start_head = read_head(options.start, base) if options.start is not None else None
    if start_head is not None and plan.vocabulary is None:
        draft_ids = start_head[0].draft_ids
    else:
        counts = row_files.frequencies(rows, base.vocab)
        draft_ids = torch.from_numpy(row_files.most_frequent(counts, plan.vocabulary or VOCABULARY))
    head_format = (
        new_format(base, draft_ids, plan)
        if start_head is None
        else widened_format(start_head[0], draft_ids, plan)
    )
    if plan.kind == "p-eagle":
        mask = _rarest_id(rows, base.vocab)
        depth = options.learning.depth
        head_format = replace(head_format, layers=plan.layers or DEFAULT_LAYERS, mask=mask, depth=depth)
    head = LearningHead(head_format.sizes, head_format.layers, head_format.mask)
    initialise(head, *_base_weights(decoder, draft_ids), options.learning.seed)
    if start_head is not None:
        copy_weights(
            head,
            start_head[1],
            torch.isin(draft_ids, start_head[0].draft_ids),
            torch.isin(start_head[0].draft_ids, draft_ids),
        )
    return head_format, head


@torch.inference_mode()
def _base_weights(decoder: Decoder, draft_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the base model's lm_head rows of some ids, [draft_vocab_size, hidden], and the weight of its
    last norm, [hidden]. The weight is None if that norm is not an RMSNorm.

    decoder: The base model.
    draft_ids: [draft_vocab_size] token ids.

    Both are on the CPU, in the base model's data type.
    """
    rows = decoder.edges.lm_head_rows(draft_ids.to(decoder.device))
    norm = decoder.edges.final_norm()
    return rows.cpu(), norm.weight.cpu() if isinstance(norm, Norm) else None


def _train_or_measure(
    options: TrainOptions,
    decoder: Decoder,
    learner: _Learner,
    training_rows: list[Row],
    held_out_rows: list[Row],
    progress: Progress,
) -> TrainingMeasurement:
    """Train the head, or only measure it if the run has 0 steps. Return the last measurement.

    options: Options of the run.
    decoder: The base model, for its device.
    learner: The head.
    training_rows: Rows to train on.
    held_out_rows: Rows to measure.
    progress: Shows a bar.

    With 0 steps the measurement has step 0, no loss and 0 seconds, and nothing is written. Otherwise the
    trainer continues from a checkpoint in the run's folder if there is one, and publishes the head; a
    checkpoint of another run raises ModelError.
    """
    learning = options.learning
    trainer = Trainer(learner.objective, learner.head, learning, decoder.device)
    if learning.steps == 0:
        return TrainingMeasurement(0, None, 0.0, trainer.measure(held_out_rows))
    task = progress.add_task("training", total=learning.steps)

    def on_progress(step: int, measurement: TrainingMeasurement | None) -> None:
        """Advance the bar to a step. After a measurement, show the acceptance.

        step: Number of steps done.
        measurement: The measurement after this step. None: the step was not followed by one.
        """
        description = (
            f"training: {measurement.acceptance.per_step:.3f} accepted a step" if measurement else None
        )
        progress.update(task, completed=step, description=description)

    run_identity = _run_identity(options) | learner.identity
    return trainer.train(
        training_rows, held_out_rows, options.training, run_identity, on_progress, learner.publish
    )


def _run_identity(options: TrainOptions) -> dict[str, Any]:
    """Return what identifies a run, apart from the format of its head: settings, base model, and the rows.

    options: Options of the run, whose rows are stored.
    """
    return {
        "base": fingerprint(options.model),
        "learning": asdict(options.learning),
        "start": str(options.start) if options.start else None,
        "dtype": options.dtype,
        "rows": digest_of(options.training / ROWS_FILE),
    }


def _report_text(
    options: TrainOptions, result: TrainingMeasurement, training_rows: list[Row], held_out_rows: list[Row]
) -> str:
    """Return the result as text: where the head is, how many rows there were, and the acceptance. With 0
    steps no head is named.

    options: Options of the run.
    result: The last measurement.
    training_rows: Rows that were trained on.
    held_out_rows: Rows that were measured.

    Returns two or three lines, each ended by a newline: "head: <output>" (left out with 0 steps), the numbers
    of rows, and the acceptance of held-out rows by greedy chains.
    """
    acceptance = result.acceptance
    drafts = " ".join(f"{share:.2f}" for share in acceptance.by_depth)
    tokens = sum(int(row.learned.sum()) for row in training_rows)
    head_line = f"head: {options.output}\n" if options.learning.steps else ""
    return (
        f"{head_line}rows: {len(training_rows)} to learn from ({tokens} tokens to guess), "
        f"{len(held_out_rows)} held out\n"
        f"held out, greedy chains of {len(acceptance.by_depth)}: {acceptance.per_step:.3f} accepted a step, "
        f"{acceptance.tokens_per_step:.2f} tokens a step; by depth {drafts}\n"
    )
