"""A chat answer's chunks as a message of Anthropic's: its events in order, and the object in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specsot_master.core.dialects.response_items import as_chunk
from specsot_master.core.dialects.tool_calls.arguments import read_arguments

Json = dict[str, Any]
CALL_ID = "toolu_"  # what ids of calls begin with


@dataclass(slots=True)
class MessageWriter:
    """Feed it the choices of chunks; it tells events. head: of the object, what does not change.

    One block of `content` is written at a time: a thought, text, or the use of a tool.
    """

    head: Mapping[str, Any]
    content: list[Json] = field(default_factory=list[Json])
    _open: bool = False  # the last block is being written
    _call: int | None = None  # which call that is
    _input: str = ""  # of that call, as JSON
    _stop: tuple[str | None, str | None] = (None, None)

    def begin(self, usage: Json) -> Iterator[Json]:
        yield {"type": "message_start", "message": self.told(usage)}

    def take(self, choice: Json) -> Iterator[Json]:
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
        yield from self._close()
        reason, hit = self._stop
        stopped = {"stop_reason": reason, "stop_sequence": hit}
        yield {"type": "message_delta", "delta": stopped, "usage": usage_of(usage)}
        yield {"type": "message_stop"}

    def whole(self, choice: Json, usage: Json) -> Json:
        for _ in (*self.take(as_chunk(choice)), *self.end(usage)):
            pass
        return self.told(usage)

    def told(self, usage: Json) -> Json:
        reason, hit = self._stop
        told = {**self.head, "content": list(self.content), "stop_reason": reason, "stop_sequence": hit}
        return told | {"usage": usage_of(usage)}

    def _reason_of(self, reason: str, hit: str | int | None) -> str:
        if any(block["type"] == "tool_use" for block in self.content) and reason != "length":
            return "tool_use"
        return "stop_sequence" if isinstance(hit, str) else _REASONS.get(reason, "end_turn")

    def _write(self, kind: str, part: str, text: str, **more: Any) -> Iterator[Json]:
        if not self._open or self.content[-1]["type"] != kind:
            yield from self._begin({"type": kind, part: "", **more})
        self.content[-1][part] += text
        yield self._delta({"type": f"{kind}_delta", part: text})

    def _take_call(self, call: Json) -> Iterator[Json]:
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
        yield from self._close()
        self.content.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Json]:
        """The block that is written is complete, if there is one."""
        if not self._open:
            return
        block = self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = read_arguments(self._input)
        if block["type"] == "thinking":  # nobody signs here; clients want to hear of one
            block["signature"] = self.head["id"]
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self.content) - 1}
        self._open = False
        self._call = None
        self._input = ""

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_of(usage: Json) -> Json:
    """Chat completions' figures under Anthropic's names, which count what was cached apart."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
