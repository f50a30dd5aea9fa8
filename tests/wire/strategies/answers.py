"""What clients are told: events of their requests, and how the fleet stands."""

from __future__ import annotations

from hypothesis import strategies as st

from specsot import events as ev
from specsot.core import info
from specsot.core.skeleton import Point
from tests.wire.strategies.asking import modes
from tests.wire.strategies.fleet import layers
from tests.wire.strategies.plain import big, seconds, small, text, tokens
from tests.wire.strategies.ring import logprobs

reasons = st.sampled_from(ev.Reason)
points = st.builds(Point, id=small, length=small, title=text, tool=st.none() | text, needs=tokens)
figures = st.builds(
    ev.Statistics,
    mode=modes,
    prompt_tokens=small,
    completion_tokens=small,
    merged_tokens=small,
    seconds=seconds,
    seconds_to_first_token=seconds,
    tokens_per_second=seconds,
    steps=small,
    mean_accepted=seconds,
    branches=small,
    cached_tokens=small,
    plan_tokens=small,
    heading_tokens=small,
    polish_tokens=small,
    paused_share=seconds,
    phases=st.dictionaries(text, seconds, max_size=3),
    decision=text,
    in_time=st.booleans(),
    discarded_tokens=small,
)
forecasts = st.none() | st.builds(ev.Forecast, *[st.none() | seconds] * 6)
candidates = st.builds(ev.Candidate, small, st.binary(max_size=6), logprobs)
told = st.lists(
    st.builds(ev.TokenLogprobs, candidates, st.lists(candidates, max_size=3).map(tuple)), max_size=2
).map(tuple)
merged = st.builds(ev.MergedText, small, text, told, small)
events = st.one_of(
    st.builds(
        ev.Started,
        request=text,
        model=text,
        mode=modes,
        seed=st.integers(0, 2**63 - 1),
        prompt_tokens=small,
        forecast=forecasts,
    ),
    st.builds(ev.SkeletonText, text, told),
    st.builds(ev.Planned, st.lists(points, max_size=3).map(tuple), forecasts),
    st.builds(ev.BranchStarted, small, text, small),
    st.builds(ev.BranchText, small, small, text, small, told),
    st.builds(ev.BranchFinished, small, reasons, small),
    merged,
    st.builds(ev.Finished, reasons, text, tokens, figures, st.none() | text, st.none() | small),
    st.builds(ev.PromptScored, small, told),
)
numbered = st.builds(ev.Numbered, big, events)

_pages = st.none() | st.builds(info.PagesInfo, small, small, small, small)
_requests = st.none() | st.builds(
    info.RequestsInfo,
    small,
    small,
    small,
    small,
    big,
    st.dictionaries(text, big, max_size=3).map(lambda ended: tuple(sorted(ended.items()))),
    big,
    big,
)
_steps = st.none() | st.builds(
    info.StepsInfo, big, big, seconds, seconds, seconds, st.lists(seconds, max_size=3).map(tuple)
)
_lines = st.lists(text, max_size=2).map(tuple)

infos = st.builds(
    info.Info,
    models=st.lists(st.builds(info.ModelInfo, text, text, small, small), max_size=2).map(tuple),
    members=st.lists(
        st.builds(
            info.MemberInfo,
            st.sampled_from(["worker", "drafter"]),
            text,
            text,
            text,
            st.none() | layers,
            text,
            text,
            st.booleans(),
            st.none() | small,
            text,
            big,
            text,
            big,
            seconds,
        ),
        max_size=2,
    ).map(tuple),
    epoch=big,
    ready=st.booleans(),
    waiting_for=_lines,
    pages=_pages,
    requests=_requests,
    steps=_steps,
    version=text,
    protocol=small,
    plan=text,
    replicas=st.lists(
        st.builds(info.ReplicaInfo, small, big, st.booleans(), _lines, _pages, _steps, _requests, text),
        max_size=2,
    ).map(tuple),
)
