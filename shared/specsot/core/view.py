"""Folds a request's events into what a watcher displays: (view, event) -> view."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from specsot import events
from specsot.core.skeleton import Point


@dataclass(frozen=True, slots=True)
class Panel:
    """One point of the plan. `reason` None: still waiting (not started) or writing.

    tokens: written so far. laps: how many texts brought them, so tokens / laps is its pace.
    """

    point: Point
    text: str = ""
    started: bool = False
    budget: int | None = None
    tokens: int = 0
    laps: int = 0
    reason: events.Reason | None = None

    @property
    def writing(self) -> bool:
        return self.started and self.reason is None


# A plan's line, in any dialect: a number, then perhaps a length, a label and needs, then the title.
_TITLE = re.compile(r"^\s*(\d{1,4})[.)]\s*(?:<[^>\n]*>\s*)*(?:\[[-\d, ]*\]\s*)?([^\s<\[].*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class View:
    """One request as seen so far. `planned` turns true with the plan, or with the choice of none.

    forecast: the newest. logprobs: of the merged answer's tokens, where they were asked for; prompt_logprobs:
    of the prompt's but the first.
    """

    started: events.Started | None = None
    forecast: events.Forecast | None = None
    skeleton: str = ""
    planned: bool = False
    panels: tuple[Panel, ...] = ()
    merged: str = ""
    logprobs: tuple[events.TokenLogprobs, ...] = ()
    finished: events.Finished | None = None
    prompt_logprobs: tuple[events.TokenLogprobs, ...] = ()

    @property
    def titles(self) -> str:
        """Of the plan that is being written, a line each; how it is written is nobody's business."""
        return "\n".join(f"{number}. {title}" for number, title in _TITLE.findall(self.skeleton))


def advance(view: View, event: events.Event) -> View:
    match event:
        case events.Started():
            return replace(view, started=event, forecast=event.forecast)
        case events.PromptScored():
            return replace(view, prompt_logprobs=view.prompt_logprobs + event.logprobs)
        case events.SkeletonText():
            return replace(view, skeleton=view.skeleton + event.text)
        case events.Planned():
            panels = (*view.panels, *map(Panel, event.points))  # a model that forks may do so again
            return replace(view, planned=True, panels=panels, forecast=event.forecast or view.forecast)
        case events.BranchStarted() | events.BranchText() | events.BranchFinished():
            return replace(view, panels=move_panel(view.panels, event))
        case events.MergedText():
            merged = view.merged[: event.offset] + event.text
            logprobs = view.logprobs + event.logprobs
            return replace(view, merged=merged, logprobs=logprobs)
        case events.Finished():
            return replace(view, merged=event.text, finished=event)


def move_panel(
    panels: tuple[Panel, ...], event: events.BranchStarted | events.BranchText | events.BranchFinished
) -> tuple[Panel, ...]:
    """The panels with one of them advanced; a branch no plan line named is added at the end."""
    if all(panel.point.id != event.branch for panel in panels):
        panels += (Panel(Point(event.branch, 0, getattr(event, "title", ""))),)
    return tuple(advance_panel(panel, event) if panel.point.id == event.branch else panel for panel in panels)


def advance_panel(
    panel: Panel, event: events.BranchStarted | events.BranchText | events.BranchFinished
) -> Panel:
    match event:
        case events.BranchStarted():
            return replace(panel, started=True, budget=event.budget)
        case events.BranchText():
            text = panel.text[: event.offset] + event.text
            return replace(panel, text=text, tokens=panel.tokens + event.lap_tokens, laps=panel.laps + 1)
        case events.BranchFinished():
            return replace(panel, started=True, reason=event.reason, tokens=event.tokens)
