"""What the compute thread does with a frame: run it, pass it on or verify it, and report the result."""

from __future__ import annotations

from collections.abc import Callable

from specsot.core.frames import Frame
from specsot.transport.links import RingLink
from specsot.transport.pending_rows import PendingRows
from specsot_model.core.kv_plan import plan_frame
from specsot_worker.ring_links import RingLinks
from specsot_worker.rounded_rows import with_numbers
from specsot_worker.stage_provider import StageRunner
from specsot_worker.verifier import VerifiedFrame, Verifier

Verify = Callable[..., VerifiedFrame]


def run_stage(stage: StageRunner, frame: Frame) -> Frame:
    """Run a frame through the stage, and return it with the stage's hidden states. Hidden states that arrived
    in 8 bits are converted when the stage reads them.

    stage: The layer range of this worker.
    frame: The frame as it arrived.
    """
    return stage.run(with_numbers(frame))


def run_and_pass_on(stage: StageRunner, link: RingLink, frame: Frame) -> float:
    """Run a frame, send it to the next stage, and return the seconds that this stage computed.

    stage: The layer range of this worker.
    link: Link to the next stage.
    frame: The frame as it arrived.

    The compute thread sends the frame itself, so that sending does not wait for the event loop.
    """
    passed = run_stage(stage, frame)
    link.post(passed)
    return passed.seconds[-1]


def run_and_verify(stage: StageRunner, verify: Verify, frame: Frame) -> VerifiedFrame:
    """Run a frame through the last stage and verify it. Return what the verification returns.

    stage: The layer range of this worker.
    verify: Verifies a frame that has passed every layer, see `Verifier.verify`.
    frame: The frame as it arrived.
    """
    return verify(run_stage(stage, frame))


def run_and_verify_part(
    stage: StageRunner, verifier: Verifier, links: RingLinks, frame: Frame
) -> tuple[float, VerifiedFrame | None]:
    """Run a part of a frame through the last stage, and verify the frame and send its result if that is
    possible now. Return the seconds that this stage computed for the part, and the verified frame, or None if
    further parts are awaited. If the frame was verified before, apply only the page operations of this part,
    and return 0.0 seconds and None.

    stage: The layer range of this worker.
    verifier: The verifier of this worker.
    links: Links of this stage.
    frame: Any part of a frame, as it arrived.

    If the hidden states of a part that comes after the verification travel apart from the frame
    (`--transport direct`), they must be received, so the part is run all the same.
    """
    if verifier.is_verified(frame):
        if isinstance(frame.hidden, PendingRows):
            run_stage(stage, frame)
        else:
            plan_frame(stage.table, frame)
        return 0.0, None
    seconds, verified = verifier.verify_part(run_stage(stage, frame))
    if verified:
        report(links, verified)
    return seconds, verified


def reporting(links: RingLinks, verify: Verify) -> Verify:
    """Return a function that calls `verify` with its arguments, sends the frame's result from the same
    thread, and returns the verified frame.

    links: Links of this stage. A receiver that is not linked is skipped.
    verify: `Verifier.verify`, which is given a frame, or `Verifier.verify_pending`, which is given nothing.

    If stage 0 is this worker (there is no link to it), the master is sent the result by `announce` of
    `verify`, before the next trees are drafted. Otherwise the result is sent after drafting: to stage 0
    first, whose next step waits for result and trees, and then to the master.
    """

    def verify_and_report(*frame: Frame) -> VerifiedFrame:
        """Verify, send the result, and return it.

        frame: One frame that has passed every layer, or nothing for held-back segments.
        """
        if links.sequencer is None and links.results:
            return verify(*frame, announce=links.results.post)
        verified = verify(*frame)
        report(links, verified)
        return verified

    return verify_and_report


def report(links: RingLinks, verified: VerifiedFrame) -> None:
    """Send a frame's result to stage 0 and then to the master. Call this on the thread that verified the
    frame.

    links: Links of this stage. A receiver that is not linked is skipped.
    verified: The result of a frame, with the trees that were drafted on this thread.

    Stage 0 receives the result first, with these trees, because its next step waits for the result. It is
    sent the result only if it is another process.
    """
    if links.sequencer:
        for message in (verified.result, *(verified.drafts or ())):
            links.sequencer.post(message)
    if links.results:
        links.results.post(verified.result)
