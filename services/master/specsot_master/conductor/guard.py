"""Does something for one request; what goes wrong there ends that request alone.

Refuses to know what is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import structlog

from specsot.errors import SpecsotError, Unavailable, WireError
from specsot_master.conductor.live import LiveRequest

log = structlog.get_logger()

INTERNAL = "internal error; the master's log has the details"

_P = ParamSpec("_P")


class Guard:
    """fail: the request ends with an error."""

    def __init__(self, fail: Callable[[LiveRequest, SpecsotError], None]) -> None:
        self._fail = fail

    def __call__(
        self, request: LiveRequest, act: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs
    ) -> None:
        try:
            act(*args, **kwargs)
        except WireError as error:  # of a member, never of the client
            log.error("a member told what cannot be", **request.named, reason=str(error))
            self._fail(request, Unavailable(f"the ring lost its place in this answer: {error}"))
        except SpecsotError as error:
            self._fail(request, error)
        except Exception:
            log.exception("a request broke the master's rules", **request.named)
            self._fail(request, SpecsotError(INTERNAL))
