"""Every error SpecSoT raises on purpose, as one tree.

Knows nothing of gRPC or HTTP: `specsot.transport` and the HTTP gateway translate, each in one place.

    SpecsotError
    ├── InvalidRequest        the caller's words are wrong            (field says which)
    │   └── TooLarge          it does not fit this ring; a larger one may take it
    │       └── ContextLengthExceeded  prompt and answer do not fit the model's context
    ├── Unauthenticated       the caller does not show who it is
    ├── Forbidden             the caller is known, and may not do this
    ├── NotFound              no such request, model or sequence
    ├── Overloaded            no room now                             (retry_after, seconds)
    ├── Unavailable           the ring is not complete, or just broke
    │   └── Hung              compute that does not come back; its process must end
    ├── Refused               two parts do not belong together        (fleet, fingerprints, epochs)
    │   └── Occupied          the place is a member's that is here, and may leave
    ├── ModelError            a model directory cannot be used
    │   └── HeadMismatch      a draft head does not fit its base
    ├── PlanError             a plan without a valid line             (text holds the raw plan)
    ├── WireError             bytes from a peer that do not decode
    ├── TimedOut              the caller's deadline passed
    └── Cancelled             the caller went away or said stop
"""

from __future__ import annotations


class SpecsotError(Exception):
    """The root: `str(error)` is one clear line, fit for a user's eyes."""


class InvalidRequest(SpecsotError):
    """A request that can never succeed unchanged."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class TooLarge(InvalidRequest):
    """A request that this ring can never run; one with more KV pages or positions may."""


class ContextLengthExceeded(TooLarge):
    """Prompt and answer together are longer than the model's context."""

    @classmethod
    def of(cls, limit: int, prompt: int, completion: int) -> ContextLengthExceeded:
        """All in tokens; limit: the context. Said as OpenAI says it: clients look for these words."""
        return cls(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt + completion} tokens ({prompt} in the prompt, {completion} in the completion). Please "
            "reduce the length of the prompt or completion.",
            "prompt",
        )

    @classmethod
    def of_text(cls, limit: int, characters: int) -> ContextLengthExceeded:
        """So long that nobody counted its tokens."""
        return cls(
            f"This model's maximum context length is {limit} tokens. However, you sent {characters} "
            "characters in the prompt, which cannot fit. Please reduce the length of the prompt or "
            "completion.",
            "prompt",
        )


class Unauthenticated(SpecsotError):
    """The caller shows no token, or one that is not known here."""


class Forbidden(SpecsotError):
    """The caller's token is known, and does not allow this."""


class NotFound(SpecsotError):
    """What was named does not exist here."""


class Overloaded(SpecsotError):
    """No room at the moment; the same call may succeed after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(SpecsotError):
    """The ring is not complete, or broke under this request."""


class Hung(Unavailable):
    """A member's compute does not come back. Nothing can stop it but the end of its process."""


class Refused(SpecsotError):
    """Two parts that do not belong together; the message names both values."""


class Occupied(Refused):
    """A member has the place; once it leaves, or is known to be lost, the same call may succeed."""


class ModelError(SpecsotError):
    """A model directory that cannot be used; the message names the file and the reason."""


class HeadMismatch(ModelError):
    """A draft head whose tensors do not fit its base; the message names both shapes."""


class PlanError(SpecsotError):
    """A plan without one valid line."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class WireError(SpecsotError):
    """Bytes from a peer that do not decode to what they claim to be."""


class TimedOut(SpecsotError):
    """The caller's deadline passed before the answer was whole."""


class Cancelled(SpecsotError):
    """The caller went away or said stop."""
