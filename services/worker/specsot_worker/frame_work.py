"""What the thread that computes does with a frame: run it, send what comes of it, and judge it."""

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
    return stage.run(with_numbers(frame))


def run_and_pass_on(stage: StageRunner, link: RingLink, frame: Frame) -> float:
    """Seconds of this stage. The thread that computes sends: no event loop is waited for."""
    passed = run_stage(stage, frame)
    link.post(passed)
    return passed.seconds[-1]


def run_and_verify(stage: StageRunner, verify: Verify, frame: Frame) -> VerifiedFrame:
    return verify(run_stage(stage, frame))


def reporting(links: RingLinks, verify: Verify) -> Verify:
    """The same; stage 0, whose next lap waits for the result, gets it from the thread that found it, with
    what was drafted there, and the master next.
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
