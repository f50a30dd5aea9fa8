"""The lab's commands of `specsot bench`, with their options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from specsot.errors import InvalidRequest
from specsot.members import HopDtype
from specsot.params import Mode
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, Option, list_kind, option
from specsot_app.fleet.options import FleetOptions, models_of, resolved
from specsot_bench.commands.bench import OutputOptions
from specsot_bench.core.methods import CHAINS, COUNTS, LENGTH, LENGTHS, SAMPLES, WINDOWS, shared

if TYPE_CHECKING:
    from specsot_lab.bench.pairs import Contrast
    from specsot_lab.bench.policies import ReadingOptions

# Options of the base model's precision.
PRECISION: Final = ("dtype", "quantization", "kv_cache_dtype")


# Options of a fleet that `bench ring` offers.
OF_RING: Final = ("model", "draft_model", "dtype", "quantization", "draft_dtype", "draft_quantization")
# Options of a fleet that `bench demo` offers.
OF_PAIRED: Final = ("model", "draft_model", *PRECISION, "draft_dtype", "draft_quantization", "device")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `specsot bench demo`. Each field is an option of the command line, described by its help
    text.

    runs: Paired runs of each comparison.
    max_new_tokens: Numbers of tokens of a direct answer; each comparison is measured with each of them.
    only: Beginnings of the names of the comparisons to measure, separated by commas; None: all.
    prompts: File of questions, one in each line; None: those of the benchmark.
    fleet: The models and their precision.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    runs: int = option(30, shared(SAMPLES, "runs", "Paired runs of each comparison."))
    max_new_tokens: tuple[int, ...] = option((128,), LENGTHS)
    only: str | None = option(
        None, "Comparisons whose names begin with these, such as plain,eagle.", unset="all"
    )
    prompts: Path | None = option(None, "Questions of your own, one a line.", metavar="FILE")
    fleet: Annotated[FleetOptions, Offer(only=OF_PAIRED)] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@command(DemoOptions, table="bench-demo", examples=[Example("specsot bench demo --runs 5", "A quick look")])
def demo(options: DemoOptions) -> int:
    """Compare answers without speculation, with drafts and with plans, of the demo model or another one."""
    from specsot_lab.bench.pairs import DEMO

    return _pairs("demo", DEMO, options, options.runs)


def _pairs(
    table: str, contrasts: Sequence[Contrast], options: DemoOptions | AblationBenchOptions, samples: int
) -> int:
    """Measure comparisons, and publish the table. Return the exit status 0.

    table: Name of the benchmark.
    contrasts: All comparisons of the benchmark.
    options: Options of the command, which may choose some of the comparisons.
    samples: Paired runs of each comparison.

    Raises InvalidRequest for a name with which no comparison begins.

    `options.only` is split at commas; a comparison is chosen if its name begins with one of the parts. None
    or "" chooses all comparisons. Also raises InvalidRequest for questions that cannot be read.
    """
    output = options.output.place
    from specsot_app.fleet.demo import is_small
    from specsot_bench.asking import questions_of
    from specsot_bench.rounds import QUESTIONS, models_of
    from specsot_lab.bench import pairs as pairs_module

    models = models_of(options.fleet, None)
    name_prefixes = tuple(part.strip() for part in options.only.split(",")) if options.only else ()
    known_names = [contrast.name for contrast in contrasts]
    if unknown := [
        name for name in name_prefixes if not any(contrast.startswith(name) for contrast in known_names)
    ]:
        raise InvalidRequest(f"only must be of {', '.join(known_names)}, got {unknown[0]!r}", field="only")
    questions = questions_of(options.prompts, is_small(models.base), QUESTIONS)
    chosen = [
        contrast for contrast in contrasts if not name_prefixes or contrast.name.startswith(name_prefixes)
    ]
    pair_options = pairs_module.PairOptions(
        table, options.fleet, models, questions, chosen, samples, options.max_new_tokens
    )
    return pairs_module.measure(pair_options, output)


# Options of a fleet that `bench load` offers.
OF_LOADED: Final = Offer(
    only=("model", "draft_model", "dtype", "quantization", "drafter", "stages", "master", "client")
)


@dataclass(frozen=True, slots=True)
class LoadBenchOptions:
    """Options of `specsot bench load`. Each field is an option of the command line, described by its help
    text.

    clients: Numbers of simultaneous clients, one level after another.
    requests: Requests of each level.
    tokens: Numbers of tokens of an answer; all levels are measured with each of them.
    mode: How answers are planned.
    memory: True: the memory of the processes is measured instead.
    fleet: The fleet that is started, or the running master that is asked.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    clients: tuple[int, ...] = option(
        (1, 2, 4, 8, 16, 32, 64), "Numbers of simultaneous clients, one level each.", kind=COUNTS
    )
    requests: int = option(
        64, shared(SAMPLES, "requests", "Requests of each level; at least four per client.")
    )
    tokens: tuple[int, ...] = option(
        (32,), shared(LENGTHS, "tokens", "Tokens of each answer, such as 32,256.")
    )
    mode: Mode = option("direct", "With `direct` all answers are equally long.")
    memory: bool = option(
        False, "Measure instead how much memory the processes hold after 2,000 short requests."
    )
    fleet: Annotated[FleetOptions, OF_LOADED] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


