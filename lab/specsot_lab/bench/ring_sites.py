"""The rings that `specsot bench ring` sets up, and what each is asked to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from specsot.core.skeleton import PlanRules, Point
from specsot.members import Curve, TreeShape
from specsot.params import Message
from specsot.service.membership import RingMember
from specsot.service.options import DraftModelOptions
from specsot.transport.links import Dialer
from specsot_app.fleet.demo import is_small, small_pair
from specsot_lab.bench.ring_fleet import BranchJob, Site
from specsot_lab.simulator import Simulator
from specsot_worker.observer import WorkerObserver

LAYER: Curve = ((1, 0.0020), (32, 0.0022), (64, 0.0026), (256, 0.0090))  # flat up to a knee, as on GPUs
GROWTH: Curve = ((1, 0.0010), (64, 0.0012))
# Probability that a draft of the mock is right.
SKILL = 0.8
SHAPE = TreeShape(depth=5, top_k=1, nodes=7)
# fp32 numbers of a row: as many bytes as 4,096 in bf16
HIDDEN = 2048
FUSED = 2048
TITLES = ("What it is", "Where it comes from", "How it works", "What it is good for", "Limits", "Outlook")


MOCK = {
    "layers": 8,
    "layer_seconds_by_rows": LAYER,
    "level_seconds_by_rows": GROWTH,
    "skill": SKILL,
    "hidden_bytes": 4 * HIDDEN,
    "fused_bytes": 4 * FUSED,
}


def small_weights() -> DraftModelOptions:
    """Return options of the bundled small pair in fp32."""
    return DraftModelOptions(small_pair() / "base", dtype="fp32", draft_model=small_pair() / "eagle3")


@dataclass(frozen=True, slots=True)
class RingTask:
    """What is written. tokens: of every branch behind its first, in steps that bring one; drafted: in others.

    expected: what branch n begins with, where that is known beforehand.
    """

    prefix: Sequence[int]
    suffixes: Sequence[Sequence[int]]
    tokens: int
    drafted: int
    expected: Callable[[int, int], Sequence[int]] | None = None

    def job(self, way: str) -> BranchJob:
        """Return what is to be written. way: "plain", "eagle", "sot" or "both": with drafts, with branches,
        or with both.
        """
        drafts = way in ("eagle", "both")
        branches = way in ("sot", "both")
        suffixes = self.suffixes if branches else self.suffixes[:1]
        return BranchJob(self.prefix, suffixes, self.drafted if drafts else self.tokens, drafts)


def set_up(
    name: str, stages: int, branches: int, tokens: int, weights: DraftModelOptions
) -> tuple[Site, RingTask]:
    """Return a ring by its name, and what it is asked to write.

    name: "mock" or "model". stages: their number. branches: their number. tokens: of every branch, in steps
        that bring one. weights: of "model".
    """
    if name == "model":
        return model_ring(stages, branches, tokens, weights)
    mock = Simulator(
        small_pair() / "base", layer=LAYER, growth=GROWTH, skill=SKILL, shape=SHAPE, width=HIDDEN, fused=FUSED
    )
    return mock_ring(stages, branches, tokens, mock)


def mock_ring(stages: int, branches: int, tokens: int, mock: Simulator) -> tuple[Site, RingTask]:
    """Return a ring of stages of known cost, and its task, whose text is known beforehand. mock: the
    simulator. The others are those of `set_up`.
    """

    def worker(name: str, dialer: Dialer, compute: Executor, watch: WorkerObserver) -> RingMember:
        """Make a worker. watch: observes it."""
        return mock.worker(name, name, dialer, compute, watch)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        """Make the drafter."""
        return mock.drafter(name, name, dialer, compute)

    prefix = tuple(range(400, 440))
    suffixes = tuple((500 + n, 600 + n, 700 + n) for n in range(branches))

    def expected(branch: int, tokens: int) -> Sequence[int]:
        """Return the `tokens` tokens that this branch writes without speculation."""
        return mock.language_model.write((*prefix, *suffixes[branch]), tokens)

    task = RingTask(prefix, suffixes, tokens, 2 * tokens, expected)
    return Site(mock.model, stages, worker, drafter), task


def model_ring(stages: int, branches: int, tokens: int, weights: DraftModelOptions) -> tuple[Site, RingTask]:
    """Return a ring of a model with its head, and its task: the branches of a plan. The arguments are those
    of `set_up`.
    """

    def worker(name: str, dialer: Dialer, compute: Executor, watch: WorkerObserver) -> RingMember:
        """Make a worker, which loads its layers. watch: observes it."""
        from specsot_worker.loader import StageLoader
        from specsot_worker.worker import Worker

        return Worker(StageLoader(weights, name), dialer, compute, observer=watch)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        """Make the drafter, which loads its head."""
        from specsot_drafter.drafter import Drafter
        from specsot_drafter.loader import DraftLoader

        return Drafter(DraftLoader(weights, name), dialer, compute)

    prefix, suffixes = _branch_turns(weights.base, branches)
    task = RingTask(prefix, suffixes, tokens, 2 * tokens)
    return Site(weights.base, stages, worker, drafter), task


def question(base: Path) -> str:
    """Return a question that the model plans; the small pair was taught on topics of its own. base: the
    model's directory.
    """
    if not is_small(base):
        return "What are the benefits of regular exercise?"
    return (small_pair() / "topics.txt").read_text(encoding="utf-8").splitlines()[0]


def _branch_turns(base: Path, branches: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the token ids of the prefix that all branches share, and those of each branch after it. base:
    the model's directory. branches: their number.
    """
    from specsot_master.prompts import Prompts
    from specsot_master.text import Text

    conversation = Prompts(base, Text(base)).plan((Message("user", question(base)),), PlanRules())
    points = [Point(n + 1, 64, TITLES[n % len(TITLES)]) for n in range(branches)]
    turns = [conversation.branch(point, points, (), point.length) for point in points]
    shared = min(turn.shared for turn in turns)
    return turns[0].tokens[:shared], tuple(turn.tokens[shared:] for turn in turns)
