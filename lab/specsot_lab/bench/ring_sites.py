"""The rings that `specsot bench ring` sets up, and what each of them writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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

# Seconds of one layer of the mock by rows: flat up to a knee, as on GPUs.
LAYER: Curve = ((1, 0.0020), (32, 0.0022), (64, 0.0026), (256, 0.0090))
# Seconds of growing one level of the mock's trees, by rows.
GROWTH: Curve = ((1, 0.0010), (64, 0.0012))
# Probability that a draft of the mock is right.
SKILL: Final = 0.8
# The trees of the mock.
SHAPE: Final = TreeShape(depth=5, top_k=1, nodes=7)
# fp32 numbers of a hidden row of the mock: as many bytes as 4,096 numbers in bf16.
HIDDEN: Final = 2048
# fp32 numbers of a feature row of the mock, likewise.
FUSED: Final = 2048
# Titles of the branches, in turns.
TITLES: Final = (
    "What it is",
    "Where it comes from",
    "How it works",
    "What it is good for",
    "Limits",
    "Outlook",
)


# The constants of the mock, as the results report them.
MOCK: Final = {
    "layers": 8,
    "layer_seconds_by_rows": LAYER,
    "level_seconds_by_rows": GROWTH,
    "skill": SKILL,
    "hidden_bytes": 4 * HIDDEN,
    "fused_bytes": 4 * FUSED,
}


def small_weights() -> DraftModelOptions:
    """Return options that name the bundled small pair, in fp32."""
    return DraftModelOptions(small_pair() / "base", dtype="fp32", draft_model=small_pair() / "eagle3")


@dataclass(frozen=True, slots=True)
class RingTask:
    """What a ring writes.

    prefix: Token ids that all branches share.
    suffixes: Token ids of each branch after the prefix.
    tokens: Number of tokens of every branch after its first one, for ways without drafts.
    drafted_tokens: The same for ways with drafts.
    expected: Returns the first tokens of a branch from its number and their count; None: they are not known
        in advance.
    """

    prefix: Sequence[int]
    suffixes: Sequence[Sequence[int]]
    tokens: int
    drafted_tokens: int
    expected: Callable[[int, int], Sequence[int]] | None = None

    def job(self, way: str) -> BranchJob:
        """Return what is written in one way.

        way: "plain", "eagle", "sot" or "both": the first branch alone, the first branch with drafts, all
            branches, or all branches with drafts.

        Any other way counts as "plain".
        """
        uses_drafts = way in ("eagle", "both")
        uses_branches = way in ("sot", "both")
        suffixes = self.suffixes if uses_branches else self.suffixes[:1]
        return BranchJob(
            self.prefix, suffixes, self.drafted_tokens if uses_drafts else self.tokens, uses_drafts
        )


def set_up(
    name: str, stages: int, branches: int, tokens: int, weights: DraftModelOptions
) -> tuple[Site, RingTask]:
    """Return a ring, and what it writes.

    name: "mock", "model" or "answers". The last two are the same ring.
    stages: Number of stages.
    branches: Number of branches.
    tokens: Tokens of every branch, for ways without drafts.
    weights: Models of the other rings; not used for "mock".

    Any other name gives the mock. Raises whatever reading the model's directory raises.
    """
    if name in ("model", "answers"):
        return model_ring(stages, branches, tokens, weights)
    mock = Simulator(
        small_pair() / "base", layer=LAYER, growth=GROWTH, skill=SKILL, shape=SHAPE, width=HIDDEN, fused=FUSED
    )
    return mock_ring(stages, branches, tokens, mock)


def mock_ring(stages: int, branches: int, tokens: int, mock: Simulator) -> tuple[Site, RingTask]:
    """Return a ring of stages of known cost, and its task, whose tokens are known in advance.

    stages: Number of stages.
    branches: Number of branches.
    tokens: Tokens of every branch, for ways without drafts; twice as many are written with drafts.
    mock: The simulator that makes the members.

    Branches differ in the three tokens of their suffixes. The prefix has 40 tokens.
    """

    def worker(name: str, dialer: Dialer, compute: Executor, observer: WorkerObserver) -> RingMember:
        """Return a worker.

        name: Name of the worker, which is also its address.
        dialer: Connects it to other members.
        compute: The executor of its stage.
        observer: Observes it.
        """
        return mock.worker(name, name, dialer, compute, observer)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        """Return the drafter.

        name: Name of the drafter, which is also its address.
        dialer: Connects it to other members.
        compute: The executor of its engine.
        """
        return mock.drafter(name, name, dialer, compute)

    prefix = tuple(range(400, 440))
    suffixes = tuple((500 + n, 600 + n, 700 + n) for n in range(branches))

    def expected(branch: int, tokens: int) -> Sequence[int]:
        """Return the tokens that a branch writes without speculation.

        branch: Number of the branch.
        tokens: Number of tokens.
        """
        return mock.language_model.write((*prefix, *suffixes[branch]), tokens)

    task = RingTask(prefix, suffixes, tokens, 2 * tokens, expected)
    return Site(mock.model, stages, worker, drafter), task


def model_ring(stages: int, branches: int, tokens: int, weights: DraftModelOptions) -> tuple[Site, RingTask]:
    """Return a ring of a model with its head, and its task: the branches of a plan, whose tokens are not
    known in advance.

    stages: Number of stages.
    branches: Number of branches.
    tokens: Tokens of every branch, for ways without drafts; twice as many are written with drafts.
    weights: The model, its head and their precision.

    Nothing is loaded until the members are made, except the tokenizer, with which the prompts are made.
    """

    def worker(name: str, dialer: Dialer, compute: Executor, observer: WorkerObserver) -> RingMember:
        """Return a worker, which loads its layers.

        name: Name of the worker.
        dialer: Connects it to other members.
        compute: The executor of its stage.
        observer: Observes it.
        """
        from specsot_worker.loader import StageLoader
        from specsot_worker.worker import Worker

        return Worker(StageLoader(weights, name), dialer, compute, observer=observer)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        """Return the drafter, which loads its head.

        name: Name of the drafter.
        dialer: Connects it to other members.
        compute: The executor of its engine.
        """
        from specsot_drafter.drafter import Drafter
        from specsot_drafter.loader import DraftLoader

        return Drafter(DraftLoader(weights, name), dialer, compute)

    prefix, suffixes = _branch_turns(weights.base, branches)
    task = RingTask(prefix, suffixes, tokens, 2 * tokens)
    return Site(weights.base, stages, worker, drafter), task


def plan_questions(base: Path) -> tuple[str, str]:
    """Return two questions that the model plans. The small pair was trained on topics of its own, and gets
    the first two of these.

    base: Directory of the base model.

    Any other model gets a question on regular exercise and one on working from home.
    """
    if not is_small(base):
        return "What are the benefits of regular exercise?", "What are the advantages of working from home?"
    first, second = (small_pair() / "topics.txt").read_text(encoding="utf-8").splitlines()[:2]
    return first, second


def _branch_turns(base: Path, branches: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the token ids of the prefix that all branches share, and those of each branch after it.

    base: Directory of the base model.
    branches: Number of branches.

    The prefix is what the prompts of all branches have in common, as the master computes it. Titles repeat
    after as many branches as TITLES has.
    """
    from specsot_master.prompts import Prompts
    from specsot_master.text import Text

    question = plan_questions(base)[0]
    conversation = Prompts(base, Text(base)).plan((Message("user", question),), PlanRules())
    points = [Point(n + 1, 64, TITLES[n % len(TITLES)]) for n in range(branches)]
    turns = [conversation.branch(point, points, (), point.length) for point in points]
    shared = min(turn.shared for turn in turns)
    return turns[0].tokens[:shared], tuple(turn.tokens[shared:] for turn in turns)
