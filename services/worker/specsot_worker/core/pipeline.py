"""How deep stage 0 keeps the pipeline, and how long it waits for drafts.

`PipelineDepth` decides from measured step times how many frames are in flight, over how many frames a family
is spread, and how many prompt tokens a frame carries. A step of n tokens takes every stage's time for n
tokens, one stage after the other, and the hops between them. While a stage takes the same time for many
tokens as for few, one frame for all sequences is best. Beyond that, or if hidden states take long to travel,
frames of fewer tokens follow each other through the stages. The generated tokens do not depend on these
decisions.

`DraftTimeout` decides how long a sequence waits for its tree. After a miss, a drafter is not waited for
during a number of trees, so that a slow drafter costs one timeout and not one per step. While drafting is
paused, the drafter is not even sent the frames' features.

`StepTimer` measures the seconds of steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import NamedTuple

from specsot.core.cost_curve import UNIT_CURVE, CostCurve
from specsot.core.draft_pause import FEATURE_RING_ROWS, DraftPause, PauseEvent, PauseState
from specsot.core.frames import Frame, Opening, TreeSegment
from specsot.core.tree_parts import fewest_parts, path_seconds
from specsot.members import Curve

# Fraction. Weight of the newest step in the exponential means of stage shares and gaps. Untuned.
STEP_WEIGHT = 0.2
# Fraction. Weight of the newest tree in the mean fraction of further parts that are awaited. One tree says
# little, so the mean covers some 20 trees. Untuned.
AWAITED_WEIGHT = 0.05
# Steps. How many recent steps of about as many tokens the median is taken of, so that one slow step changes
# nothing. Untuned.
RECENT_STEPS = 9
# Fraction of a step. What spreading a family over another number of frames must save. With a smaller gain,
# noise in the measured times changed the spread: on a simulated ring, families were spread without any
# benefit. The value 0.2 itself is untuned.
MIN_GAIN = 0.2
# Factor. With prompt tokens a frame may take at most this many times as long as without, so that decoding
# sequences do not stall for longer. Chosen by tests/worker/test_many_clients.py, where a clock stands in for
# stages: the 99th percentile of the time between outputs is 1.2 to 2.9 times the median with 2.25, and 3.1
# times with 2.5; with 2, fewer sequences decode.
MAX_PROMPT_STALL = 2.25
# Tokens. A frame carries at least this many prompt tokens if prompts wait, however long they take. Untuned.
MIN_PROMPT_ROWS = 8
# Divisors. A prompt chunk has the token budget divided by one of these. Untuned.
CHUNK_DIVISORS = (1, 2, 4, 8)

# Trees. A drafter is not waited for during this many trees after its first miss; every further miss doubles
# the number. Untuned.
FIRST_BACKOFF_TREES = 32
# Trees. Upper bound of the doubled number. Untuned.
MAX_BACKOFF_TREES = 1024
# Hidden states. At most this many features are sent to a drafter with one step, unless the step's own frame
# has more tokens. The default of `--rows`. What a drafter still lacks after a pause follows with later steps.
MAX_ROWS_PER_STEP = 512
# Passes. How many recent passes without trees, during pauses of drafting, the medians of `BaselineStep` are
# taken of. A step has up to eight passes. Untuned.
BASELINE_PASSES = 60
# Ratio. Numbers of sequences that differ by less count as equal, because among many sequences some end and
# others begin between a pause and the step that reports it. Untuned.
NEAR_SEQUENCES = 1.25
# Steps. For at most this many steps after a pause, trees are not waited for. Untuned.
MAX_CATCH_UP_STEPS = 32
# Factor. A family waits for the tree of one of its sequences for this many times the usual wait. Untuned.
SLOW_TREE_FACTOR = 4.0
# Fraction. Weight of the newest wait in the exponential mean of waits. Untuned.
WAIT_WEIGHT = 0.2


def place_of(opening: Opening) -> tuple[int, int]:
    """Return the pair (family of a sequence, its own id). Trees of a frame are sorted by this pair.

    opening: What every stage knows about the sequence. The family is `opening.family` if set, else the source
        of the fork, else the sequence itself.

    For example:

        # sequences 8 and 9 fork prefix 3, sequence 5 does not fork -> (3, 8), (3, 9), (5, 5)
    """
    source = opening.fork.sequence if opening.fork else opening.sequence
    return source if opening.family is None else opening.family, opening.sequence


@dataclass(frozen=True, slots=True)
class FrameBudget:
    """Upper bounds of a frame's tokens and of the frames in flight.

    rows: Maximum number of tokens of a pass that has trees; also of the prompts of such a frame that are
        computed in a pass of their own, after the trees' pass.
    max_in_flight: Maximum number of frames in flight, at least 1.
    max_tree_nodes: Number of KV slots that are kept free for every live sequence, for the nodes of its tree.
    prompts: Maximum number of tokens of a pass of prompts alone. Numbers below `rows` count as `rows`.
    """

    rows: int = 512
    max_in_flight: int = 1
    max_tree_nodes: int = 64
    prompts: int = 0

    @property
    def alone(self) -> int:
        """Maximum number of prompt tokens of a frame without trees."""
        return max(self.rows, self.prompts)


@dataclass(slots=True)
class InFlightFrame:
    """A frame whose result has not arrived.

    since: Time in seconds at which the frame was composed.
    families: Families whose trees the frame carries. Empty if only one frame may be in flight.
    alone: True if no other frame has been in flight together with this one.
    parts_sent: Number of parts in which the frame travels.
    """

    since: float
    families: frozenset[int]
    alone: bool
    parts_sent: int = 1


class RecentMedians:
    """Collector of the medians of the most recent step times, one median for every power of two of the steps'
    tokens. Each median is taken of at most RECENT_STEPS steps.

    For example:

        # steps of 5, 6 and 7 tokens share the bin of bit length 3, a step of 8 tokens has bit length 4
    """

    def __init__(self) -> None:
        """Start without steps."""
        self._bins: dict[int, deque[tuple[int, float]]] = {}

    def __bool__(self) -> bool:
        """Return whether any step has been recorded: False at the start."""
        return bool(self._bins)

    def record(self, num_tokens: int, seconds: float) -> None:
        """Add one step.

        num_tokens: Number of tokens of the step.
        seconds: Seconds that the step took.
        """
        self._bins.setdefault(num_tokens.bit_length(), deque(maxlen=RECENT_STEPS)).append(
            (num_tokens, seconds)
        )

    @property
    def points(self) -> list[tuple[float, float]]:
        """(median tokens, median seconds) of every bin; [] before the first step. The median ignores single
        slow steps, such as those of a process that has just started.
        """
        return [
            (median(rows for rows, _ in steps), median(seconds for _, seconds in steps))
            for steps in self._bins.values()
        ]


class PipelineDepth:
    """Estimator of how many tokens and frames are profitable. Call `record_step` for every returned step, and
    ask before frames are composed.

    num_frames: Number of frames over which the family that was asked about last is spread. 1 at the start.
    """

    def __init__(self, stages: int = 1, curve: Curve = (), overlap: bool = True) -> None:
        """Start with equal shares of the stages.

        stages: Number of stages of the ring.
        curve: Measured beforehand: seconds of all stages together by number of tokens. Every recorded step
            corrects it. If it has fewer than two points, only ratios of estimates mean anything.
        overlap: True if several frames may be in flight.

        With one stage, frames do not count as overlapping.
        """
        self._measured = CostCurve(curve) if len(curve) > 1 else UNIT_CURVE
        self._stages = stages
        self._overlap = overlap and stages > 1
        # Each stage's share of the compute time of a step.
        self._shares = [1 / stages] * stages
        # Seconds that all stages compute for a step.
        self._computed = RecentMedians()
        # Seconds that all hops of a step take together.
        self._hop_times = RecentMedians()
        # Curves of the two above. None: the curve is rebuilt on its next use, because a step was recorded.
        self._compute_curve: CostCurve | None = None
        self._hop_curve: CostCurve | None = None
        # Seconds from the result of a family to its next frame, as an exponential mean.
        self._gap = 0.0
        # Fraction of the parts after the first that are awaited until a result is known, as an exponential
        # mean.
        self._awaited = 1.0
        # Seconds by which each further part takes longer than estimated, as an exponential mean: stages that
        # share cores, for example, do not compute at the same time.
        self._part_delay = 0.0
        self.num_frames = 1

    def record_step(
        self,
        num_tokens: int,
        seconds: Sequence[float],
        elapsed: float,
        was_alone: bool,
        parts_verified: int = 1,
        parts_sent: int = 1,
    ) -> None:
        """Record a returned step. A step without tokens, without compute time, or with another number of
        stages is ignored.

        num_tokens: Number of tokens of the step, or of each part of a frame that travelled in parts.
        seconds: Compute seconds of every stage for the parts with which the frame was verified, in the order
            of the ring.
        elapsed: Seconds from launch to result. Of a frame that travelled whole, whatever the stages did not
            compute counts as time of the hops. Of a frame in parts, whatever exceeds `path_seconds` and the
            estimated time of the hops counts as delay of its further parts.
        was_alone: True if no other frame was in flight meanwhile. Only then is `elapsed` used: a frame that
            travelled whole corrects the time of hops, a frame in parts the delay of further parts. A frame in
            parts that its first part decided corrects neither.
        parts_verified: Number of parts with which the frame was verified. The step counts as one with the
            tokens and the seconds of one part.
        parts_sent: Number of parts in which the frame travelled.

        Every step corrects the compute curve and the stages' shares, and every frame in parts the fraction of
        further parts that are awaited.
        """
        compute_seconds = sum(seconds)
        if not num_tokens or compute_seconds <= 0 or len(seconds) != self._stages:
            return
        self._shares = [
            old + STEP_WEIGHT * (new / compute_seconds - old) for old, new in zip(self._shares, seconds)
        ]
        if parts_sent > 1:
            share = (parts_verified - 1) / (parts_sent - 1)
            self._awaited += AWAITED_WEIGHT * (share - self._awaited)
        self._computed.record(num_tokens, compute_seconds / parts_verified)
        self._compute_curve = None
        beyond = max(elapsed - path_seconds(seconds, parts_verified), 0.0)
        if was_alone and parts_sent == 1:
            self._hop_times.record(num_tokens, beyond)
            self._hop_curve = None
        elif was_alone and parts_verified > 1:
            delay = max(beyond - self._hop_seconds(num_tokens), 0.0) / (parts_verified - 1)
            self._part_delay += STEP_WEIGHT * (delay - self._part_delay)

    def record_gap(self, seconds: float) -> None:
        """Record how long a family stayed at stage 0 between a result and its next frame, while its trees
        were on their way.

        seconds: Length of the stay in seconds.

        The gap is an exponential mean that starts at 0.
        """
        self._gap += STEP_WEIGHT * (seconds - self._gap)

    def max_frames(self, default: int, max_allowed: int) -> int:
        """Return how many frames may be in flight, at least 1: the time of a step divided by that of its
        slowest stage, rounded. With as many frames, the slowest stage is always busy. Return `max_allowed` if
        the slowest stage is estimated to take no time.

        default: Number to return until the time of hops has been measured; no more than `max_allowed`.
        max_allowed: Upper bound of the result, from the budget.

        For example:

            # a step takes 12 ms, its slowest stage 4 ms -> 3 frames
        """
        if not self._hop_times:
            return min(default, max_allowed)
        step = self._step_seconds(1)
        slowest_stage = self._slowest_stage_seconds(1)
        return min(max(round(step / slowest_stage), 1), max_allowed) if slowest_stage else max_allowed

    def frames_per_family(self, num_tokens: int, num_sequences: int, max_frames: int) -> int:
        """Return over how many frames a family is spread, at least 1.

        num_tokens: Number of tokens of the whole family.
        num_sequences: Number of its sequences, which bounds the number of frames.
        max_frames: Maximum number of frames. Below 1 counts as 1.

        The result is the smallest number of frames whose cycle time is at most 1 / (1 - MIN_GAIN) times the
        shortest cycle time. If the family is spread over more frames now, that number is kept while its cycle
        is shorter than the smallest number's by at least the fraction MIN_GAIN / 2.

            # cycles of 1, 2 and 4 frames: 10, 7 and 6.5 ms -> 2 frames, because 7 <= 6.5 / 0.8 < 10;
            # if 4 frames are used now: 6.5 > 0.9 * 7, so 2 frames all the same

        The result is stored in `num_frames`. With one sequence it is 1.
        """
        choices = range(1, max(min(num_sequences, max_frames), 1) + 1)
        cycles = {frames: self._cycle_seconds(num_tokens, frames) for frames in choices}
        fewest = min(frames for frames in choices if (1 - MIN_GAIN) * cycles[frames] <= min(cycles.values()))
        current = min(self.num_frames, choices[-1])
        keep_current = current > fewest and cycles[current] <= (1 - MIN_GAIN / 2) * cycles[fewest]
        self.num_frames = current if keep_current else fewest
        return self.num_frames

    def tree_parts(self, num_nodes: int) -> int:
        """Return into how many parts the frame of one tree is cut if no other frame is in flight, at least 1
        (`specsot.core.tree_parts`). The result is 1 if frames do not overlap.

        num_nodes: Number of nodes of the tree, at least 1.

            # 4 equal stages; a step of 1 to 4 nodes takes 4 ms, one of 8 nodes 8 ms, and all hops together
            # 10 ms: 8 nodes take 8 + 10 ms whole, 4 + 1 + 10 ms in two parts, 4 + 2 + 10 ms in three -> 2
        """
        if not self._overlap:
            return 1
        return fewest_parts(num_nodes, lambda parts: self._seconds_in_parts(num_nodes, parts))

    def _seconds_in_parts(self, num_nodes: int, parts: int) -> float:
        """Return the estimated seconds of a step whose tree travels in parts. The first part passes all
        stages and hops. Each further part adds the larger of the slowest stage's time and the mean hop's
        extra time, plus the learned delay, multiplied by the awaited fraction.

        num_nodes: Number of nodes of the tree.
        parts: Number of parts.
        """
        part_nodes = -(-num_nodes // parts)
        sending = (self._hop_seconds(part_nodes) - self._hop_seconds(1)) / self._stages
        each = max(self._slowest_stage_seconds(part_nodes), sending) + self._part_delay
        return self._step_seconds(part_nodes) + (parts - 1) * self._awaited * each

    def chunk_rows(self, prompt_tokens: int, max_chunk: int) -> int:
        """Return the size in tokens of a prompt's chunks with which the prompt passes all stages soonest. If
        frames do not overlap, this is `max_chunk`; else `max_chunk` divided by one of CHUNK_DIVISORS, at
        least 1. Of sizes that take equally long, the largest is returned.

        prompt_tokens: Number of prompt tokens that are still to be fed.
        max_chunk: Maximum number of tokens of a chunk.

        The estimate is that of `_prefill_seconds`.
        """
        if not self._overlap:
            return max_chunk
        sizes = [max(max_chunk // part, 1) for part in CHUNK_DIVISORS]
        return min(sizes, key=lambda size: (self._prefill_seconds(prompt_tokens, size), -size))

    def rows_within(self, seconds: float, max_tokens: int) -> int:
        """Return how many tokens a step may have to take at most so long; at least 1, at most `max_tokens`.

        seconds: Estimated compute seconds of the step.
        max_tokens: Upper bound of the result, at least 1.
        """
        return max(bisect_right(range(1, max_tokens + 1), seconds, key=self._compute_seconds), 1)

    def step_seconds(self, num_tokens: int) -> float:
        """Return the estimated compute seconds of a step of one pass.

        num_tokens: Number of tokens of the step.
        """
        return self._compute_seconds(num_tokens)

    def prompt_rows(self, num_decode_tokens: int, num_waiting: int, max_tokens: int) -> int:
        """Return how many prompt tokens a frame carries: as many as let the frame take at most
        MAX_PROMPT_STALL times as long as without prompts, but at least MIN_PROMPT_ROWS if `max_tokens`
        allows that. Return 0 if `max_tokens` is 0.

        num_decode_tokens: Number of tokens of the frame that belong to decoding sequences.
        num_waiting: Number of sequences that wait for their prompts. They count as if they decoded already:
            otherwise few decoding sequences would let few prompts in, and would remain few.
        max_tokens: Upper bound of the result: how many tokens the frame has left.

        If several frames overlap, each carries only a part of the decoding sequences. The part is estimated
        as the slowest stage's share of the compute time.

            # one stage, 1 ms per token, 4 decode tokens, none waiting -> limit 2.25 * 4 = 9 ms, so
            # 4 + 5 tokens take 9 ms, but MIN_PROMPT_ROWS applies -> 8 prompt tokens

        At least min(MIN_PROMPT_ROWS, max_tokens) tokens are returned, even if they take too long.
        """
        share = max(self._shares) if self._overlap else 1.0
        limit = MAX_PROMPT_STALL * self._compute_seconds((num_decode_tokens + num_waiting) * share)
        min_tokens = min(MIN_PROMPT_ROWS, max_tokens)
        more = range(min_tokens + 1, max_tokens + 1)
        num_overlapped = num_decode_tokens * share
        return min_tokens + bisect_right(
            more, limit, key=lambda rows: self._compute_seconds(num_overlapped + rows)
        )

    def _prefill_seconds(self, num_tokens: int, chunk_size: int) -> float:
        """Return the estimated seconds of a prompt in chunks: the first chunk passes all stages, and every
        further one takes the slowest stage's time longer.

        num_tokens: Number of tokens of the prompt.
        chunk_size: Number of tokens of a chunk.
        """
        return self._compute_seconds(min(num_tokens, chunk_size)) + (
            -(-num_tokens // chunk_size) - 1
        ) * self._slowest_stage_seconds(min(num_tokens, chunk_size))

    def _cycle_seconds(self, num_tokens: int, num_frames: int) -> float:
        """Return the estimated seconds from one frame of a family to its next.

        num_tokens: Number of tokens of the whole family.
        num_frames: Number of frames over which the family is spread.

        This is the longest of three times: one whole step with its gap at stage 0, the time that the family's
        frames keep the slowest stage busy, and the time that they keep a hop busy.
        """
        frame_rows = -(-num_tokens // num_frames)
        sending = (self._hop_seconds(frame_rows) - self._hop_seconds(1)) / self._stages
        extra_hop = self._hop_seconds(num_tokens) - self._hop_seconds(1)
        # Sending time counts only if it exceeds the compute time; smaller differences are noise.
        hop_bound = extra_hop > self._compute_seconds(num_tokens)
        step = (
            self._compute_seconds(frame_rows)
            + self._hop_seconds(frame_rows if hop_bound else num_tokens)
            + self._gap
        )
        return max(
            step,
            num_frames * self._slowest_stage_seconds(frame_rows),
            num_frames * sending if hop_bound else 0.0,
        )

    def _step_seconds(self, num_tokens: int) -> float:
        """Return the estimated seconds of a step: the computation of all stages and all hops.

        num_tokens: Number of tokens of the step.
        """
        return self._compute_seconds(num_tokens) + self._hop_seconds(num_tokens)

    def _compute_seconds(self, num_tokens: float) -> float:
        """Return the estimated seconds that all stages together compute a step. Until a step was recorded,
        the estimate is the curve that was measured beforehand.

        num_tokens: Number of tokens of the step, which may be a fraction.
        """
        if self._compute_curve is None:
            self._compute_curve = self._measured.corrected(self._computed.points)
        return self._compute_curve.at(num_tokens)

    def _slowest_stage_seconds(self, num_tokens: int) -> float:
        """Return the estimated seconds that the slowest stage computes a step.

        num_tokens: Number of tokens of the step.
        """
        return self._compute_seconds(num_tokens) * max(self._shares)

    def _hop_seconds(self, num_tokens: int) -> float:
        """Return the estimated seconds that all hops of a step take together. Return 0 until a hop has been
        measured.

        num_tokens: Number of tokens of the step.

        For more tokens than were measured, the seconds of the largest measured number are returned.
        """
        if self._hop_curve is None:
            # Beyond the largest number of tokens that was measured, hops count as taking no longer, because
            # the slope of two noisy points says nothing about far more tokens. Repeating the last point at
            # twice its tokens makes the curve level.
            rows_seen, seconds = max(self._hop_times.points, default=(1.0, 0.0))
            self._hop_curve = CostCurve([*self._hop_times.points, (2 * rows_seen, seconds)])
        return self._hop_curve.at(num_tokens)


@dataclass(slots=True)
class _Backoff:
    """Misses of one drafter: for how many trees the drafter is not waited for.

    trees: Number of trees for which the drafter will not be waited for after its next miss. The number
        doubles with every such miss, up to MAX_BACKOFF_TREES, and is reset by a tree that arrives in time.
    left: Number of trees for which the drafter is still not waited for since its last miss. 0: the drafter is
        waited for.
    """

    trees: int = FIRST_BACKOFF_TREES
    left: int = 0


class DraftTimeout:
    """Rule that decides how long a sequence waits for a tree of its drafter.

    A sequence waits `timeout` seconds while its drafter answers in time. After a miss it does not wait for a
    number of trees, which doubles with every miss. It does not wait at all while drafting is paused
    (`specsot.core.draft_pause`).

    Each of several drafters has its own misses, so a slow drafter does not delay the sequences of the others.
    A sequence that has not received a tree from any drafter yet has the drafter "".

    sends_backlog: True while part of the features that a pause of drafting held back may not have been sent.
    """

    def __init__(self, timeout: float, present: bool = True) -> None:
        """Start without misses.

        timeout: Seconds to wait for a tree.
        present: True if the ring has a drafter from the beginning.

        Without a drafter, no sequence waits until a drafter has sent something.
        """
        self._timeout = timeout
        self._pause = DraftPause(PauseState.DRAFTING if present else PauseState.ABSENT)
        # Names of drafters that have sent something and are not known to be lost.
        self._responsive = set[str]()
        # Misses by drafter.
        self._backoffs = dict[str, _Backoff]()
        # Number of features that were held back during the pause, and of features of sequences that the
        # drafter never saw. Both are sent later, at most MAX_ROWS_PER_STEP with every step, and neither is
        # more than the last stage keeps.
        self._unsent_rows = 0
        self._missed_rows = 0
        # Number of steps for which the drafter may still catch up before its trees are waited for regardless.
        self._catch_up_steps = 0
        self.sends_backlog = False
        # Seconds that sequences usually wait for a tree, as an exponential mean.
        self._usual_wait: float | None = None

    @property
    def paused(self) -> bool:
        """True while drafting is paused: the drafter is sent no features of the next frame, and sends no
        trees.
        """
        return self._pause.paused

    @property
    def catching_up(self) -> bool:
        """True while drafting is resuming: the drafter is sent the next frame's features and those it missed,
        and its trees are not waited for.
        """
        return self._pause.state is PauseState.CATCHING_UP

    @property
    def max_passes(self) -> int:
        """Maximum number of forward passes of a frame with a drafted sequence: as many as a pause of drafting
        has steps left, rounded up, so that the pause is not exceeded. 1 outside a pause: while drafting,
        while the drafter catches up, and without a drafter.
        """
        return max(self._pause.max_steps_left, 1)

    def _backoff_of(self, drafter: str) -> _Backoff:
        """Return the misses of a drafter, which are created if there are none. If it is the only drafter,
        they are stored under the name "".

        drafter: Name of the drafter.
        """
        name = drafter if len(self._responsive) > 1 else ""
        if (backoff := self._backoffs.get(name)) is None:
            backoff = self._backoffs[name] = _Backoff()
        return backoff

    def deadline(self, since: float, drafter: str | None = "") -> float:
        """Return the time in seconds until which a sequence keeps waiting for its tree. Return `since` if it
        does not wait: drafting is paused, there is no drafter, or the drafter is not waited for after a miss.

        since: Time in seconds since which the sequence has waited.
        drafter: Name of its drafter; "" if no drafter has sent it a tree yet; None if its drafter is lost, so
            that it does not wait.

        Looking up a drafter that has no record creates one without misses.
        """
        present = self._pause.state is not PauseState.ABSENT and drafter is not None
        waits = present and not (self.paused or self._backoff_of(drafter or "").left)
        return since + self._timeout if waits else since

    def family_deadline(self, since: float, drafter: str | None = "") -> float:
        """Return the time in seconds until which the other sequences of a family wait for one that waits for
        its tree. It is never later than `deadline`.

        since: Time in seconds since which the one sequence has waited.
        drafter: Name of its drafter, "" or None as for `deadline`.

        It is `since` plus SLOW_TREE_FACTOR times the usual wait, or plus the whole timeout while no wait is
        known, and at most `deadline`.
        """
        usual = self._timeout if self._usual_wait is None else SLOW_TREE_FACTOR * self._usual_wait
        return min(self.deadline(since, drafter), since + usual)

    def record_tree(self, wait_seconds: float | None = None, drafter: str = "") -> None:
        """Record that a tree of a drafter arrived in time. It clears the drafter's misses.

        wait_seconds: Seconds that the sequence had waited for the tree. None: unknown, so the usual wait is
            not updated.
        drafter: Name of the drafter.

        The first known wait becomes the usual wait as it is; later ones enter an exponential mean.
        """
        backoff = self._backoff_of(drafter)
        backoff.trees = FIRST_BACKOFF_TREES
        backoff.left = 0
        if wait_seconds is not None:
            usual = wait_seconds if self._usual_wait is None else self._usual_wait
            self._usual_wait = usual + WAIT_WEIGHT * (wait_seconds - usual)

    def record_miss(self, drafter: str | None = "") -> None:
        """Record that a sequence ran without the tree of its drafter. Nothing is recorded during a pause.

        drafter: Name of the drafter. "": no drafter has sent the sequence a tree yet. None: the drafter is
            lost, and nothing is recorded.

        For example:

            # timeouts at trees 1 and 34 -> no waiting for trees 2..33, then none for 64 trees

        If the drafter is not waited for at present, one tree fewer remains for which it is not waited for.
        Otherwise the present number of trees is started and the next number doubles, up to
        MAX_BACKOFF_TREES.
        """
        if self.paused or drafter is None:
            return
        backoff = self._backoff_of(drafter)
        if backoff.left:
            backoff.left -= 1
            return
        backoff.left = backoff.trees
        backoff.trees = min(backoff.trees * 2, MAX_BACKOFF_TREES)

    def start_pause(self, num_trees: int, num_drafted: int = 1) -> None:
        """Pause drafting, because the drafter has announced that it will draft nothing for some trees.

        num_trees: Number of trees of all drafted sequences together after which the pause ends.
        num_drafted: Number of sequences that the drafter drafts for.

        The backlog starts at 0 again.
        """
        self._pause = self._pause.begin(num_trees, num_drafted)
        self._unsent_rows = 0
        self.sends_backlog = False

    def require_catch_up(self, num_features: int) -> None:
        """Record that a sequence continues of which the drafter must first be sent features, some with every
        step. Trees are not waited for until it has caught up.

        num_features: Number of features (one per token) that the drafter must be sent.
        """
        self._missed_rows = min(self._missed_rows + num_features, FEATURE_RING_ROWS)
        self._catch_up_steps = MAX_CATCH_UP_STEPS
        self._pause = self._pause.on(PauseEvent.MISSED)

    def record_launch(self, num_trees: int, num_tokens: int, num_drafted: int = 1) -> None:
        """Record the launch of a frame.

        num_trees: Number of its trees that belong to drafted sequences.
        num_tokens: Number of its tokens.
        num_drafted: Number of drafted sequences.

        During a pause, the trees count towards its end, and the tokens are added to the backlog. Otherwise
        the backlog shrinks by what can be sent with the frame.

        After MAX_CATCH_UP_STEPS launches without a pause, the drafter counts as caught up in any case.
        `sends_backlog` becomes True if features of the pause remained before this frame.
        """
        if self.paused:
            self._unsent_rows = min(self._unsent_rows + num_tokens, FEATURE_RING_ROWS)
            self._pause = self._pause.passed(num_trees, num_drafted)
            self._catch_up_steps = MAX_CATCH_UP_STEPS
            return
        self._catch_up_steps = max(self._catch_up_steps - 1, 0)
        if not self._catch_up_steps:
            self._pause = self._pause.on(PauseEvent.CAUGHT_UP)
        # Number of features of the backlog that are sent in addition to the frame's own.
        spare = MAX_ROWS_PER_STEP - num_tokens
        self._missed_rows = max(self._missed_rows - max(spare, 0), 0)
        self.sends_backlog = self._unsent_rows > 0
        self._unsent_rows = max(self._unsent_rows - max(spare, 0), 0)

    def record_drafter_loss(self, drafter: str = "") -> None:
        """Record that a drafter is lost. Drafting ends if no other drafter has sent anything.

        drafter: Name of the drafter. The name of a drafter that has sent nothing, or is lost already, changes
            nothing while another drafter has sent something.

        The misses of the drafter are forgotten.
        """
        self._responsive.discard(drafter)
        self._backoffs.pop(drafter, None)
        if not self._responsive:
            self._pause = self._pause.on(PauseEvent.LEFT)

    def record_drafter_message(self, drafter: str = "") -> None:
        """Record a message of a drafter, which says that it has processed everything that it was sent.

        drafter: Name of the drafter.

        The drafter counts as caught up, unless features of sequences that it never saw remain to be sent. If
        there was no drafter before, drafting begins without misses or backlog.

        Catching up continues while features of sequences that the drafter never saw remain. The drafter
        counts as one that has sent something.
        """
        self._responsive.add(drafter)
        if self._pause.state is PauseState.ABSENT:
            self._pause = DraftPause().on(PauseEvent.JOINED)
            self._backoffs.clear()
            self._unsent_rows = 0
        if not self._missed_rows:
            self._pause = self._pause.on(PauseEvent.CAUGHT_UP)


class BaselineStep(NamedTuple):
    """The duration of one forward pass without draft trees, measured while drafting was paused.

    num_sequences: Number of sequences in the pass, each of which computes one token.
    computed: Compute seconds of all stages.
    wall: Wall-clock seconds, transfers and waiting included. 0 if unknown.
    """

    num_sequences: int
    computed: float
    wall: float


class StepTimer:
    """Timer of whole steps, for the drafter's decision whether drafting is profitable.

    The time of a step runs from the verification of a sequence to its next verification, whatever other
    frames are verified in between. The drafter compares two kinds of steps: those with trees, whose times
    `step_seconds` returns, and those without trees, which are collected while drafting is paused and whose
    typical times `baseline_step` returns.
    """

    def __init__(self) -> None:
        """Start without steps."""
        # Recent passes without trees during pauses. A step of several passes is added once for each of its
        # passes, so that the short step in which a pause ends has little weight in the medians.
        self._baseline = deque[BaselineStep](maxlen=BASELINE_PASSES)
        # By sequence id: the time in seconds at which the sequence's last frame was verified, and whether
        # drafting was paused for that frame.
        self._verified: dict[int, tuple[float, bool]] = {}

    def baseline_step(self) -> BaselineStep | None:
        """Return the medians of the passes without trees that were measured since the last step with trees.
        Return None if there are none.

        Only passes with about as many sequences as the largest of these passes count (NEAR_SEQUENCES),
        because a pause may also have passes of the few sequences whose prompts have just been computed.

            # passes of 60, 60, 58 and 2 sequences -> the medians of the first three
        """
        max_sequences = max((step.num_sequences for step in self._baseline), default=0)
        near = [step for step in self._baseline if max_sequences <= NEAR_SEQUENCES * step.num_sequences]
        if not near:
            return None
        num_sequences, computed, wall = zip(*near)
        return BaselineStep(median_high(num_sequences), median(computed), median(wall))

    def step_seconds(self, frame: Frame, now: float) -> tuple[float, float]:
        """Record that a frame was verified, and return (compute seconds of all stages, wall-clock seconds) of
        its step. If the step took several passes, both are those of one pass.

        frame: The verified frame, with the compute seconds of its stages.
        now: Time in seconds of the verification.

        For a frame that travelled in parts, both are those of a step in which all parts are awaited, and
        seconds in which several stages compute count once.

        The wall-clock seconds are counted from the newest previous verification among the frame's sequences.
        They are 0, which means that they are not to be compared with other steps, if the frame has no trees
        of more than one node, if it has prompt chunks, or if one of its sequences was never verified before.

        A step with trees of more than one node also discards the measured steps without trees. A step without
        such trees is added to them (see `baseline_step`) if drafting was paused in the previous frame of all
        its sequences, or if it has several passes, as steps have only during pauses.

        Sequences that the frame closes are forgotten.
        """
        sequences = [segment.sequence for segment in frame.segments]
        # Most sequences of a frame were verified together in the frame before, so this set of (time, paused)
        # is small. It contains None if a sequence was never verified.
        previous = {*map(self._verified.get, sequences)}
        self._verified.update(dict.fromkeys(sequences, (now, frame.paused)))
        for sequence in frame.closings:
            self._verified.pop(sequence, None)
        passes = 1 + frame.extra_passes
        # Nodes of each tree in one pass. A frame of several passes has a chain of one node for each pass.
        tree_sizes = [
            len(segment.tree.tokens) // passes
            for segment in frame.segments
            if isinstance(segment, TreeSegment)
        ]
        known = [verified for verified in previous if verified]
        stages = frame.seconds or (0.0,)
        # The seconds that the parts that were not awaited would have added. They count as if these parts had
        # been awaited, because the number of awaited parts depends on which tokens were accepted.
        unawaited = (frame.last_part - frame.part) * max(stages) / (1 + frame.part)
        computed = (path_seconds(stages, 1 + frame.part) + unawaited) / passes
        if not tree_sizes or len(tree_sizes) < len(frame.segments) or len(known) < len(previous):
            return computed, 0.0
        wall = (now - max([verified_at for verified_at, _ in known]) + unawaited) / passes
        if sum(tree_sizes) > len(tree_sizes):
            # The machine may be loaded differently at the next pause, so older measurements are discarded.
            self._baseline.clear()
            return computed, wall
        if passes > 1 or all(draft_paused for _, draft_paused in known):
            self._baseline.extend([BaselineStep(len(tree_sizes), computed, wall)] * passes)
        return computed, 0.0
