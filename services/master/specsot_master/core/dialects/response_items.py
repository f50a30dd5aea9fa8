"""A chat answer's chunks as a Response of OpenAI's: its events in their order, and the object in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(slots=True)
class ResponseWriter:
    """Feed it the choices of chunks; it tells events. head: of the object, what does not change. spaces: of
    functions that have a namespace, it and their name there, by what the model calls them.

    One item of `output` is written at a time: a thought, a message, or the call of a function.
    """

    head: Mapping[str, Any]
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    output: list[Json] = field(default_factory=list[Json])
    _number: int = 0
    _item: Json | None = None  # that is being written
    _call: int | None = None  # which call that is
    _reason: str | None = None

    def begin(self, usage: Json) -> Iterator[Json]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self.told("in_progress"))

    def take(self, choice: Json) -> Iterator[Json]:
        delta = choice["delta"]
        if thought := delta.get("reasoning_content"):
            yield from self._write("reasoning", "reasoning_text", thought)
        if text := delta.get("content"):
            yield from self._write("message", "output_text", text)
        for call in delta.get("tool_calls", ()):
            yield from self._take_call(call)
        self._reason = choice["finish_reason"] or self._reason

    def end(self, usage: Json) -> Iterator[Json]:
        """No more chunks come. usage: of chat completions."""
        status = _STATUS.get(self._reason or "", "failed")
        yield from self._close("incomplete" if status == "incomplete" else "completed")
        yield self._event(f"response.{status}", response=self.told(status, usage))

    def whole(self, choice: Json, usage: Json) -> Json:
        for _ in self.take(as_chunk(choice)):
            pass
        *_, last = self.end(usage)
        return last["response"]

    def fail(self, error: Json) -> Json:
        """An error instead. error: in OpenAI's shape."""
        told = {"code": error["code"] or "server_error", "message": error["message"]}
        return self._event("response.failed", response=self.told("failed") | {"error": told})

    def told(self, status: str, usage: Json | None = None) -> Json:
        return {
            **self.head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self.output),
            "usage": usage and usage_of(usage),
        }

    def _event(self, kind: str, **more: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _write(self, kind: str, part: str, text: str) -> Iterator[Json]:
        if self._item is None or self._item["type"] != kind:
            yield from self._close()
            head: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self._open(kind, **head, content=[])
            self._written["content"].append(_part(part))
            yield self._event("response.content_part.added", **self._place(part=_part(part)))
        self._written["content"][0]["text"] += text
        more: Json = {"logprobs": []} if part == "output_text" else {}
        yield self._event(f"response.{part}.delta", **self._place(delta=text), **more)

    def _take_call(self, call: Json) -> Iterator[Json]:
        function = call["function"]
        if call["index"] != self._call:
            yield from self._close()
            space, name = self.spaces.get(function["name"], (None, function["name"]))
            more = {"name": name} | ({"namespace": space} if space else {})
            yield from self._open("function_call", call_id=call["id"], **more, arguments="")
            self._call = call["index"]
        if arguments := function.get("arguments"):
            self._written["arguments"] += arguments
            yield self._event(
                "response.function_call_arguments.delta", **self._place(content=False, delta=arguments)
            )

    def _open(self, kind: str, **more: Any) -> Iterator[Json]:
        id = f"{_PREFIXES[kind]}_{self.head['id'].partition('_')[2]}{len(self.output)}"
        self._item = {"id": id, "type": kind, "status": "in_progress", **more}
        told = {**self._item, "content": []} if "content" in self._item else dict(self._item)
        yield self._event("response.output_item.added", output_index=len(self.output), item=told)

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """Nothing more comes of the item that is written, if there is one."""
        item = self._item
        if item is None:
            return
        if item["type"] == "function_call":
            said = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **self._place(content=False, **said))
        else:
            part = item["content"][0]
            more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
            yield self._event(f"response.{part['type']}.done", **self._place(text=part["text"]), **more)
            yield self._event("response.content_part.done", **self._place(part=dict(part)))
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self.output), item=dict(item))
        self.output.append(item)
        self._item = self._call = None

    @property
    def _written(self) -> Json:
        assert self._item is not None
        return self._item

    def _place(self, content: bool = True, **more: Any) -> Json:
        place = {"item_id": self._written["id"], "output_index": len(self.output)}
        return place | ({"content_index": 0} if content else {}) | more


_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "abort": "incomplete"}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _part(kind: str) -> Json:
    """An empty one."""
    told: Json = {"type": kind, "text": ""}
    return told | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})


def usage_of(usage: Json) -> Json:
    """Chat completions' figures under the names of Responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


def as_chunk(choice: Json) -> Json:
    """A whole answer's choice as one chunk's."""
    message = choice["message"]
    calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
    return {**choice, "delta": message | {"tool_calls": calls}}
