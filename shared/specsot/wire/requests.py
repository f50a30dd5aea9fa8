"""A client's request on the wire, and back as the value everybody else knows.

Refuses to know tokenizers, models and limits of a ring: impossible words raise InvalidRequest here,
impossible sizes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message as Proto

from specsot.errors import InvalidRequest
from specsot.params import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
    Ask,
    Limits,
    Message,
    Mode,
    check_length,
)
from specsot.v1 import master_pb2
from specsot.wire.forms import decode_form, encode_form
from specsot.wire.values import (
    DRAFTERS,
    decode_pruning,
    decode_sampling,
    decode_window,
    encode_drafter,
    encode_pruning,
    encode_sampling,
    encode_window,
)

T = TypeVar("T")

MODE_NUMBERS: dict[str, master_pb2.Mode] = {
    "auto": master_pb2.MODE_AUTO,
    "sot": master_pb2.MODE_SOT,
    "direct": master_pb2.MODE_DIRECT,
}
PLAIN = ("constraint", "seed", "ignore_eos", "logprobs", "priority", "resumable", "head_aware")
MODES: dict[int, Mode] = {
    master_pb2.MODE_AUTO: "auto",
    master_pb2.MODE_SOT: "sot",
    master_pb2.MODE_DIRECT: "direct",
}


def encode_ask(ask: Ask, request_id: str = "") -> master_pb2.GenerateRequest:
    """Every field is set: what the caller sees as a default is what the master hears."""
    return master_pb2.GenerateRequest(
        prompt=ask.prompt,
        messages=(master_pb2.Message(role=m.role, content=m.content) for m in ask.messages),
        tokens=ask.tokens,
        model=ask.model,
        mode=MODE_NUMBERS[ask.mode],
        drafter=encode_drafter(ask.drafter),
        sampling=encode_sampling(ask.sampling),
        limits=encode_limits(ask.limits),
        stop=ask.stop,
        tools=ask.tools,
        constraint=ask.constraint,
        seed=ask.seed,
        ignore_eos=ask.ignore_eos,
        logprobs=ask.logprobs,
        request_id=request_id,
        priority=ask.priority,
        resumable=ask.resumable,
        form=encode_form(ask.form),
        window=encode_window(ask.window),
        pruning=encode_pruning(ask.pruning),
        head_aware=ask.head_aware,
    )


def decode_ask(request: master_pb2.GenerateRequest, positions: int = MAX_TOKENS + 1) -> Ask:
    """Unset fields have the defaults of specsot.params. Raises InvalidRequest with the field's name.

    positions: the model's context; what cannot fit it is refused before it is read.
    """
    _check_sizes(request, positions)
    return Ask(
        prompt=request.prompt if request.HasField("prompt") else None,
        messages=decode_messages(request.messages),
        tokens=tuple(request.tokens),
        model=request.model,
        mode=named_choice(MODES, request.mode, "mode"),
        drafter=named_choice(DRAFTERS, request.drafter, "drafter") if request.drafter else None,
        sampling=decode_sampling(request.sampling),
        limits=Limits(**given_fields(request.limits)),
        stop=tuple(request.stop),
        tools=tuple(request.tools),
        form=decode_form(request.form) if request.HasField("form") else None,
        window=decode_window(request.window) if request.HasField("window") else None,
        pruning=decode_pruning(request.pruning) if request.HasField("pruning") else None,
        **given_fields(request, *PLAIN),
    )


def _check_sizes(request: master_pb2.GenerateRequest, positions: int) -> None:
    """Parts of a message that take a byte or two each, by their number. Raises InvalidRequest."""
    reach = MAX_TOKENS if request.HasField("window") else positions
    completion = request.limits.max_new_tokens or Limits().max_new_tokens
    check_length(reach, len(request.tokens), len(request.prompt), completion)
    for name, most in (("messages", MAX_MESSAGES), ("stop", MAX_STOPS), ("tools", MAX_TOOLS)):
        if (count := len(getattr(request, name))) > most:
            raise InvalidRequest(f"{name} must be at most {most}, got {count}", name)


def decode_messages(messages: Sequence[master_pb2.Message]) -> tuple[Message, ...]:
    return tuple(Message(message.role, message.content) for message in messages)


def resumes(request: master_pb2.GenerateRequest) -> bool:
    """It reads on in a request that is known, rather than asking for something. Raises InvalidRequest."""
    if request.resume_offset and not request.request_id:
        raise InvalidRequest("resume_offset needs a request_id", field="request_id")
    return bool(request.request_id) and (request.resume_offset > 0 or not has_words(request))


def has_words(request: master_pb2.GenerateRequest) -> bool:
    """There is something to answer in it."""
    return request.HasField("prompt") or bool(request.messages) or bool(request.tokens)


def encode_limits(limits: Limits) -> master_pb2.Limits:
    return master_pb2.Limits(
        max_new_tokens=limits.max_new_tokens,
        max_branch_tokens=limits.max_branch_tokens,
        max_skeleton_tokens=limits.max_skeleton_tokens,
        max_parallel=limits.max_parallel,
    )


def named_choice(table: dict[int, T], number: int, field: str) -> T:
    """What an enum number stands for; unspecified stands for the first, which is the default."""
    if number == 0:
        return next(iter(table.values()))
    if number not in table:
        raise InvalidRequest(f"{field} {number} is unknown", field=field)
    return table[number]


def given_fields(message: Proto, *names: str) -> dict[str, Any]:
    """The fields that are set: of these names, or all."""
    fields = message.ListFields()
    return {field.name: value for field, value in fields if not names or field.name in names}