# Examples at the end of the help of `bench load`.
LOAD: Final = (
    Example("specsot bench load --clients 1,8 --requests 32", "Two levels"),
    Example("specsot bench load --master 10.0.0.1:50050", "A fleet that runs already"),
)


@command(LoadBenchOptions, table="bench-load", examples=LOAD)
def load(options: LoadBenchOptions) -> int:
    """Measure requests per second and waits of 1 to 64 simultaneous clients, of a fleet of processes.

    \fStarts a fleet of processes, whatever kind the options name, unless a master is named. With --memory,
    the memory of the processes is measured instead, with the first number of tokens alone. Returns the exit
    status: 1 if a level had no answer at all, or with --memory if a process grew by more than MAX_GROWTH
    bytes; otherwise 0.

    options: Options of the command line; see `LoadBenchOptions`. An output file that cannot be written raises
    InvalidRequest before anything is measured, and a model that is not found ModelError.
    """
    output = options.output.place
    from specsot_lab.bench import load as load_module

    fleet = replace(options.fleet, kind="processes")
    loads = [
        load_module.LoadTest(options.clients, options.requests, tokens, options.mode, fleet)
        for tokens in options.tokens
    ]
    return (
        load_module.measure_memory(loads[0], output) if options.memory else load_module.measure(loads, output)
    )


