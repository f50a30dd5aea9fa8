"""Folds a request's events into the state that a user interface displays: (view, event) -> view."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from specsot import events
from specsot.core.skeleton import Point


@dataclass(frozen=True, slots=True)
class Panel:
    """What a user interface displays of one point of the plan and its branch.

    point: the line of the plan.
    text: the branch's text so far.
    started: True once the branch's prompt is in the ring.
    tokens: number of tokens that the branch has generated.
    steps: number of `BranchText` events, one per step, so that tokens / steps is the branch's pace.
    reason: why the branch finished. None while it waits or decodes.
    """

    point: Point
    text: str = ""
    started: bool = False
    tokens: int = 0
    steps: int = 0
    reason: events.Reason | None = None

    @property
    def writing(self) -> bool:
        """True while the branch decodes. False before its prompt is in the ring, and once it has finished."""
        return self.started and self.reason is None


# A line of a plan in any plan style: a number, then optionally a length, a label and dependencies, then the
# title.
_TITLE = re.compile(r"^\s*(\d{1,4})[.)]\s*(?:<[^>\n]*>\s*)*(?:\[[-\d, ]*\]\s*)?([^\s<\[].*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class View:
    """What a user interface displays of one request, after the events so far.

    started: the request's first event, or None before it.
    forecast: the newest forecast, or None.
    skeleton: raw text of the skeleton so far.
    planned: True once the plan is complete, or the model has chosen to answer directly.
    panels: the points of the plan with their branches.
    merged: the merged answer so far.
    introduced: length of the introduction, the text before the points of a plan, in characters.
    logprobs: log-probabilities of the merged answer's tokens, if the request asks for them.
    finished: the request's last event, or None before it.
    prompt_logprobs: log-probabilities of the prompt's tokens but the first, if the request asks for them.
    """

    started: events.Started | None = None
    forecast: events.Forecast | None = None
    skeleton: str = ""
    planned: bool = False
    panels: tuple[Panel, ...] = ()
    merged: str = ""
    introduced: int = 0
    logprobs: tuple[events.TokenLogprobs, ...] = ()
    finished: events.Finished | None = None
    prompt_logprobs: tuple[events.TokenLogprobs, ...] = ()

    @property
    def titles(self) -> str:
        """The numbered titles of the plan so far, one per line, without the marks of the plan style. Empty if
        there is none yet.
        """
        return "\n".join(f"{number}. {title}" for number, title in _TITLE.findall(self.skeleton))


def advance(view: View, event: events.Event) -> View:
    """Return the view after one more event. The given view is not changed.

    Text of `MergedText` replaces whatever the view has from the event's offset on.

    view: the view of the events before.
    event: the next event of the request's stream.

    Text beyond the event's offset that the view had is dropped, but log-probabilities are only added. The
    points of a second `Planned` are added to those of the first. `Finished` replaces the merged text by the
    whole answer. Events of a branch change the panel of its point.
    """
    match event:
        case events.Started():
            return replace(view, started=event, forecast=event.forecast)
        case events.PromptScored():
            return replace(view, prompt_logprobs=view.prompt_logprobs + event.logprobs)
        case events.SkeletonText():
            return replace(view, skeleton=view.skeleton + event.text)
        case events.Planned():
            # A model that forks by tags may plan several times, so the points are added to earlier ones.
            panels = (*view.panels, *map(Panel, event.points))
            introduced = len(view.merged) if event.points and not view.panels else view.introduced
            return replace(
                view,
                planned=True,
                panels=panels,
                introduced=introduced,
                forecast=event.forecast or view.forecast,
            )
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
    """Return the panels after an event of one branch.

    A branch that no point of the plan has is added as the last panel.

    panels: the panels before the event.
    event: the event of the branch.
    """
    if all(panel.point.id != event.branch for panel in panels):
        panels += (Panel(Point(event.branch, 0, getattr(event, "title", ""))),)
    return tuple(advance_panel(panel, event) if panel.point.id == event.branch else panel for panel in panels)


def advance_panel(
    panel: Panel, event: events.BranchStarted | events.BranchText | events.BranchFinished
) -> Panel:
    """Return a panel after an event of its branch. Text of `BranchText` replaces whatever the panel has from
    the event's offset on.

    panel: the panel before the event.
    event: the event of the panel's own branch.

    The panel itself is not changed. `BranchStarted` marks the panel as started, as `BranchFinished` does;
    `BranchText` adds its tokens and one step, and `BranchFinished` sets the reason and the final number of
    tokens.
    """
    match event:
        case events.BranchStarted():
            return replace(panel, started=True)
        case events.BranchText():
            text = panel.text[: event.offset] + event.text
            return replace(panel, text=text, tokens=panel.tokens + event.step_tokens, steps=panel.steps + 1)
        case events.BranchFinished():
            return replace(panel, started=True, reason=event.reason, tokens=event.tokens)
