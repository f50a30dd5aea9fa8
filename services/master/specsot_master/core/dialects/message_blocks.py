"""The chunks of a chat answer as Anthropic's message API: streamed events, and the whole message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specsot_master.core.dialects.response_items import as_chunk
from specsot_master.core.dialects.tool_calls.arguments import read_arguments

# A decoded JSON object.
Json = dict[str, Any]
CALL_ID = "toolu_"  # The prefix of the ids of tool calls.


@dataclass(slots=True)
class MessageWriter:
    """Converts the choices of chat chunks to events of Anthropic's message API, and to the whole message.

    One block of `content` is written at a time: a thought, a text, or a tool call.

    head: the fields of the message object that do not change: its id, type, role and model.
    content: the blocks so far, the last of which may be unfinished.
    """

    head: Mapping[str, Any]
    content: list[Json] = field(default_factory=list[Json])
    # True while the last block of `content` is unfinished.
    _open: bool = False
    # The index of the call that the unfinished block holds, or None.
    _call: int | None = None
    # The arguments of that call so far, as JSON text.
    _input: str = ""
    # Why the message ended (stop_reason), and the stop sequence that ended it.
    _stop: tuple[str | None, str | None] = (None, None)

    def begin(self, usage: Json) -> Iterator[Json]:
        """Yield the event before the first block, `message_start`, with an empty message.

        usage: the tokens counted so far, in the format of chat completions.
        """
        yield {"type": "message_start", "message": self.message_object(usage)}

    def take(self, choice: Json) -> Iterator[Json]:
        """Yield the events for one choice of a chunk; there may be none. A thought, text and calls of the
        choice add to `content`. A finish_reason is recorded for the end of the message, and with it the stop
        string, if one ended the answer.

        choice: the choice, in the format of chat completions.
        """
        delta = choice["delta"]
        if thought := delta.get("reasoning_content"):
            yield from self._write("thinking", "thinking", thought, signature="")
        if text := delta.get("content"):
            yield from self._write("text", "text", text)
        for call in delta.get("tool_calls", ()):
            yield from self._take_call(call)
        if choice["finish_reason"] is not None:
            hit = choice.get("stop_reason")
            self._stop = self._reason_of(choice["finish_reason"], hit), hit if isinstance(hit, str) else None

    def end(self, usage: Json) -> Iterator[Json]:
        """Finish the last block, if it is unfinished, and yield the events at the end of the message: at
        least `message_delta` and `message_stop`. An unfinished block yields its last events first. The
        reasons are None if no finish_reason has arrived.

        usage: the tokens of the whole call, in the format of chat completions.
        """
        yield from self._close()
        reason, hit = self._stop
        stopped = {"stop_reason": reason, "stop_sequence": hit}
        yield {"type": "message_delta", "delta": stopped, "usage": usage_of(usage)}
        yield {"type": "message_stop"}

    def whole(self, choice: Json, usage: Json) -> Json:
        """Return the whole message for one choice of an answer that is not streamed; its `content` is empty
        if the answer has neither text nor calls. The chunks' events are not returned.

        choice: the choice, in the format of chat completions.
        usage: the tokens of the call, in the format of chat completions.
        """
        for _ in (*self.take(as_chunk(choice)), *self.end(usage)):
            pass
        return self.message_object(usage)

    def message_object(self, usage: Json) -> Json:
        """Return the message object as far as it is written. `stop_reason` and `stop_sequence` are None until
        the finish_reason has arrived.

        usage: the tokens counted so far, in the format of chat completions.
        """
        reason, hit = self._stop
        message_object = {
            **self.head,
            "content": list(self.content),
            "stop_reason": reason,
            "stop_sequence": hit,
        }
        return message_object | {"usage": usage_of(usage)}

    def _reason_of(self, reason: str, stop: str | int | None) -> str:
        """Return Anthropic's stop_reason; "end_turn" for a finish_reason that has no other. A message with a
        tool call has "tool_use", unless its length was limited. Otherwise a stop string gives
        "stop_sequence"; a stop token does not.

        reason: the finish_reason of chat completions.
        stop: the stop string or stop token that ended the answer, or None.
        """
        if any(block["type"] == "tool_use" for block in self.content) and reason != "length":
            return "tool_use"
        return "stop_sequence" if isinstance(stop, str) else _REASONS.get(reason, "end_turn")

    def _write(self, kind: str, part: str, text: str, **more: Any) -> Iterator[Json]:
        """Yield the events that add text to a block of this kind, after the event that starts a new block if
        the last block is of another kind. An unfinished block of another kind is finished first.

        kind: the block's type, "thinking" or "text".
        part: the member of the block that holds the text.
        text: the new text.
        more: further members of a new block, with their first values.
        """
        if not self._open or self.content[-1]["type"] != kind:
            yield from self._begin({"type": kind, part: "", **more})
        self.content[-1][part] += text
        yield self._delta({"type": f"{kind}_delta", part: text})

    def _take_call(self, call: Json) -> Iterator[Json]:
        """Yield the events for a new part of a tool call, after the event that starts a new block if the part
        belongs to another call than the part before. No event is yielded for a part that adds no arguments to
        the same call. A new block has the call's id and name; an unfinished block is finished before it.

        call: a member of `tool_calls` in a chunk of chat completions.
        """
        function = call["function"]
        if call["index"] != self._call:
            yield from self._begin(
                {"type": "tool_use", "id": f"{CALL_ID}{call['id']}", "name": function["name"], "input": {}}
            )
            self._call = call["index"]
        if arguments := function.get("arguments"):
            self._input += arguments
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _begin(self, block: Json) -> Iterator[Json]:
        """Finish the last block, if it is unfinished, and yield the event that begins another one. The block
        is appended to `content`.

        block: the new block, with empty contents.
        """
        yield from self._close()
        self.content.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Json]:
        """Finish the unfinished block, if there is one, and yield its last events; yield nothing if there is
        none. The arguments of a call are decoded, repaired if necessary, into the block's `input`. A thought
        gets the message's id as its signature, with an event of its own.
        """
        if not self._open:
            return
        block = self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = read_arguments(self._input)
        # Clients expect a signature on every thought. Nothing is signed here, so the message's id stands for
        # it.
        if block["type"] == "thinking":
            block["signature"] = self.head["id"]
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self.content) - 1}
        self._open = False
        self._call = None
        self._input = ""

    def _delta(self, delta: Json) -> Json:
        """Return the event that adds to the last block, which must be unfinished.

        delta: what is added, in Anthropic's format.
        """
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


# Anthropic's stop_reason for each finish_reason of chat completions.
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_of(usage: Json) -> Json:
    """Return the usage of chat completions under Anthropic's names, which count cached tokens separately. No
    tokens are ever counted as written to a cache.

        prompt_tokens 100 with cached_tokens 60 -> input_tokens 40, cache_read_input_tokens 60

    usage: the `usage` object of chat completions.
    """
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
