"""Simulates a ring that has several frames of one sequence in flight, on recorded drafts. Pure.

With a single sequence, most stages of a pipeline are idle: the root of the next tree frame is a token that is
known only when the result of the previous frame arrives. A *child frame* does not wait for that result: it
holds further nodes below nodes that are in flight. The last stage verifies the frames in order. If the next
token of the text is no node in flight, that token becomes the root of a new chain, and all frames in flight
are dropped.

Every stage has a host of its own. The drafter runs on the host of the last stage, or on one next to it. The
simulation favours chains: once the last stage drops a frame, no stage computes that frame any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specsot.core.cost_curve import CostCurve

# Nodes of a level that the head feeds when trees are recorded.
FED_NODES: Final = 10


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The candidate tree that a head grew after one token, best node first; parents precede children.

    tokens:  Token id of each node, [n].
    parents: Number of each node's parent, [n]: 0 is the root, p + 1 is node p.
    depths:  Distance of each node from the root, [n], at least 1.
    scores:  Cumulative log-probability of each node, [n], falling.
    """

    tokens: NDArray[Any]
    parents: NDArray[Any]
    depths: NDArray[Any]
    scores: NDArray[Any]
    # (token, parent, depth) of each node: Python's numbers are read faster one by one than an array's.
    nodes: list[tuple[int, int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the list of nodes."""
        columns = (self.tokens.tolist(), self.parents.tolist(), self.depths.tolist())
        object.__setattr__(self, "nodes", list(zip(*columns)))


@dataclass(frozen=True, slots=True)
class DraftedText:
    """An answer, and what the head would have drafted at each of its tokens.

    tokens: Token ids of the answer, greedily decoded.
    trees:  The tree that grows after each token, the first token included. The last token may have none.
    """

    tokens: tuple[int, ...]
    trees: tuple[DraftTree, ...]


@dataclass(frozen=True, slots=True)
class RingCosts:
    """Times of a ring's steps and drafts, in seconds.

    stages: Number of stages.
    hop: From one host to the next; a step has `stages` of them, the way back to stage 0 included.
    step: One forward pass through all stages, by the frame's rows, without hops. Every stage takes an equal
        part of it.
    level: One level of a draft tree, by the rows that the head computes.
    frame: Overhead of a stage's host per frame, in addition to computing: receiving, decoding, encoding,
        sending.
    proposal: Overhead of the drafter's host per proposal, in addition to its levels.
    shared_host: True: the last stage and the drafter compute on one host, one after the other. False: the
        drafter has a host of its own, next to that of the last stage.
    """

    stages: int
    hop: float
    step: CostCurve
    level: CostCurve
    frame: float = 0.0
    proposal: float = 0.0
    shared_host: bool = True

    def stage(self, rows: int) -> float:
        """Return the seconds that one stage is busy with a frame.

        rows: Rows of the frame.
        """
        return self.step.at(rows) / self.stages + self.frame

    def growth(self, levels: int, nodes: int) -> float:
        """Return the seconds in which a tree grows. The first level takes one row, every further one as many
        as the tree has nodes, at most FED_NODES.

        levels: Levels of the tree; 0: nothing grows.
        nodes: Nodes of the tree.
        """
        if not levels:
            return 0.0
        further = self.level.at(max(min(nodes, FED_NODES), 1))
        return self.proposal + self.level.at(1) + (levels - 1) * further

    def round_trip(self, rows: int) -> float:
        """Return the seconds from the sending of a frame at stage 0 until its result is back there.

        rows: Rows of the frame.
        """
        return self.stages * (self.hop + self.stage(rows))


@dataclass(frozen=True, slots=True)
class ChainPolicy:
    """How a sequence is drafted.

    frames: Maximum number of frames in flight whose nodes may still be accepted. 1: a single tree, which is
        what the product sends.
    nodes: Nodes of each frame, without the root of a chain.
    levels: Maximum distance of a node from the newest known token.
    root_first: True: the root of a chain is sent alone, before its first nodes are drafted. Needs two frames.
    spread: True: the frames of a chain are spread evenly over the time of a round trip, so that every frame
        but the first knows the results of some that came before. False: frames are sent as soon as they are
        drafted, while fewer than `frames` are in flight.
    free_drafting: True: drafting takes no time, as if it could be hidden completely.
    one_draft: True: the frames of a chain are one tree that was cut into frames, all sent at once. The next
        tree is drafted after the results of all of them, so that no draft begins at a token that is known
        only from a result of the same chain.
    """

    frames: int
    nodes: int
    levels: int
    root_first: bool = False
    spread: bool = True
    free_drafting: bool = False
    one_draft: bool = False


@dataclass(frozen=True, slots=True)
class WrittenInFrames:
    """Totals of writing some texts.

    tokens: Tokens after the first one of each text.
    seconds: Simulated seconds.
    frames: Frames that were sent.
    rows: Rows of all frames.
    """

    tokens: int
    seconds: float
    frames: int
    rows: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def __add__(self, other: WrittenInFrames) -> WrittenInFrames:
        """Return the sums of both."""
        return WrittenInFrames(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.frames + other.frames,
            self.rows + other.rows,
        )


class SentNode:
    """A node that was sent, or the root of a chain that is to be sent.

    frame: Number of the frame that holds the node; None: no frame yet.
    children: The nodes below that were sent, by their tokens.
    """

    __slots__ = ("children", "frame")

    def __init__(self, frame: int | None = None) -> None:
        """Make a node without children.

        frame: Number of the frame that holds the node; None: no frame yet.
        """
        self.frame = frame
        self.children: dict[int, SentNode] = {}

    def live_frames(self, verified: int) -> set[int]:
        """Return the numbers of the frames that hold this node or one below it, and whose results are due.

        verified: Number of the newest frame whose result is known.
        """
        frames = set[int]()
        nodes: list[SentNode] = [self]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.frame is not None and node.frame > verified:
                frames.add(node.frame)
        return frames


class ChainRun:
    """Writes one text in simulated time. The drafter knows a result as soon as the last stage has it."""

    def __init__(self, text: DraftedText, costs: RingCosts, policy: ChainPolicy) -> None:
        """Begin with the first token of the text known, and nothing sent.

        text: The text, with its recorded drafts.
        costs: Times of the ring.
        policy: How the text is drafted.
        """
        self._text = text
        self._costs = costs
        self._policy = policy
        # Position of the newest known token, and its node.
        self._known = 0
        self._root = SentNode()
        # Both at the time when the newest draft was started.
        self._drafted = 0
        self._draft_root = self._root
        # Number of the newest frame whose result is known.
        self._verified = 0
        self._frames = self._rows = 0
        # When each stage but the last will have computed all frames that were sent, in seconds.
        self._free = [0.0] * (costs.stages - 1)
        # When the newest frame was sent, in seconds.
        self._sent_at = -np.inf
        # Frames on their way to the last stage: (seconds of arrival, number, rows).
        self._arrivals: list[tuple[float, int, int]] = []
        # The frame that the last stage computes: (seconds of its end, number).
        self._verifying: tuple[float, int] | None = None
        # Earliest time at which the next frame may be drafted; None: not before the next result.
        self._due: float | None = 0.0
        # When the draft that was started will be complete; None: none was started.
        self._drafting: float | None = None

    def run(self) -> WrittenInFrames:
        """Write the text, and return the totals."""
        now = 0.0
        while True:
            self._start_work(now)
            now = min(self._next_times())
            if self._verifying and self._verifying[0] <= now:
                missed = self._verify(self._verifying[1])
                self._verifying = None
                if self._known >= len(self._text.tokens) - 1:
                    return WrittenInFrames(self._known, now, self._frames, self._rows)
                if missed:
                    # From now on, no host computes a dropped frame.
                    self._free = [min(seconds, now) for seconds in self._free]
                    self._arrivals.clear()
                    self._verified = self._frames
                    self._drafting = None
                if self._drafting is None:
                    self._due = self._next_due(now)
            elif self._drafting is not None and self._drafting <= now:
                self._drafting = None
                sent = self._send_next(now)
                for _ in range(self._policy.frames - 1 if self._policy.one_draft else 0):
                    self._send_next(now)
                # Start another draft if a result has arrived since this one was started. A tree that has no
                # further nodes to send gains none until the next result.
                self._due = self._next_due(now) if sent or self._drafted < self._known else None

    def _start_work(self, now: float) -> None:
        """Start the drafting and the verification that are due, if their hosts are free. On a shared host,
        drafting has priority, because the earlier stages would otherwise be idle.

        now: Simulated time, in seconds.
        """
        shared = self._costs.shared_host
        busy = self._drafting is not None or (shared and self._verifying is not None)
        if not busy and self._due is not None and self._due <= now:
            self._due = None
            self._drafted = self._known
            self._draft_root = self._root
            opens_bare = self._bare and self._root.frame is None
            self._drafting = now + (0.0 if opens_bare else self._growth())
        busy = self._verifying is not None or (shared and self._drafting is not None)
        if not busy and self._arrivals and self._arrivals[0][0] <= now:
            _, frame, rows = heappop(self._arrivals)
            self._verifying = now + self._costs.stage(rows), frame

    def _next_times(self) -> Iterator[float]:
        """Yield at least one time: when some work ends, or can start because its host is idle."""
        if self._verifying:
            yield self._verifying[0]
        if self._drafting is not None:
            yield self._drafting
        idle = self._verifying is None and self._drafting is None
        if self._arrivals and (idle if self._costs.shared_host else self._verifying is None):
            yield self._arrivals[0][0]
        if self._due is not None and (idle if self._costs.shared_host else self._drafting is None):
            yield self._due

    def _verify(self, frame: int) -> bool:
        """Follow the text as far as the nodes of this frame and earlier ones reach. Return whether the newest
        known token is in no frame.

        frame: Number of the frame that was verified.
        """
        self._verified = frame
        last = len(self._text.tokens) - 1
        while self._known < last and self._root.frame is not None and self._root.frame <= frame:
            self._known += 1
            self._root = self._root.children.get(self._text.tokens[self._known]) or SentNode()
        return self._root.frame is None

    def _next_due(self, now: float) -> float | None:
        """Return the earliest time at which the next frame may be drafted; None if as many frames as allowed
        are in flight.

        now: Simulated time, in seconds.
        """
        policy = self._policy
        if self._root.frame is None:
            return now
        if policy.one_draft:
            return None
        live = self._root.live_frames(self._verified)
        if len(live) >= policy.frames:
            return None
        if not policy.spread or (policy.root_first and len(live) == 1):
            return now
        spacing = self._costs.round_trip(policy.nodes) / policy.frames
        return max(now, self._sent_at + spacing - self._growth())

    def _growth(self) -> float:
        """Return the seconds that it takes to grow the tree of the newest known token."""
        policy = self._policy
        if policy.free_drafting:
            return 0.0
        nodes = policy.nodes * policy.frames
        width = nodes if policy.one_draft else policy.nodes
        return self._costs.growth(min(policy.levels, nodes), width)

    def _choose(self) -> list[tuple[int, SentNode, SentNode]]:
        """Return the nodes that the newest draft adds to the chain, parents first.

        Each entry is (token, the parent's node, the new node). The draft consists of the likeliest nodes that
        were not sent. Nodes that results have ruled out since the draft was started are left out.
        """
        text = self._text
        if self._drafted >= len(text.trees):
            return []
        follows = text.tokens[self._drafted : self._known + 1]
        # By number in the draft's tree, 0 for its root: the node that was sent or is new; None: neither.
        places: list[SentNode | None] = [self._draft_root]
        # By number: whether the known tokens may lead to the node.
        alive = [True]
        chosen = list[tuple[int, SentNode, SentNode]]()
        num_new = 0
        for token, parent, depth in text.trees[self._drafted].nodes:
            above = places[parent]
            place = above.children.get(token) if above is not None else None
            alive.append(alive[parent] and (depth >= len(follows) or token == follows[depth]))
            if above is not None and place is None and depth <= self._policy.levels:
                place = SentNode()
                num_new += 1
                if alive[-1]:
                    chosen.append((token, above, place))
            places.append(place)
            if num_new == self._policy.nodes:
                break
        return chosen

    def _send_next(self, now: float) -> bool:
        """Send the next frame of the chain. Return False if there is nothing to send.

        now: When the drafter sends it, in seconds.
        """
        costs = self._costs
        opens = self._root.frame is None
        chosen = [] if opens and self._bare else self._choose()
        if not opens and not chosen:
            return False
        self._frames += 1
        if opens:
            self._root.frame = self._frames
        for token, above, node in chosen:
            above.children[token] = node
            node.frame = self._frames
        rows = len(chosen) + opens
        self._rows += rows
        self._sent_at = now
        for stage, free in enumerate(self._free):
            now = max(now + costs.hop, free) + costs.stage(rows)
            self._free[stage] = now
        heappush(self._arrivals, (now + costs.hop, self._frames, rows))
        return True

    @property
    def _bare(self) -> bool:
        """Whether the root of a chain is sent alone."""
        return self._policy.root_first and self._policy.frames > 1


def write(texts: Sequence[DraftedText], costs: RingCosts, policy: ChainPolicy) -> WrittenInFrames:
    """Write texts one after another, and return the totals.

    texts: At least one text, of at least two tokens.
    costs: Times of the ring.
    policy: How every text is drafted.
    """
    total = WrittenInFrames(0, 0.0, 0, 0)
    for text in texts:
        total += ChainRun(text, costs, policy).run()
    return total