@dataclass(frozen=True, slots=True)
class RingBenchOptions:
    """Options of `specsot bench ring`. Each field is an option of the command line, described by its help
    text.

    rtt: Round trips between neighbours, in milliseconds.
    stages: Numbers of stages.
    rounds: Measured rounds of all ways, with two questions each.
    mbit: Megabits per second of every hop, one measurement each; (): no limit.
    hop_dtype: The type in which hidden rows travel.
    answer_tokens: Maximum number of tokens of planned answers; direct ones have a quarter.
    fleet: The model, its head and their precision.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    rtt: tuple[float, ...] = option(
        (0.0, 20.0, 100.0), "Round trip between neighbours, in milliseconds.", min_value=0, metavar="MS"
    )
    stages: tuple[int, ...] = option(
        (4,), "Number of stages.", min_value=2, aliases=("pipeline-parallel-size",)
    )
    rounds: int = option(1, shared(SAMPLES, "rounds", "Rounds of all ways, two questions each."))
    mbit: tuple[float, ...] = option((), "Megabits a second of every hop.", min_value=1, unset="no limit")
    hop_dtype: HopDtype = option("auto", "What hidden rows travel in.")
    answer_tokens: int = option(
        160, "Tokens of a planned answer, at most; a direct one has a quarter.", min_value=64
    )
    fleet: Annotated[FleetOptions, Offer(only=OF_RING, defaults={"dtype": "fp32"})] = field(
        default_factory=FleetOptions
    )
    output: OutputOptions = field(default_factory=OutputOptions)


@command(
    RingBenchOptions, table="bench-ring", examples=[Example("specsot bench ring --rtt 10 --stages 3", "One")]
)
def ring(options: RingBenchOptions) -> int:
    """Measure whole answers, direct and planned, with drafts and without, over stages far from each other.

    \fReturns the exit status 0. Raises InvalidRequest for a model without a head, Unavailable if a ring
    breaks, and AnswersDiffer if drafts change an answer.

    options: Options of the command line; see `RingBenchOptions`. An output file that cannot be written raises
    InvalidRequest before anything is measured, and a model that is not found ModelError.
    """
    output = options.output.place
    from specsot_lab.bench import ring as ring_module

    weights = resolved(options.fleet, models_of(options.fleet))
    measurement = ring_module.RingMeasurement(
        weights,
        options.rtt,
        options.stages,
        options.mbit,
        options.rounds,
        options.answer_tokens,
        options.hop_dtype,
    )
    return ring_module.measure(measurement, output)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of the text whose perplexity is measured. Each field is an option of the command line,
    described by its help text.

    text: File of the text; None: the one that comes with the lab.
    length: Numbers of tokens of each piece; all is measured with each of them.
    pieces: Maximum number of pieces that are read, from the beginning.
    """

    HEADING: ClassVar[str] = "Measurement"

    text: Path | None = option(None, "Text for perplexity.", metavar="FILE", unset="one that comes with it")
    length: tuple[int, ...] = option(
        (1024,), "Tokens of each piece, such as 256,1024; within the model's context.", kind=COUNTS
    )
    pieces: int = option(16, shared(SAMPLES, "pieces", "Pieces that are read, from the beginning."))


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of `specsot bench policies`. Each field is an option of the command line, described by its help
    text.

    reading: The text, and the length of its pieces.
    windows: Numbers of tokens that attention sees, sinks included, a row each.
    find_heads: True: the windows of heads are determined instead, and written into the model's directory.
    gathering: Recent tokens that heads keep which attend everywhere; None: all tokens.
    fleet: The model, its precision and its device.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    reading: TextOptions = field(default_factory=TextOptions)
    windows: tuple[int, ...] = option(
        (256, 512, 1024), shared(WINDOWS, "windows", "Tokens that attention sees, sinks included.")
    )
    find_heads: bool = option(False, "Instead: write what each head should keep into the model's directory.")
    gathering: int | None = option(
        None, "Recent tokens that heads keep which attend everywhere.", min_value=1, unset="all"
    )
    fleet: Annotated[
        FleetOptions, Offer(only=("model", *PRECISION, "device"), defaults={"dtype": "fp32"})
    ] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@command(PolicyOptions, table="bench-policies")
def policies(options: PolicyOptions) -> int:
    """Measure the perplexity of texts under each KV policy.

    \fWith --find-heads, what each head should keep is determined and written into the model's directory
    instead, with the first length of pieces alone; --windows is not used then. Returns the exit status 0.
    Raises InvalidRequest for a length or text that cannot be used, and ModelError for a model that cannot be
    loaded.

    options: Options of the command line; see `PolicyOptions`. An output file that cannot be written raises
    InvalidRequest before anything is measured, and a model that is not found ModelError.
    """
    output = options.output.place
    from specsot_lab.bench import policies as policies_module

    readings = _readings(options.fleet, options.reading)
    if options.find_heads:
        return policies_module.find_heads(readings[0], options.gathering)
    return policies_module.measure(readings, output, options.windows)


