"""One sequence as stage 0 knows it: what of it is fed, committed, in flight and awaited."""

from __future__ import annotations

from dataclasses import dataclass, field

from specsot.core.frames import Draft, Opening, Outcome, PromptChunk, TreeSegment
from specsot.core.pages import Policy
from specsot.core.tree import Tree, chain, first_nodes, shallow, single
from specsot_model.core.kv_plan import policy_of, tree_depth_limit
from specsot_worker.core.pipeline import place_of


@dataclass(slots=True)
class SequenceState:
    """A sequence's place in its own life.

    fed:       prompt tokens composed into frames so far, the forked part included.
    committed: KV rows that will be final once every composed frame has passed.
    root:      the newest token, not fed yet; None until the prompt has been answered.
    step:      the tree that comes next (or is in flight); 0 while in the prompt.
    tree:      the one that is fed next; None: none has come.
    early_tree: the tree behind the next result, where it came before that result did.
    waiting_since: seconds; None when it waits for no tree.
    forced:    what the constraint wants behind the root: the tree where no better one comes.
    drafter_informed: the drafter hears of what is in flight, so that a tree will come.
    drafter:   name of the one that sent its last tree; empty: none has sent any; None: that one is lost.
    returned_at: when (seconds) its last result came; None before the first.
    root_only: its root is fed without drafts next, whatever comes.
    place:     its family, and itself.
    turn:      those of lower turns are fed first where rows run short.
    """

    opening: Opening
    prompt: tuple[int, ...]
    lease: int
    opened: bool = False
    fed: int = 0
    committed: int = 0
    root: int | None = None
    step: int = 0
    keep: tuple[int, ...] = ()
    in_flight: bool = False
    tree: Tree | None = None
    early_tree: Tree | None = None
    waiting_since: float | None = None
    forced: tuple[int, ...] = ()
    drafter_informed: bool = True
    drafter: str | None = ""
    returned_at: float | None = None
    turn: int = 0
    root_only: bool = False
    place: tuple[int, int] = field(init=False)
    policy: Policy | None = field(init=False)

    def __post_init__(self) -> None:
        self.place = place_of(self.opening)
        self.policy = policy_of(self.opening)
        self.fed = self.committed = self.opening.begun

    @property
    def prefilled(self) -> bool:
        return self.fed == self.opening.prompt

    @property
    def can_decode(self) -> bool:
        """It has a root, its last result is in, and its lease reaches that far."""
        return self.root is not None and not self.in_flight and self.committed < self.lease

    @property
    def wanted_rows(self) -> int:
        """Nodes of the tree that it would feed now."""
        return 1 + len(self.forced) if self.tree is None else len(self.tree.tokens)

    def next_chunk(self, rows: int) -> PromptChunk:
        """Up to `rows` more prompt tokens, but none beyond the next pruning; they count as fed."""
        start = self.fed
        if self.opening.pruning:
            rows = min(rows, tree_depth_limit(self.policy, start) or rows)
        behind = start - (self.opening.prompt - len(self.prompt))
        tokens = self.prompt[behind : behind + rows]
        self.fed = self.committed = start + len(tokens)
        return PromptChunk(self.opening.sequence, start, tokens, self.prefilled)

    def next_growth(self, rows: int) -> TreeSegment:
        """The tree that came, or the bonus token and what is forced, cut to `rows` nodes and to where its
        policy ends it; now in flight."""
        assert self.root is not None
        tree = self.tree or (chain((self.root, *self.forced)) if self.forced else single(self.root))
        levels = tree_depth_limit(self.policy, self.committed) if self.policy else None
        tree = first_nodes(tree if levels is None else shallow(tree, levels), rows)
        growth = TreeSegment(self.opening.sequence, self.step, self.committed, self.keep, tree)
        self.in_flight = True
        self.tree = None
        self.waiting_since = None
        self.root_only = False
        return growth

    def mark_sent(self, unasked: bool) -> bool:
        """It goes out now; unasked: no tree is asked for. Returns whether that uses up a tree of a rest."""
        self.drafter_informed = not unasked
        return self.opening.drafted and self.in_flight

    def apply_outcome(self, outcome: Outcome, now: float, awaits: bool = True) -> None:
        """Take the result of the final prompt chunk or of the tree in flight. awaits: a tree may come."""
        self.committed += len(outcome.accepted)
        self.keep = outcome.accepted
        if outcome.tokens:
            self.root = outcome.tokens[-1]
        self.root_only = not outcome.tokens
        self.step = outcome.step + 1
        self.in_flight = False
        self.forced = outcome.forced
        waits = awaits and self.opening.drafted and self.drafter_informed and not self.root_only
        self.waiting_since = now if waits else None
        self.returned_at = now
        early = self.early_tree
        self.early_tree = None
        if early:
            self.offer_tree(self.step, early)

    def contradicts(self, draft: Draft) -> bool:
        """It is for the tree that comes next, but grows from another token than was written."""
        return draft.step == self.step and not self.in_flight and draft.tree.tokens[0] != self.root

    def offer_tree(self, step: int, tree: Tree) -> bool:
        """Take a draft if it is for the tree that comes next, where the first one wins, or behind that.

        Drafts and results come from different members: a draft may overtake the result that it builds on.
        """
        if step == self.step + 1:
            self.early_tree = tree  # its root is not known yet: it is checked when it is used
            return True
        timely = not (self.in_flight or self.root_only) and step == self.step and self.tree is None
        if not timely or tree.tokens[0] != self.root:
            return False
        self.tree = tree
        self.waiting_since = None
        return True
