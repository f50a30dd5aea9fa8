"""The drafter's side of the protocol with a verifier on the same thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specsot.core.device_verification import DeviceTrees, DeviceVerification
from specsot.core.frames import Drafts, Features, TreeSegment
from specsot.core.overlap import OverlapState
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.epoch import DrafterEpoch
from specsot_drafter.observer import DrafterObserver


class ColocatedHandle:
    """Handle of the drafts that follow one verified frame, which implements `DraftHandle`.

    Errors of the drafter are kept in the epoch, and `Drafter.handle` raises them: raised here, they would
    fail the worker that calls these methods.
    """

    def __init__(
        self,
        epoch: DrafterEpoch,
        is_current: Callable[[], bool],
        observer: DrafterObserver,
        verification: DeviceVerification | None,
    ) -> None:
        """Launch the growth of the next trees, if there is a verification result on the device.

        epoch: The drafter's epoch.
        is_current: Returns whether the drafter is still in this epoch.
        observer: Is notified of the work.
        verification: The verification result on the device, which the host has not read. None: there is none,
            and nothing is launched. The result of another epoch is ignored.

        An error of the launch is kept in the epoch.
        """
        self._epoch = epoch
        self._is_current = is_current
        self._observer = observer
        self._growth: AsyncGrowth | None = None
        if verification and verification.epoch == epoch.configuration.epoch:
            with epoch.keep_failure():
                self._growth = epoch.engine.start_growth(verification)

    @property
    def state(self) -> OverlapState:
        """LAUNCHED while trees grow that follow from the verification on the device; IDLE if none do;
        DISCARDED if the host has found another result.
        """
        return self._growth.state if self._growth else OverlapState.IDLE

    def select(self, segments: Sequence[TreeSegment]) -> DeviceTrees | None:
        """Return the trees that grow, so that the next step is launched with them before the host has read
        them; see `DraftHandle.select`. Return None if that is impossible, after an error, and if the epoch is
        over.

        segments: The next segments of all sequences that continue, with trees that are only roots.
        """
        if self._usable:
            with self._epoch.keep_failure():
                return self._epoch.engine.select(segments)
        return None

    def result(
        self, features: Sequence[Features], meanwhile: Callable[[], None]
    ) -> tuple[Drafts, ...] | None:
        """Observe features, draft, and return the messages for stage 0; see `DraftHandle.result`. Return ()
        if there is nothing to send, and None after an error, if the epoch is over, or if the features are of
        another epoch.

        features: The messages with the host's verification result, in order. At least one.
        meanwhile: Called once while the device may be computing.

        `meanwhile` is not called after an error in launching, and not if None is returned because the epoch
        is over.
        """
        epoch = self._epoch
        if not self._usable or features[0].epoch != epoch.configuration.epoch:
            return None
        began = time.perf_counter()
        rows = 0
        with self._observer.drafting(features):
            with epoch.keep_failure():
                rows = epoch.begin(features)
            if epoch.failure is None:
                meanwhile()
                with epoch.keep_failure():
                    finished = epoch.finish(rows, began)
                    self._observer.drafted(finished.drafts, finished.seconds)
                    return (finished.drafts,) if finished.sent else ()
        return None

    def discard(self, sequence: int) -> None:
        """Record that the host has found other target tokens for a sequence than the device, so that the
        trees of the whole growth are not used. Nothing happens if no growth was launched.

        sequence: Id of the sequence.
        """
        if self._growth:
            self._growth.discard(sequence)

    @property
    def _usable(self) -> bool:
        """True if the drafter is still in the epoch and has not failed."""
        return self._epoch.failure is None and self._is_current()