@dataclass(frozen=True, slots=True)
class PrecisionOptions:
    """Options of `specsot bench precision`. Each field is an option of the command line, described by its
    help text.

    reading: The text, and the length of its pieces.
    tokens: Number of tokens that are written with the head after each question.
    fleet: The model, its head, the data type and the device.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    reading: TextOptions = field(default_factory=TextOptions)
    tokens: int = option(
        64, shared(LENGTH, "tokens", "Tokens that the head helps to write after each question.")
    )
    fleet: Annotated[
        FleetOptions,
        Offer(
            only=("model", "draft_model", "dtype", "device"),
            defaults={"dtype": "fp32"},
            help={"dtype": "Data type that bases in fewer bits, and their heads, compute in."},
        ),
    ] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@command(PrecisionOptions, table="bench-precision")
def precision(options: PrecisionOptions) -> int:
    """Measure memory, perplexity and tokens per step of a base and its head in every precision.

    \fWithout a head, only the base model is measured. Returns the exit status 0. Raises InvalidRequest for a
    length or text that cannot be used, and ModelError for a model that cannot be loaded.

    options: Options of the command line; see `PrecisionOptions`. An output file that cannot be written raises
    InvalidRequest before anything is measured, and a model that is not found ModelError.
    """
    output = options.output.place
    from specsot_lab.bench import precision as precision_module

    models = models_of(options.fleet)
    readings = _readings(options.fleet, options.reading)
    trial = precision_module.head_trial_of(
        models.base, models.draft, options.tokens, of_demo=options.fleet.model is None
    )
    return precision_module.measure(readings, trial, output)


def _readings(fleet: FleetOptions, text_options: TextOptions) -> list[ReadingOptions]:
    """Return the text and the model, once for each length of pieces.

    fleet: The model, its precision and its device.
    text_options: The text, the lengths, and the number of pieces.

    If the options name no model, it is the demo model. Raises ModelError if the model is not found, and
    InvalidRequest for options of the fleet that cannot be used.
    """
    from specsot_lab.bench.policies import ReadingOptions

    weights = replace(fleet, model=models_of(fleet).base)
    return [
        ReadingOptions(weights, text_options.text, length, text_options.pieces)
        for length in text_options.length
    ]


@dataclass(frozen=True, slots=True)
class AblationBenchOptions:
    """Options of `specsot bench ablation`. Each field is an option of the command line, described by its help
    text.

    samples: Pairs of each row, with a question each.
    max_new_tokens: Numbers of tokens of a direct answer; each comparison is measured with each of them.
    k: Numbers of drafts of the chains that trees are compared with, a row each.
    windows: Numbers of tokens that attention sees, sinks included, a row each.
    only: Beginnings of the names of the comparisons to measure, separated by commas; None: all.
    prompts: File of questions, one in each line; None: those of the benchmark.
    fleet: The model, its head, the data type and the device.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    samples: int = option(5, shared(SAMPLES, "samples", "Pairs of each row, a question each."))
    max_new_tokens: tuple[int, ...] = option((128,), LENGTHS)
    k: tuple[int, ...] = option((5,), shared(CHAINS, "k", "K of the chains that trees are compared with."))
    windows: tuple[int, ...] = option((256,), WINDOWS)
    only: str | None = option(None, "Some of them, such as drafting,adaptive,int8.", unset="all")
    prompts: Path | None = option(None, "Questions of your own, one a line.", metavar="FILE")
    fleet: Annotated[FleetOptions, Offer(only=("model", "draft_model", "dtype", "device"))] = field(
        default_factory=FleetOptions
    )
    output: OutputOptions = field(default_factory=OutputOptions)


@command(AblationBenchOptions, table="bench-ablation")
def ablation(options: AblationBenchOptions) -> int:
    """Measure the gain of each optimisation by itself: switched on, compared with switched off."""
    from specsot_lab.bench.pairs import ablation_of

    return _pairs("ablation", ablation_of(options.k, options.windows), options, options.samples)


