"""Answers questions for `specsot bench quick` and `full`: fleets that share one set of weights, and
Transformers.

One fleet serves all methods that draft in the same way. The fleets run in turn on the same thread, so that an
idle one only holds memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from specsot.checkpoint.config import read_config
from specsot.core.frames import Drafts, Frame, Outcome, Result
from specsot.core.pages import PageTable
from specsot.drafting import DraftOptions
from specsot.members import Configuration, KvDtype
from specsot.params import Ask, DrafterName, Limits, Message
from specsot.service.membership import RingMember
from specsot.service.options import DraftModelOptions
from specsot.transport.links import Dialer
from specsot_app.fleet.embedded import EmbeddedFleet, EmbeddedOptions, MemberMaker, Threads
from specsot_bench.asking import finished_answer
from specsot_bench.core.aggregate import Recording, StepSample, committed_by, evicted_by
from specsot_bench.core.methods import Method
from specsot_bench.hf_baseline import HfBaseline
from specsot_bench.results import Clock, Stopwatch, now
from specsot_drafter import loader as drafters
from specsot_drafter.drafter import Drafter
from specsot_drafter.observer import DrafterObserver as DrafterWatch
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.engine import EngineConfig
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.kv import row_bytes
from specsot_model.linear import resolve_dtype
from specsot_model.memory_fit import WeightForm, drafter_bytes
from specsot_model.packed import row_itemsize
from specsot_model.published import open_weights
from specsot_model.stored_form import as_published, uses_packed_kernels
from specsot_worker import loader as workers
from specsot_worker.observer import WorkerObserver as WorkerWatch
from specsot_worker.stage_provider import StageRunner
from specsot_worker.worker import Worker


class StepRecorder(WorkerWatch):
    """Records the steps of a worker that has all layers; call `begin` before each request."""

    def __init__(self, row_bytes: int, drafts: DraftRecorder | None = None, clock: Clock = now) -> None:
        """Record with a clock.

        row_bytes: KV bytes of a position in all layers.
        drafts: Records the drafter's memory; None: no drafter holds memory.
        clock: Returns seconds.
        """
        self._row_bytes = row_bytes
        self._drafts = drafts
        self._clock = clock
        self._table: PageTable | None = None
        self.begin()

    def begin(self) -> None:
        """Start the record of another request. No sequence of an earlier request may be open.

        All counts and samples become empty, also those of the drafter's recorder, and the clock starts
        again.
        """
        self._watch = Stopwatch(self._clock)
        self._evicted_pages = dict[int, int]()
        self._evicted = dict[int, int]()
        self.samples: list[StepSample] = []
        self._tokens = self._grown = self._steps = self._pages = self._evictions = 0
        self._proposed = self._accepted = 0
        if self._drafts:
            self._drafts.begin()

    @property
    def seconds(self) -> float:
        """Return the seconds since `begin`."""
        return self._watch.seconds

    def formed(self, configuration: Configuration, stage: StageRunner) -> None:
        """Record the page table of the stage.

        configuration: Configuration of the ring, which is not used.
        stage: The stage that computes, whose page table is kept.
        """
        self._table = stage.table

    def computed(self, frame: Frame, seconds: float) -> None:
        """Record memory and evictions after a frame. The page table is in the state that the frame left.

        A sequence's evictions count a step in which its number of evicted pages grew by any number as one.
        Sequences that are no longer open are left out. Requires that `formed` was called.

        frame: The frame that was computed.
        seconds: Duration of the frame, which is not used.
        """
        table = self._table
        assert table is not None
        self._pages = max(self._pages, table.count - table.free)
        for sequence in table.sequences:
            evicted_pages = -table.column(sequence, 0)
            self._evictions += evicted_pages > self._evicted_pages.get(sequence, 0)
            self._evicted_pages[sequence] = evicted_pages
        for segment in frame.segments:
            if segment.sequence in table.sequences:
                window = table.policy(segment.sequence)
                self._evicted[segment.sequence] = evicted_by(window, committed_by(segment))

    def returned(self, result: Result, now: float) -> None:
        """Record the tokens of a result.

        A result without tokens adds no sample. Outcomes without a tree (of prompts) add tokens, but neither
        steps nor accepted drafts.

        result: Result of the last stage.
        now: Time of the result, which is not used, since the recorder has its own clock.
        """
        tree_outcomes = [outcome for outcome in result.outcomes if outcome.draft_round]
        self._steps += bool(tree_outcomes)
        self._proposed += result.drafted
        self._accepted += sum(map(_drafts_in, tree_outcomes))
        self._grown += sum(len(outcome.tokens) for outcome in tree_outcomes)
        num_tokens = sum(len(outcome.tokens) for outcome in result.outcomes)
        self._tokens += num_tokens
        if num_tokens:
            self.samples.append(self._sample())

    def _sample(self) -> StepSample:
        """Return the sample of the step that has just ended. Without a drafter, only KV pages count as
        memory.

        Requires that `formed` was called.
        """
        assert self._table is not None
        pages = self._pages * self._table.page_rows * self._row_bytes
        return StepSample(
            self.seconds,
            self._tokens,
            self._grown,
            self._steps,
            self._proposed,
            self._accepted,
            pages + (self._drafts.held if self._drafts else 0),
            self._evictions,
            sum(self._evicted.values()),
        )


class DraftRecorder(DrafterWatch):
    """Records a drafter's memory.

    row_bytes: KV bytes of a position.
    weights: Bytes of the draft model.
    """

    def __init__(self, row_bytes: int, weights: int) -> None:
        self._row_bytes = row_bytes
        self._weights = weights
        self._free: Callable[[], int] = lambda: 0
        self._max_pages = 0
        self._count = 0
        self._page_rows = 0

    def begin(self) -> None:
        """Start the record of another request."""
        self._max_pages = 0

    @property
    def held(self) -> int:
        """Return the largest number of bytes since `begin`, weights included."""
        return self._weights + self._max_pages * self._page_rows * self._row_bytes

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        """Record how many pages there are, and how to ask for the free ones.

        configuration: Configuration of the ring, with its number of pages.
        free: Returns the number of free pages.
        """
        self._free = free
        self._count = configuration.pages
        self._page_rows = configuration.page_rows

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        """Record the number of pages in use after drafting.

        drafts: Trees that were drafted, which are not used.
        seconds: Duration of the drafting, which is not used.
        """
        self._max_pages = max(self._max_pages, self._count - self._free())


def _drafts_in(outcome: Outcome) -> int:
    """Return the number of accepted drafts of an outcome; the root is no draft.

    outcome: Outcome of a sequence in one step.
    """
    return max(len(outcome.accepted) - 1, 0)


# Positions of a KV page, as in the services.
PAGE_ROWS = 256
# KV positions that a fleet has pages for. Untuned.
ROWS = 8192
# KV positions of a small draft model, which needs fewer. Untuned.
SMALL_MODEL_ROWS = 4096
# Bytes. Memory for a head's KV pages. Untuned.
HEAD_MEMORY = 1 << 28


@dataclass(frozen=True, slots=True)
class ModelSet(DraftModelOptions):
    """The models of a run. The options of precision apply to SpecSoT; Transformers computes without
    quantization.

    head: Folder of an EAGLE head; None: no head.
    small: Folder of a language model with the base's tokens; None: no such model.
    """

    head: Path | None = None
    small: Path | None = None

    def drafts_with(self, drafter: DrafterName) -> Path | None:
        """Return the directory of the model that drafts; None if no model does.

        drafter: Kind of drafter.
        """
        return {"eagle": self.head, "model": self.small}.get(drafter)

    def lacks(self, method: Method) -> str | None:
        """Return which model is missing for a method, in words; None if the method can be measured.

        The small model is named first if both are missing.

        method: The method.
        """
        if method.small and self.small is None:
            return "needs --small-model"
        if method.drafter == "eagle" and self.head is None:
            return "needs --draft-model, an EAGLE head"
        return None


class Runners:
    """Answers questions with methods. Fleets are opened when they are first needed, and all are closed at the
    end of the context.
    """

    def __init__(self, models: ModelSet, rows: int = ROWS) -> None:
        """Prepare the shared weights.

        The base's configuration is read, but its weights are not loaded yet. Raises ModelError if the base
        cannot be used.

        models: Models of the run, and their precision.
        rows: Number of KV positions that a fleet has pages for.
        """
        self.models = models = as_published(models, models.base)
        self.config = read_config(models.base)
        self._numbers = resolve_dtype(models.dtype, models.device, models.stored_form)
        self._packed = uses_packed_kernels(models.stored_form, models.device)
        drafting = resolve_dtype(models.drafter_dtype, models.device)
        self._drafting = WeightForm.on_device(models.device, drafting.itemsize, models.drafter_quantization)
        self._stack = AsyncExitStack()
        self._threads = Threads()
        self._fleets: dict[tuple[DrafterName, DraftOptions], tuple[EmbeddedFleet, StepRecorder]] = {}
        memory = rows * self._row_bytes(models.base, models.kv_cache_dtype, self._packed)
        self._worker = workers.StageLoader(replace(models, kv_memory=memory), "worker-0")
        self._prompts = Prompts(models.base, Text(models.base))
        self._hf_baseline: HfBaseline | None = None

    async def __aenter__(self) -> Runners:
        """Return these runners; nothing is opened yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all fleets and the process of Transformers."""
        await self._stack.aclose()

    @property
    def dtype(self) -> str:
        """Return the data type of the base, such as "bfloat16"."""
        return str(self._numbers).removeprefix("torch.")

    def prompt(self, question: str) -> tuple[int, ...]:
        """Return the token ids of a direct request.

        question: The question as plain text.
        """
        return self._prompts.chat((Message("user", question),))

    async def write(
        self, method: Method, question: str, tokens: int, seconds: float | None = None
    ) -> Recording:
        """Return one answer of so many tokens, whatever end tokens come.

        A method of Transformers writes in another process. Any other method writes through a fleet of its
        drafter: with a plan if the method plans, else directly.

        method: The method that writes.
        question: The question as plain text.
        tokens: Number of tokens of the answer.
        seconds: Seconds after which the writing stops, loading not counted; None: no limit.
        Raises TimeoutError after that time; one step may still be running then. Raises Unavailable if the
            answer ended with an error.
        """
        if method.rival:
            return await self._written_elsewhere(method, question, tokens, seconds)
        fleet, recorder = await self._fleet_of(method)
        limits = Limits(max_new_tokens=tokens)
        if method.planned:
            ask = Ask(prompt=question, mode="sot", limits=limits, seed=0, ignore_eos=True)
        else:
            ask = Ask(tokens=self.prompt(question), mode="direct", limits=limits, seed=0, ignore_eos=True)
        recorder.begin()
        async with asyncio.timeout(seconds):
            finished = await finished_answer(fleet, replace(ask, window=method.window))
        seconds_taken = recorder.seconds
        prompt = self.prompt(question)
        return Recording(tuple(recorder.samples), finished.tokens, seconds_taken, method.planned, prompt)

    async def write_together(self, method: Method, questions: Sequence[str], tokens: int) -> float:
        """Return the seconds until all questions, asked at once, have direct answers of so many tokens.

        If the fleet is opened by this call, the opening is not counted. Raises Unavailable if one of the
        answers ended with an error.

        method: The method that writes.
        questions: Questions as plain texts.
        tokens: Number of tokens of each answer.
        """
        fleet, _ = await self._fleet_of(method)
        limits = Limits(max_new_tokens=tokens)
        began = now()
        asks = [
            Ask(tokens=self.prompt(question), mode="direct", limits=limits, seed=0, ignore_eos=True)
            for question in questions
        ]
        await asyncio.gather(*(finished_answer(fleet, ask) for ask in asks))
        return now() - began

    async def _written_elsewhere(
        self, method: Method, question: str, tokens: int, seconds: float | None
    ) -> Recording:
        """Return Transformers' answer, with the memory that its KV cache takes at each step.

        The last step of Transformers has no sample. Without the assistant, only the base's KV counts as
        memory; with it, the small model's KV and weights are added.

        method: The method, which says whether the small model assists.
        question: The question as plain text.
        tokens: Number of tokens of the answer.
        seconds: Seconds after which the writing stops; None: no limit.
        Raises TimeoutError after that time, Unavailable if Transformers cannot write.
        """
        prompt = self.prompt(question)
        assisted = method.rival == "assisted"
        output = await asyncio.to_thread(self._elsewhere().write, prompt, tokens, assisted, seconds)
        row_bytes = self._row_bytes(self.models.base)
        assistant_row_bytes = 0
        weights = 0
        if assisted and self.models.small is not None:
            assistant_row_bytes, weight_form = (
                self._row_bytes(self.models.small),
                WeightForm(self._numbers.itemsize),
            )
            weights = drafter_bytes(open_weights(self.models.small), weight_form)
        samples = tuple(
            StepSample(seconds, written, written - output.steps[0][1], step,
                   held=(len(prompt) + written) * (row_bytes + assistant_row_bytes) + weights)
            for step, (seconds, written) in enumerate(output.steps[:-1])
        )  # fmt: skip
        return Recording(samples, output.tokens, output.seconds, prompt=prompt)

    def _elsewhere(self) -> HfBaseline:
        """Return the process with Transformers, started at its first use.

        The process ends with these runners.
        """
        if self._hf_baseline is None:
            models = self.models
            self._hf_baseline = HfBaseline(models.base, self._numbers, models.device, models.small)
            self._stack.callback(self._hf_baseline.close)
        return self._hf_baseline

    async def _fleet_of(self, method: Method) -> tuple[EmbeddedFleet, StepRecorder]:
        """Return the fleet of a method, opened at its first use, and the fleet's recorder.

        Raises what loading raises; the next call then tries again.

        method: The method; methods that draft alike share a fleet.
        """
        key = method.drafter, method.options
        if key not in self._fleets:
            self._fleets[key] = await self._open(*key)
        return self._fleets[key]

    async def _open(self, drafter: DrafterName, options: DraftOptions) -> tuple[EmbeddedFleet, StepRecorder]:
        """Open a fleet that shares the base's weights, and return it with its recorder.

        A drafter for which no model is given, or needed, has no member of its own. The fleet is closed with
        these runners.

        drafter: Kind of drafter.
        options: Options of drafting.
        """
        models = self.models
        loop = asyncio.get_running_loop()
        compute = self._threads.executor_of(models.device)
        draft_loader, draft_recorder = await loop.run_in_executor(compute, self._drafter, drafter, options)
        recorder = StepRecorder(
            self._row_bytes(models.base, models.kv_cache_dtype, self._packed), draft_recorder
        )

        def worker(name: str, dialer: Dialer, compute: Executor) -> RingMember:
            """Make the worker, which shares the base's weights.

            name: Name of the worker, which is not used.
            dialer: Connects the worker to other members.
            compute: The worker's thread.
            """
            return Worker(self._worker, dialer, compute, observer=recorder)

        def drafting(name: str, dialer: Dialer, compute: Executor) -> RingMember:
            """Make the drafter.

            name: Name of the drafter, which is not used.
            dialer: Connects the drafter to other members.
            compute: The drafter's thread.
            """
            assert draft_loader is not None
            return Drafter(draft_loader, dialer, compute, draft_recorder)

        members: dict[str, MemberMaker] = {"worker-0": worker}
        if draft_loader:
            members["drafter"] = drafting
        embedded_options = EmbeddedOptions(
            replace(
                models, drafter=drafter, draft_model=models.drafts_with(drafter) if draft_loader else None
            ),
            RingOptions(page_rows=PAGE_ROWS, conduct=EngineConfig(prefix_cache=False)),
        )
        fleet = await EmbeddedFleet.start(embedded_options, members, threads=self._threads)
        self._stack.push_async_callback(fleet.close)
        return fleet, recorder

    def _drafter(
        self, drafter: DrafterName, options: DraftOptions
    ) -> tuple[drafters.DraftLoader | None, DraftRecorder | None]:
        """Load the model that drafts, and return (its loader, its recorder); (None, None) if no model drafts.

        The KV memory is that of SMALL_MODEL_ROWS positions for a small model, else HEAD_MEMORY bytes.

        drafter: Kind of drafter.
        options: Options of drafting.
        """
        models = self.models
        draft_folder = self.models.drafts_with(drafter)
        if draft_folder is None:
            return None, None
        memory = SMALL_MODEL_ROWS * self._row_bytes(draft_folder) if drafter == "model" else HEAD_MEMORY
        draft_options = replace(
            models, kv_memory=memory, drafter=drafter, draft_model=draft_folder, drafting=options
        )
        draft_loader = drafters.DraftLoader(draft_options, "drafter")
        weights = drafter_bytes(open_weights(draft_folder), self._drafting)
        return draft_loader, DraftRecorder(draft_loader.registration().row_bytes, weights)

    def _row_bytes(self, folder: Path, kv_dtype: KvDtype = "auto", packed: bool = False) -> int:
        """Return the KV bytes of one position in all layers.

        folder: Folder of the model.
        kv_dtype: Number format of the KV cache; "auto" is that of the model.
        packed: True if the weights are packed.
        """
        config = read_config(folder)
        itemsize = row_itemsize(config, self._numbers.itemsize, packed)
        return 2 * config.layers * config.kv_heads * row_bytes(config.head_dim, itemsize, kv_dtype)
