"""One request as spans: the whole, its wait, its plan, every branch, a direct answer.

Refuses to know doors, rings and text: attributes are counts, names and reasons.
"""

from __future__ import annotations

import sys

from specsot.errors import SpecsotError
from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    Event,
    Finished,
    MergedText,
    Planned,
    Reason,
    SkeletonText,
    Started,
)
from specsot.params import Ask
from specsot.tracing import Span, Tracer, caller, current

REQUEST_SPAN, WAIT_SPAN, PLAN_SPAN, ANSWER_SPAN = "request", "wait", "plan", "answer"
FIRST_TOKEN = "first token"


class RequestSpans:
    """A watch of the desk. Phases are children of the request's own span, which is the caller's child."""

    def __init__(self, tracer: Tracer, ask: Ask, model: str) -> None:
        self._tracer = tracer
        about = {"gen_ai.operation.name": "chat", "gen_ai.request.model": model, "specsot.mode": ask.mode}
        self._whole = tracer.begin(REQUEST_SPAN, caller.get(), about=about)
        current.set(self._whole.context)
        self._open: dict[str, Span] = {REQUEST_SPAN: self._whole}
        self._spoken: set[str] = set()
        self._begin(WAIT_SPAN)

    def told(self, event: Event) -> None:
        match event:
            case Started():
                self._end(WAIT_SPAN)
                self._begin(ANSWER_SPAN if event.mode == "direct" else PLAN_SPAN)
                self._whole.note("started", {"gen_ai.response.id": event.request})
            case SkeletonText():
                self._speak(PLAN_SPAN)
            case Planned(points):
                self._end(PLAN_SPAN, points=len(points))
                if not points:
                    self._begin(ANSWER_SPAN)
            case BranchStarted(branch):
                self._begin(_branch_span(branch), branch=branch, budget=event.budget)
            case BranchText(branch):
                self._speak(_branch_span(branch))
            case BranchFinished(branch, reason, tokens):
                self._end(_branch_span(branch), reason is Reason.FAILED, tokens=tokens, reason=reason.value)
            case MergedText():
                self._speak(ANSWER_SPAN)
            case Finished():
                self._finish(event)

    def ended(self) -> None:
        """What is still open ends with the error that is under way, or because its reader left."""
        error = sys.exception()
        for name in reversed(list(self._open)):
            self._open.pop(name).end(error=error if isinstance(error, SpecsotError) else "abandoned")

    def _begin(self, name: str, **about: int) -> None:
        named = {f"specsot.{key}": value for key, value in about.items()}
        self._open[name] = self._tracer.begin(name, self._whole.context, about=named)

    def _speak(self, name: str) -> None:
        if name in self._open and name not in self._spoken:
            self._spoken.add(name)
            self._open[name].note(FIRST_TOKEN)

    def _end(self, name: str, failed: bool = False, **about: int | str) -> None:
        if span := self._open.pop(name, None):
            named = {f"specsot.{key}": value for key, value in about.items()}
            span.end(named, error="failed" if failed else None)

    def _finish(self, event: Finished) -> None:
        figures = event.statistics
        for name in [name for name in self._open if name != REQUEST_SPAN]:
            self._end(name)
        self._open.pop(REQUEST_SPAN).end(
            {
                "gen_ai.usage.input_tokens": figures.prompt_tokens,
                "gen_ai.usage.output_tokens": figures.completion_tokens,
                "gen_ai.response.finish_reasons": [event.reason.value],
                "specsot.laps": figures.laps,
                "specsot.branches": figures.branches,
                "specsot.cached_tokens": figures.cached_tokens,
                "specsot.mean_accepted": figures.mean_accepted,
            }
        )


def _branch_span(branch: int) -> str:
    return f"branch {branch}"