# Options of a fleet that `bench steps` offers.
OF_STEPS: Final = Offer(
    only=("model", "draft_model", "dtype", "quantization", "device"), defaults={"dtype": "fp32"}
)


@dataclass(frozen=True, slots=True)
class StepsBenchOptions:
    """Options of `specsot bench steps`. Each field is an option of the command line, described by its help
    text.

    steps: Measured steps of each way.
    branches: Numbers of sequences that are written at the same time after one prompt.
    rows: Nodes of trees whose steps are measured instead, without verification and drafting; (): they are
        not.
    prompts: File of questions, of which the first one is used; None: those of the benchmark.
    fleet: The model, its head and their precision.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    steps: int = option(30, shared(SAMPLES, "steps", "Steps of each way that count."))
    branches: tuple[int, ...] = option((6,), "Parallel sequences after one prompt, such as 2,6.", kind=COUNTS)
    rows: tuple[int, ...] = option(
        (),
        "Instead: steps of trees of so many rows, without verification or drafting.",
        kind=COUNTS,
        unset="none",
    )
    prompts: Path | None = option(None, "Questions of your own, one a line.", metavar="FILE")
    fleet: Annotated[FleetOptions, OF_STEPS] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@command(StepsBenchOptions, table="bench-steps")
def steps(options: StepsBenchOptions) -> int:
    """Measure how the time of a step on a CPU is divided: by phase, and by kind of work.

    \fWith --rows, steps of trees of these numbers of nodes are measured instead, without verification and
    drafting, also on a GPU. Of the questions, only the first one is used. Returns the exit status 0. Raises
    InvalidRequest for questions that cannot be read, or for another device than the CPU without --rows.

    options: Options of the command line; see `StepsBenchOptions`. An output file that cannot be written
    raises InvalidRequest before anything is measured, and a model that is not found ModelError.
    """
    output = options.output.place
    from specsot_app.fleet.demo import is_small
    from specsot_bench.asking import questions_of
    from specsot_bench.rounds import QUESTIONS, models_of
    from specsot_lab.bench import step_rows
    from specsot_lab.bench import step_split as split_module

    models = models_of(options.fleet, None)
    if options.rows:
        return step_rows.measure(models, options.rows, options.steps, output)
    if models.device != "cpu":
        raise InvalidRequest("a step is divided on a CPU: give --rows, too", field="device")
    question = questions_of(options.prompts, is_small(models.base), QUESTIONS)[0]
    return split_module.measure_models(models, question, options.steps, options.branches, output)


@dataclass(frozen=True, slots=True)
class KernelsBenchOptions:
    """Options of `specsot bench kernels`. Each field is an option of the command line, described by its help
    text.

    text: Numbers of shared KV rows before the trees of attention.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    text: tuple[int, ...] = option(
        (1024, 8192), "Rows in the KV cache before the trees, of attention.", kind=COUNTS
    )
    output: OutputOptions = field(default_factory=OutputOptions)


@command(KernelsBenchOptions, table="bench-kernels")
def kernels(options: KernelsBenchOptions) -> int:
    """Measure the kernels of trees and attention on a GPU, called and replayed.

    \fReturns the exit status 0. Raises InvalidRequest, which advises to install specsot[gpu], if Triton is
    not installed; another missing module raises ModuleNotFoundError.

    options: Options of the command line; see `KernelsBenchOptions`. An output file that cannot be written
    raises InvalidRequest before anything is measured.
    """
    output = options.output.place
    try:
        from specsot_lab.bench import kernels as kernels_module
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        needs = "bench kernels needs a GPU, and Triton: pip install 'specsot[gpu]'"
        raise InvalidRequest(needs) from None

    return kernels_module.measure(options.text, output)


