"""The state of one sequence at stage 0: what has been fed, committed, launched and awaited."""

from __future__ import annotations

from dataclasses import dataclass, field

from specsot.core.frames import Draft, Opening, Outcome, PromptChunk, TreeSegment
from specsot.core.pages import Policy
from specsot.core.run_ahead import (
    MAX_PASSES,
    OPENING_PASSES,
    OPENING_TOKENS,
    can_run_ahead,
    next_max_passes,
)
from specsot.core.tree import Tree, chain, first_nodes, shallow, single
from specsot_model.core.kv_plan import policy_of, tree_depth_limit
from specsot_worker.core.pipeline import place_of


@dataclass(slots=True)
class SequenceState:
    """State of one sequence as the sequencer of stage 0 knows it.

    A *draft round* is one tree of the sequence and its verification. The *root* of a tree is the newest token
    of the sequence, which has no KV before that tree is fed.

    opening: What every stage must know about the sequence.
    prompt: Prompt token ids, without the tokens that the sequence shares with the source of its fork.
    lease: Position up to which the sequence may decode; the master moves it forward. For a prefix, which does
        not decode, it is the position up to which the prompt may be fed; the master moves it back to
        interrupt the prefill of a prompt that no request needs any more.
    opened: True once a composed frame has carried the opening.
    fed: Number of prompt tokens that have been composed into frames, including forked and reused ones.
    committed: Number of KV slots that will be final once every composed prompt chunk has passed. The tree in
        flight does not count.
    root: The newest token: the root of the tree that is in flight or comes next. None until the prompt has
        produced its first token.
    draft_round: Number of the draft round that is in flight or comes next. It is 0 while the prompt is being
        fed.
    keep: Accepted node numbers of the last verified tree, root first. The next tree frame carries them, so
        that every stage moves the KV of these nodes down to the committed end. Empty after the prompt, and if
        the last verification accepted nothing.
    in_flight: True while the tree of the current draft round is in a frame whose result has not arrived.
    tree: The tree that the next frame carries. None if no usable tree has arrived.
    next_tree: A tree for the draft round after the current one, which arrived before the result that it
        builds on. None if there is no such tree.
    waiting_since: Time in seconds since which the sequence waits for a tree. None if it does not wait.
    forced: Ids of the tokens after the root that the grammar leaves no choice about. They are drafted as a
        chain if no tree arrives. Empty if nothing is forced.
    drafter_informed: False if drafting was paused or resuming when the newest segment was launched. The
        drafter is not asked for a tree then, so the sequence does not wait for one.
    drafter: Name of the drafter that sent the sequence's last tree. Empty if no drafter has sent one yet,
        None if that drafter is lost.
    returned_at: Time in seconds at which the last result arrived. None before the first result.
    root_only: True if the next frame feeds the root without drafts, because the last verification accepted
        nothing.
    place: The pair (family, sequence id), see `place_of`. Trees of a frame are sorted by it.
    policy: Which KV the sequence keeps: a window, pruning, or None for all of it.
    runs_ahead: True if one frame may feed several tokens of the sequence, see `run_ahead`.
    max_passes: Maximum number of forward passes of the sequence's next frame, as `next_max_passes` says;
        `pass_limit` is a second bound.
    replayed: Number of first tokens whose KV is complete, or that frames with `replay` have carried so far.
    turn: Place of the sequence in the order in which trees get their nodes: when a frame has too few tokens
        for all trees, sequences with a lower turn come first. 0 until a tree was scheduled without being
        truncated.
    """

    opening: Opening
    prompt: tuple[int, ...]
    lease: int
    opened: bool = False
    fed: int = 0
    committed: int = 0
    root: int | None = None
    draft_round: int = 0
    keep: tuple[int, ...] = ()
    in_flight: bool = False
    tree: Tree | None = None
    next_tree: Tree | None = None
    waiting_since: float | None = None
    forced: tuple[int, ...] = ()
    drafter_informed: bool = True
    drafter: str | None = ""
    returned_at: float | None = None
    turn: int = 0
    root_only: bool = False
    place: tuple[int, int] = field(init=False)
    policy: Policy | None = field(init=False)
    runs_ahead: bool = field(init=False)
    max_passes: int = MAX_PASSES
    replayed: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive the other fields from the opening. Forked and reused tokens count as fed."""
        self.place = place_of(self.opening)
        self.runs_ahead = can_run_ahead(self.opening)
        self.policy = policy_of(self.opening)
        self.fed = self.committed = self.opening.num_computed_tokens
        reused = self.opening.reused
        self.replayed = self.opening.forked if reused and reused.replay else self.fed

    @property
    def family(self) -> int:
        """The family whose sequences share frames if possible, see `place_of`."""
        return self.place[0]

    @property
    def pass_limit(self) -> int:
        """Maximum number of forward passes of a frame with the sequence's next tokens, whatever it has gained
        by the last frame: OPENING_PASSES for a branch with fewer than OPENING_TOKENS tokens, 1 for a sequence
        that cannot run ahead, else MAX_PASSES.
        """
        if not self.runs_ahead:
            return 1
        return OPENING_PASSES if self._begins_branch else MAX_PASSES

    @property
    def shapes_plan(self) -> bool:
        """True if the sequence's next tokens decide which sequences are opened or closed for a plan: the
        tokens of a plan, and the first OPENING_TOKENS ones of a branch. False for other sequences, and for a
        plan that may become a direct answer, because that may be long.
        """
        plan = self.opening.plan
        return self._begins_branch if plan is None else not plan.direct

    @property
    def _begins_branch(self) -> bool:
        """True for a branch of a plan that has generated fewer than OPENING_TOKENS tokens."""
        opening = self.opening
        generated = self.committed - (opening.prompt - opening.generated)
        return opening.soft_end is not None and generated < OPENING_TOKENS

    @property
    def decoding(self) -> bool:
        """True if the sequence decodes and its whole prompt has been composed into frames."""
        return self.opening.decodes and self.prefilled

    @property
    def prefilled(self) -> bool:
        """True once every prompt token has been composed into a frame."""
        return self.fed == self.opening.prompt

    @property
    def num_unfed(self) -> int:
        """Number of prompt tokens that are still to be fed: those of a prefix only up to its lease."""
        prompt = self.opening.prompt
        return max((prompt if self.opening.decodes else min(prompt, self.lease)) - self.fed, 0)

    @property
    def num_unreplayed(self) -> int:
        """Number of reused tokens that frames with `replay` must still carry, before the sequence's own."""
        return self.opening.num_computed_tokens - self.replayed

    def next_replay(self, max_tokens: int) -> PromptChunk:
        """Return the next chunk of reused tokens, and count its tokens as replayed.

        max_tokens: Maximum number of tokens of the chunk.

            # forked 6 tokens, reused tokens of positions 6..9, max_tokens 3 -> positions 6..8, then 9
        """
        assert self.opening.reused is not None
        start = self.replayed
        offset = start - self.opening.forked
        tokens = self.opening.reused.tokens[offset : offset + max_tokens]
        self.replayed += len(tokens)
        return PromptChunk(self.opening.sequence, start, tokens, final=False)

    @property
    def can_decode(self) -> bool:
        """True if the sequence has a root, no tree in flight, and a lease that reaches past its committed
        tokens.
        """
        return self.root is not None and not self.in_flight and self.committed < self.lease

    @property
    def next_tree_size(self) -> int:
        """Number of nodes of the tree that the sequence would feed now, before any truncation: the stored
        tree's, or those of the root and the forced tokens.
        """
        return 1 + len(self.forced) if self.tree is None else len(self.tree.tokens)

    def next_chunk(self, max_tokens: int) -> PromptChunk:
        """Return the next prompt chunk, and count its tokens as fed and committed. If no prompt token is
        left, the chunk is empty.

        max_tokens: Maximum number of tokens of the chunk.

        With pruning, a chunk ends at the next position at which pruning is due.

        For example:

            # prompt of 10 tokens, 6 of them forked: self.prompt holds tokens 6..9.
            # fed = 8, max_tokens = 512 -> offset 8 - (10 - 4) = 2 -> tokens 8 and 9, final

        The chunk is final if no prompt token is left after it.
        """
        start = self.fed
        if self.opening.pruning:
            max_tokens = min(max_tokens, tree_depth_limit(self.policy, start) or max_tokens)
        offset = start - (self.opening.prompt - len(self.prompt))
        tokens = self.prompt[offset : offset + max_tokens]
        self.fed = self.committed = start + len(tokens)
        return PromptChunk(self.opening.sequence, start, tokens, self.prefilled)

    def next_tree_segment(self, max_nodes: int) -> TreeSegment:
        """Return the next tree segment, and mark it as in flight. The sequence must have a root, and no tree
        in flight.

        The tree is the first of these that exists: the drafter's tree, the root followed by the forced
        tokens, the root alone. It is cut to the depth that the KV policy allows and to its first nodes.

        max_nodes: Maximum number of nodes, at least 1 for the root.

        Afterwards no tree is stored, the sequence does not wait for one, and `root_only` is False. The
        stored tree of the next draft round stays.
        """
        assert self.root is not None
        assert not self.in_flight
        tree = self.tree
        if tree is None:
            tree = chain((self.root, *self.forced)) if self.forced else single(self.root)
        levels = tree_depth_limit(self.policy, self.committed) if self.policy else None
        tree = tree if levels is None else shallow(tree, levels)
        tree = first_nodes(tree, max_nodes) if len(tree.tokens) > max_nodes else tree
        tree_segment = TreeSegment(self.opening.sequence, self.draft_round, self.committed, self.keep, tree)
        self.in_flight = True
        self.tree = None
        self.waiting_since = None
        self.root_only = False
        return tree_segment

    def apply_outcome(self, outcome: Outcome, now: float, awaits_drafts: bool = True) -> None:
        """Apply the result of the final prompt chunk or of the tree in flight.

        outcome: Accepted nodes and new tokens of this sequence. An outcome without tokens accepted nothing:
            its root is fed once more, alone.
        now: Time in seconds at which the result arrived.
        awaits_drafts: False if the drafter has already answered this result, so that no tree is awaited.

        A tree that arrived before this result is offered now.

        The sequence waits for a tree from `now` on only if it is drafted, the drafter was informed of the
        newest segment, a tree is awaited, and the outcome has tokens. The next draft round is the outcome's
        plus one. `keep` becomes the accepted nodes, and the root the last new token. `max_passes` follows
        how many tokens of a frame of several passes were accepted.
        """
        self.in_flight = False
        self.committed += len(outcome.accepted)
        self.keep = outcome.accepted
        if outcome.tokens:
            self.root = outcome.tokens[-1]
        self.root_only = not outcome.tokens
        self.draft_round = outcome.draft_round + 1
        self.forced = outcome.forced
        # After a frame of a single pass, `next_max_passes` changes only a limit of 1. So most frames skip it.
        if outcome.tokens and (outcome.extra_passes or self.max_passes == 1):
            self.max_passes = next_max_passes(self.max_passes, 1 + outcome.extra_passes, len(outcome.tokens))
        waits = awaits_drafts and self.opening.drafted and self.drafter_informed and not self.root_only
        self.waiting_since = now if waits else None
        self.returned_at = now
        early_tree = self.next_tree
        self.next_tree = None
        if early_tree:
            self.offer_tree(self.draft_round, early_tree)

    def has_wrong_root(self, draft: Draft) -> bool:
        """Return whether a draft is for the draft round that comes next, but its tree grows from another
        token than the sequence's newest one. Return False for drafts of other rounds, and while the round's
        tree is in flight.

        draft: The tree that the drafter proposed for this sequence, with its draft round.

        While the prompt is being fed there is no newest token, so that a draft of round 0 has a wrong root.
        """
        if draft.tree.tokens[0] == self.root or draft.draft_round != self.draft_round:
            return False
        return not self.in_flight

    def offer_tree(self, draft_round: int, tree: Tree) -> bool:
        """Store a tree for a draft round, and return whether it was stored: False if it was dropped.

        draft_round: Number of the draft round for which the drafter made the tree.
        tree: The tree: token id and parent of each node. Its node 0 is the root.

        Drafts and results are sent by different members, so a draft may arrive before the result that it
        builds on: a tree for round `self.draft_round + 1` is stored as `next_tree`. A tree for the current
        round is stored only if its round is not in flight, no tree is stored yet (the first one wins), the
        root is not to be fed alone, and its root is the sequence's root. Any other tree is dropped.

        A tree that is stored for the current round ends the waiting. A tree for the next
        round replaces one that is stored for it.
        """
        if draft_round == self.draft_round + 1:
            # The root of this round is not known yet; `apply_outcome` offers the tree again, which checks it.
            self.next_tree = tree
            return True
        timely = (
            not (self.in_flight or self.root_only) and draft_round == self.draft_round and self.tree is None
        )
        if not timely or tree.tokens[0] != self.root:
            return False
        self.tree = tree
        self.waiting_since = None
        return True
