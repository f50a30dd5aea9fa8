"""Every error SpecSoT raises on purpose, as one tree.

Knows nothing of gRPC or HTTP: `specsot.transport` and the HTTP gateway translate, each in one place.

    SpecsotError
    ├── InvalidRequest        a field of the request is invalid            (field names it)
    │   └── TooLarge          the request does not fit this ring, but may fit a larger one
    │       └── ContextLengthExceeded  prompt and answer do not fit the model's context
    ├── Unauthenticated       the caller sent no known token
    ├── Forbidden             the caller is known, but not allowed to do this
    ├── NotFound              no such request, model or sequence
    ├── Overloaded            no room at the moment                        (retry_after, seconds)
    ├── Unavailable           the ring is not complete, or just failed
    │   └── Hung              a computation does not return; its process must be ended
    ├── Refused               two parts do not belong together             (fleet, fingerprints, epochs)
    │   └── Occupied          another member holds the place, and may leave it
    ├── ModelError            a model directory cannot be used
    │   └── HeadMismatch      a draft head does not fit its base model
    ├── PlanError             a plan without a valid line                  (text holds the raw plan)
    ├── WireError             bytes from a peer that cannot be decoded
    ├── TimedOut              the caller's deadline passed
    └── Cancelled             the caller disconnected or cancelled
"""

from __future__ import annotations


class SpecsotError(Exception):
    """The base class of all errors that SpecSoT raises on purpose: `str(error)` is one clear line that may be
    shown to a user.
    """


class InvalidRequest(SpecsotError):
    """A request that can never succeed unchanged.

    field: name of the invalid field, or None if no single field is invalid.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        """Create the error.

        message: one line that says what is wrong, which value it has, and what is allowed.
        field: name of the invalid field, or None if no single field is invalid.
        """
        super().__init__(message)
        self.field = field


class TooLarge(InvalidRequest):
    """A request that this ring can never run. A ring with more KV pages or positions may."""


class ContextLengthExceeded(TooLarge):
    """Prompt and answer together are longer than the model's context."""

    @classmethod
    def of(cls, limit: int, prompt: int, completion: int) -> ContextLengthExceeded:
        """Return the error with the wording of OpenAI's API, which clients look for.

        limit: length of the context in tokens.
        prompt: length of the prompt in tokens.
        completion: number of tokens requested after the prompt.
        """
        return cls(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt + completion} tokens ({prompt} in the prompt, {completion} in the completion). Please "
            "reduce the length of the prompt or completion.",
            "prompt",
        )

    @classmethod
    def of_text(cls, limit: int, characters: int) -> ContextLengthExceeded:
        """Return the error for a prompt so long that its tokens were not counted.

        limit: length of the context in tokens.
        characters: length of the prompt in characters.
        """
        return cls(
            f"This model's maximum context length is {limit} tokens. However, you sent {characters} "
            "characters in the prompt, which cannot fit. Please reduce the length of the prompt or "
            "completion.",
            "prompt",
        )


class Unauthenticated(SpecsotError):
    """The caller sent no token, or an unknown one."""


class Forbidden(SpecsotError):
    """The caller's token is known, but does not allow this call."""


class NotFound(SpecsotError):
    """The named request, model or sequence does not exist."""


class Overloaded(SpecsotError):
    """No room at the moment; the same call may succeed after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        """Create the error.

        message: one line that says what has no room.
        retry_after: seconds after which the caller may try again.
        """
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(SpecsotError):
    """The ring is not complete, or failed while this request ran."""


class Hung(Unavailable):
    """A member's computation does not return. Only the end of its process can stop the computation."""


class Refused(SpecsotError):
    """Two parts do not belong together; the message names both values."""


class Occupied(Refused):
    """Another member holds the place. Once that member leaves or is lost, the same call may succeed."""


class ModelError(SpecsotError):
    """A model directory that cannot be used; the message names the file and the reason."""


class HeadMismatch(ModelError):
    """A draft head whose tensors do not fit its base; the message names both shapes."""


class PlanError(SpecsotError):
    """A plan without a valid line.

    text: the raw plan.
    """

    def __init__(self, message: str, text: str) -> None:
        """Create the error.

        message: one line that says what is wrong with the plan.
        text: the raw plan as the model wrote it.
        """
        super().__init__(message)
        self.text = text


class WireError(SpecsotError):
    """Bytes from a peer that cannot be decoded to what they claim to be."""


class TimedOut(SpecsotError):
    """The caller's deadline passed before the answer was complete."""


class Cancelled(SpecsotError):
    """The caller disconnected or cancelled."""


def one_line(error: Exception) -> str:
    """Return the message of any error as one line of at most 200 characters, for a message of ours.

    error: the error.
    """
    return " ".join(str(error).split())[:200]