@dataclass(frozen=True, slots=True)
class RanksBenchOptions:
    """Options of `specsot bench ranks`. Each field is an option of the command line, described by its help
    text.

    texts: File of conversations, as JSON lines.
    most: Maximum number of conversations that are read, from the first.
    tokens: Maximum number of tokens that are read, from the first answer of a conversation on.
    shapes: Drafts of a chain, then of each tree.
    fleet: The base model and the head, and how both compute.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    texts: Annotated[
        Path, Option("Conversations whose answers the base wrote, as JSON lines.", metavar="FILE")
    ]
    most: int = option(80, shared(SAMPLES, "most", "Conversations, from the first."))
    tokens: int = option(512, shared(LENGTH, "tokens", "Tokens of each answer, at most."))
    shapes: tuple[int, ...] = option(
        (5, 24, 48), "Drafts of the chain, then of each tree, such as 5,24,48.", kind=COUNTS
    )
    fleet: Annotated[
        FleetOptions, Offer(only=("model", "draft_model", "dtype", "device"), defaults={"dtype": "fp32"})
    ] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@command(RanksBenchOptions, table="bench-ranks")
def ranks(options: RanksBenchOptions) -> int:
    """Measure a head's tokens per step as a chain and as trees of several sizes, on answers its base model
    wrote.

    \fReturns the exit status 0. Raises InvalidRequest if no head is named, or if the conversations cannot be
    used.

    options: Options of the command line; see `RanksBenchOptions`. An output file that cannot be written
    raises InvalidRequest before anything is measured, and a model that is not found ModelError.
    """
    output = options.output.place
    from specsot_lab.bench import ranks as ranks_module

    models = models_of(options.fleet)
    if models.draft is None:
        raise InvalidRequest("bench ranks measures a head's drafts: give --draft-model", "draft_model")
    precision = options.fleet.dtype, options.fleet.device
    return ranks_module.measure(
        models, options.texts, options.most, options.tokens, options.shapes, precision, output
    )


@dataclass(frozen=True, slots=True)
class TunerBenchOptions:
    """Options of `specsot bench tuner`. Each field is an option of the command line, described by its help
    text.

    task: Name of the task whose questions are asked.
    every: Every how many-th question of the task is taken.
    first: Number of these questions that are skipped.
    samples: Number of questions, each answered in every setting.
    max_new_tokens: Maximum number of tokens of an answer.
    clients: Numbers of questions that are asked at once.
    fleet: The model, its head, their precision and the device.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    task: str = option("vicuna", "Task whose questions are asked.")
    every: int = option(4, "Of its questions one in so many.", min_value=1)
    first: int = option(0, "Of those, skip so many.", min_value=0)
    samples: int = option(20, shared(SAMPLES, "samples", "Questions, each answered in every setting."))
    max_new_tokens: int = option(200, LENGTH)
    clients: tuple[int, ...] = option((1,), "Questions that are asked at once, such as 1,8,64.", kind=COUNTS)
    fleet: Annotated[
        FleetOptions, Offer(only=("model", "draft_model", "dtype", "quantization", "device"))
    ] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@command(TunerBenchOptions, table="bench-tuner")
def tuner(options: TunerBenchOptions) -> int:
    """Compare the draft policy with fixed chains and trees, by number of clients.

    \fThe questions are every `every`-th one of the task, without the first `first` of these, at most
    `samples`; of a conversation only the first turn is asked. Returns the exit status 0. Raises
    InvalidRequest if no head is named, or the task is unknown.

    options: Options of the command line; see `TunerBenchOptions`. An output file that cannot be written
    raises InvalidRequest before anything is measured, and a model that is not found ModelError.
    """
    output = options.output.place
    from specsot_bench.rounds import models_of
    from specsot_lab.bench import tuner as tuner_module
    from specsot_lab.eval.tasks import read_task

    models = models_of(options.fleet, None)
    if models.head is None:
        raise InvalidRequest("bench tuner measures a head's drafts: give --draft-model", "draft_model")
    candidates = [prompt.turns[0] for prompt in read_task(options.task)[:: options.every]]
    questions = candidates[options.first : options.first + options.samples]
    selection = {
        "task": options.task,
        "every": options.every,
        "first": options.first,
        "samples": options.samples,
    }
    return tuner_module.measure(models, questions, options.max_new_tokens, options.clients, selection, output)


