"""What the compute thread does with a frame: run it, pass it on or verify it, and report the result."""

from __future__ import annotations

from collections.abc import Callable

from specsot.core.frames import Frame
from specsot.transport.links import RingLink
from specsot_worker.ring_links import RingLinks
from specsot_worker.rounded_rows import with_numbers
from specsot_worker.stage_provider import StageRunner
from specsot_worker.verifier import VerifiedFrame

Verify = Callable[..., VerifiedFrame]


def run_stage(stage: StageRunner, frame: Frame) -> Frame:
    """Run a frame through the stage. Hidden states that arrived in 8 bits are converted when the stage reads
    them.
    """
    return stage.run(with_numbers(frame))


def run_and_pass_on(stage: StageRunner, link: RingLink, frame: Frame) -> float:
    """Run a frame, send it to the next stage, and return the seconds that this stage computed.

    The compute thread sends the frame itself, so that sending does not wait for the event loop.
    """
    passed = run_stage(stage, frame)
    link.post(passed)
    return passed.seconds[-1]


def run_and_verify(stage: StageRunner, verify: Verify, frame: Frame) -> VerifiedFrame:
    """Run a frame and verify it."""
    return verify(run_stage(stage, frame))


def reporting(links: RingLinks, verify: Verify) -> Verify:
    """Return a function that calls `verify` and then sends the result from the thread that has it.

    Stage 0, whose next step waits for the result, receives it first, with the trees that were drafted on this
    thread. The master is second.
    """

    def verify_and_report(*frame: Frame) -> VerifiedFrame:
        verified = verify(*frame)
        if links.sequencer:
            for message in (verified.result, *(verified.drafts or ())):
                links.sequencer.post(message)
        if links.results:
            links.results.post(verified.result)
        return verified

    return verify_and_report
