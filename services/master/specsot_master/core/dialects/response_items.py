"""The chunks of a chat answer as OpenAI's Responses API: streamed events, and the whole response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# A decoded JSON object.
Json = dict[str, Any]


@dataclass(slots=True)
class ResponseWriter:
    """Converts the choices of chat chunks to events of OpenAI's Responses API, and to the whole response.

    One item of `output` is written at a time: a thought, a message, or a function call.

    head: the fields of the response object that do not change: its id, model, and the echoed request.
    spaces: for functions that have a namespace, the namespace and the function's name in it, by the name that
        the model uses; empty if no function has one.
    output: the finished items, in order.
    """

    head: Mapping[str, Any]
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    output: list[Json] = field(default_factory=list[Json])
    # The sequence number of the next event.
    _number: int = 0
    # The item that is being written; None between two items.
    _item: Json | None = None  # The unfinished item.
    # The index of the call that the unfinished item holds; None if it holds none.
    _call: int | None = None  # The index of the call that the unfinished item holds.
    # The finish_reason of the choice; None until it arrives.
    _reason: str | None = None

    def begin(self, usage: Json) -> Iterator[Json]:
        """Yield the two events before the first item, with an empty response.

        usage: the tokens counted so far; the Responses API does not report them here.
        """
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self.response_object("in_progress"))

    def take(self, choice: Json) -> Iterator[Json]:
        """Yield the events for one choice of a chunk; there may be none. A thought, text and calls of the
        choice add to the response. A finish_reason that is None keeps the earlier one.

        choice: the choice, in the format of chat completions.
        """
        delta = choice["delta"]
        if thought := delta.get("reasoning_content"):
            yield from self._write("reasoning", "reasoning_text", thought)
        if text := delta.get("content"):
            yield from self._write("message", "output_text", text)
        for call in delta.get("tool_calls", ()):
            yield from self._take_call(call)
        self._reason = choice["finish_reason"] or self._reason

    def end(self, usage: Json) -> Iterator[Json]:
        """Finish the last item, if one is unfinished, and yield the event that ends the response: completed,
        incomplete, or failed for a finish_reason that is unknown or missing. An unfinished item gets the
        status "incomplete" if the response has it, else "completed".

        usage: the tokens of the whole call, in the format of chat completions.
        """
        status = _STATUS.get(self._reason or "", "failed")
        yield from self._close("incomplete" if status == "incomplete" else "completed")
        yield self._event(f"response.{status}", response=self.response_object(status, usage))

    def whole(self, choice: Json, usage: Json) -> Json:
        """Return the whole response for one choice of an answer that is not streamed; its `output` is empty
        if the answer has neither text nor calls. Its status follows from the finish_reason, as in `end`.

        choice: the choice, in the format of chat completions.
        usage: the tokens of the call, in the format of chat completions.
        """
        for _ in self.take(as_chunk(choice)):
            pass
        *_, last = self.end(usage)
        return last["response"]

    def fail(self, error: Json) -> Json:
        """Return the event that ends the response with an error. It keeps the items that are finished.

        error: the error in OpenAI's format, with "code" and "message"; a code of None is reported as
            "server_error".
        """
        error_json = {"code": error["code"] or "server_error", "message": error["message"]}
        return self._event("response.failed", response=self.response_object("failed") | {"error": error_json})

    def response_object(self, status: str, usage: Json | None = None) -> Json:
        """Return the response object as far as it is written. `incomplete_details` names "max_output_tokens"
        for the status "incomplete"; `usage` is None if no usage is given.

        status: the response's status, such as "in_progress" or "completed".
        usage: the tokens of the call, in the format of chat completions; None before the end.
        """
        return {
            **self.head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self.output),
            "usage": usage and usage_of(usage),
        }

    def _event(self, kind: str, **more: Any) -> Json:
        """Return an event with the next sequence number.

        kind: the event's type, such as "response.created".
        more: its further members, by name.
        """
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _write(self, kind: str, part: str, text: str) -> Iterator[Json]:
        """Yield the events that add text to an item of this kind, after the events that start a new item if
        the last item is of another kind. An unfinished item of another kind is finished first.

        kind: the item's type, "reasoning" or "message".
        part: the type of the part of its content that holds the text.
        text: the new text.
        """
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
        """Yield the events for a new part of a function call, after the events that start a new item if the
        part belongs to another call than the part before. No event is yielded for a part that adds no
        arguments to the same call. A function with a namespace is written with the namespace and its name in
        it.

        call: a member of `tool_calls` in a chunk of chat completions.
        """
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
        """Begin another item, and yield its first event. The item's id consists of the prefix of its type,
        the id of the response and its number in the output.

        kind: the item's type: "reasoning", "message" or "function_call".
        more: its further members, by name.
        """
        id = f"{_PREFIXES[kind]}_{self.head['id'].partition('_')[2]}{len(self.output)}"
        self._item = {"id": id, "type": kind, "status": "in_progress", **more}
        new_item = {**self._item, "content": []} if "content" in self._item else dict(self._item)
        yield self._event("response.output_item.added", output_index=len(self.output), item=new_item)

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """Finish the unfinished item, if there is one, and yield its last events; yield nothing if there is
        none.

        status: the item's status from now on, "completed" or "incomplete".
        """
        item = self._item
        if item is None:
            return
        if item["type"] == "function_call":
            call_members = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event(
                "response.function_call_arguments.done", **self._place(content=False, **call_members)
            )
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
        """The unfinished item; there must be one."""
        assert self._item is not None
        return self._item

    def _place(self, content: bool = True, **more: Any) -> Json:
        """Return the members that say which item, and which part of its content, an event belongs to. There
        must be an unfinished item.

        content: True if the event belongs to the first part of the item's content.
        more: further members of the event.
        """
        place = {"item_id": self._written["id"], "output_index": len(self.output)}
        return place | ({"content_index": 0} if content else {}) | more


# The response's status for each finish_reason of chat completions; any other reason means "failed".
_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "abort": "incomplete"}
# The prefix of the id of an item of each type.
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _part(kind: str) -> Json:
    """Return an empty part of an item's content.

    kind: the part's type.
    """
    part: Json = {"type": kind, "text": ""}
    return part | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})


def usage_of(usage: Json) -> Json:
    """Return the usage of chat completions under the names of the Responses API.

    usage: the `usage` object of chat completions.
    """
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


def as_chunk(choice: Json) -> Json:
    """Return a choice of a whole answer in the form of a chunk's choice: its message becomes the delta, and
    its calls are numbered from 0. An answer without calls gets an empty list of them.

    choice: a choice of a chat completion, with a "message".
    """
    message = choice["message"]
    calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
    return {**choice, "delta": message | {"tool_calls": calls}}