@dataclass(frozen=True, slots=True)
class PeerBenchOptions:
    """Options of `specsot bench llamacpp`. Each field is an option of the command line, described by its help
    text.

    peer: Python executable of the environment that has xllamacpp.
    gguf: Model file that llama.cpp reads.
    kinds: Precisions of SpecSoT that are measured.
    ways: Ways of SpecSoT that are measured in each precision.
    threads: Threads of each side.
    tokens: Number of tokens of a direct answer; a plan gets four times as many.
    rounds: Maximum number of rounds, with a question each.
    minutes: No round starts that would probably end later than so many minutes after the beginning.
    small_model: A small model that drafts on both sides.
    prompt_words: Words before each question.
    clients: Questions that are sent at once.
    fleet: The same model, as SpecSoT reads it, and its head.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    peer: Annotated[str, Option("Python of the environment that has xllamacpp.", metavar="PYTHON")]
    gguf: Annotated[str, Option("What llama.cpp reads: a chat model with ChatML.", metavar="FILE")]
    kinds: tuple[str, ...] = option(
        ("fp32", "bf16", "int8", "int4"),
        "Precisions of SpecSoT, of fp32, bf16, fp16, int8 and int4.",
        kind=list_kind("KINDS", "fp32|bf16|fp16|int8|int4", "{} are no precisions"),
    )
    ways: tuple[str, ...] = option(
        ("plain",),
        "Ways of each, of plain, drafts, suffix, small, branches, both and `by script`: the same plan asked"
        " of llama.cpp.",
        kind=list_kind("WAYS", "plain|drafts|suffix|small|branches|both|by script", "{} are no ways"),
    )
    threads: int = option(2, "Threads of each.", min_value=1)
    tokens: int = option(
        64, shared(LENGTH, "tokens", "Tokens of a direct answer; a plan has four times as many.")
    )
    rounds: int = option(6, shared(SAMPLES, "rounds", "Rounds, a question each."))
    minutes: float = option(60.0, "No round begins that would end later.", min_value=0)
    small_model: str | None = option(
        None,
        "A small GGUF model of the same vocabulary: llama.cpp drafts with it, too (way `small`).",
        metavar="FILE",
    )
    prompt_words: int = option(0, "Words of a passage before each question.", min_value=0)
    clients: int = option(1, "Questions that are sent at once.", min_value=1)
    fleet: Annotated[FleetOptions, Offer(only=("model", "draft_model"))] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@command(PeerBenchOptions, table="bench-llamacpp")
def llamacpp(options: PeerBenchOptions) -> int:
    """Compare SpecSoT with llama.cpp, in turns, on the same model.

    \fReturns the exit status 0. --minutes bounds the run: no round starts that would probably end later.

    options: Options of the command line; see `PeerBenchOptions`. An output file that cannot be written raises
    InvalidRequest before anything is measured, and a model that is not found ModelError.
    """
    output = options.output.place
    from specsot_lab.bench import llamacpp as peer_module

    quantities = (
        options.kinds,
        options.ways,
        options.threads,
        options.tokens,
        options.rounds,
        60 * options.minutes,
        options.small_model,
        options.prompt_words,
        options.clients,
    )
    if options.clients > 1 and set(peer_module.PLANNED) & set(options.ways):
        raise InvalidRequest("--clients: planned ways are measured with one client", field="clients")
    if "small" in options.ways and options.small_model is None:
        raise InvalidRequest("--ways small needs --small-model", field="ways")
    task = peer_module.PeerTask(options.peer, options.gguf, options.fleet, *quantities)
    return peer_module.measure(task, output)
