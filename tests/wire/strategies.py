"""Hypothesis strategies for every value that travels.

Knows nothing of protobuf: only what the values themselves allow.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from specsot import events as ev
from specsot import frames as fr
from specsot import info, members, params
from specsot.forms import Form
from specsot.links import Lost
from specsot.skeleton import PlanRules, Point
from specsot.tree import Tree

small = st.integers(0, 2**32 - 1)
big = st.integers(0, 2**64 - 1)
tokens = st.lists(small, max_size=6).map(tuple)
seconds = st.floats(0, 1e6, allow_nan=False)
times = st.lists(seconds, max_size=4).map(tuple)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.from_regex(r"[a-z0-9:._/-]{1,20}", fullmatch=True)
traces = st.none() | st.from_regex(r"00-[1-9a-f]{32}-[1-9a-f]{16}-0[01]", fullmatch=True)
rising = st.sets(st.integers(0, 4000), max_size=6).map(lambda s: tuple(sorted(s)))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(1, 8))
    parents = [draw(st.integers(0, max(node - 1, 0))) for node in range(count)]
    return Tree(tuple(draw(small) for _ in range(count)), tuple(parents))


@st.composite
def tensors(draw: st.DrawFn, rows: int | None = None) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = (draw(st.integers(0, 4)) if rows is None else rows, draw(st.integers(0, 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn(shape, generator=generator).to(dtype)


samplings = st.builds(
    params.Sampling,
    temperature=st.floats(0, 10, allow_nan=False),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
)
rules = st.builds(
    PlanRules,
    direct=st.booleans(),
    tools=st.lists(text, max_size=3).map(tuple),
    max_points=st.integers(1, 99),
    plan_tokens=small,
)


filled = text.filter(bool)
forms = (
    st.just(Form("json_object"))
    | st.builds(Form, st.sampled_from(["json_schema", "regex"]), st.tuples(filled))
    | st.builds(Form, st.just("choice"), st.lists(filled, min_size=1, max_size=3).map(tuple))
)
windows = st.builds(params.Window, sinks=st.integers(0, 99), recent=st.integers(16, 9999))
prunings = st.builds(
    params.Pruning,
    keep_ratio=st.floats(0, 1, exclude_min=True),
    prune_every=st.integers(16, 999),
    skip_layers=st.integers(0, 9),
)
_pairs = st.tuples(st.integers(0, 99), st.integers(0, params.MAX_TOKENS))
head_windows = st.lists(st.tuples(_pairs, _pairs), min_size=1, max_size=3).map(
    lambda layers: params.HeadWindows(tuple(layers))
)


@st.composite
def openings(draw: st.DrawFn) -> fr.Opening:
    prompt = draw(small)
    fork = draw(st.none() | st.builds(fr.Fork, sequence=big, length=st.integers(0, prompt)))
    return fr.Opening(
        sequence=draw(big),
        prompt=prompt,
        fork=fork,
        decodes=draw(st.booleans()),
        drafted=draw(st.booleans()),
        generated=draw(st.integers(0, prompt)),
        sampling=draw(samplings),
        seed=draw(big),
        ordinal=draw(big),
        stop_ids=draw(tokens),
        limit=draw(small),
        plan=draw(st.none() | rules),
        logprobs=draw(st.none() | small),
        form=draw(st.none() | forms),
        family=draw(st.none() | big),
        drafter=draw(st.none() | st.sampled_from(params.DRAFTERS)),
        trace=draw(traces),
        window=draw(st.none() | windows),
        pruning=draw(st.none() | prunings),
        heads=draw(st.none() | head_windows),
    )


@st.composite
def opens(draw: st.DrawFn) -> fr.Open:
    fed, forked = draw(tokens), draw(st.none() | st.integers(0, 1000))
    fork = None if forked is None else fr.Fork(draw(big), forked)
    opening = fr.Opening(sequence=draw(big), prompt=len(fed) + (forked or 0), fork=fork)
    return fr.Open(opening, fed, draw(small))


@st.composite
def growths(draw: st.DrawFn) -> fr.Growth:
    keep = draw(rising)
    committed = draw(st.integers(len(keep), 2**32 - 1))
    return fr.Growth(draw(big), draw(small), committed, keep, draw(trees()))


segments = st.builds(fr.Chunk, sequence=big, start=small, tokens=tokens, final=st.booleans()) | growths()
sequences = st.lists(big, max_size=3).map(tuple)
frames = st.builds(
    fr.Frame,
    epoch=big,
    number=big,
    openings=st.lists(openings(), max_size=2).map(tuple),
    segments=st.lists(segments, max_size=3).map(tuple),
    closings=sequences,
    hidden=st.none() | tensors(),
    fused=st.none() | tensors(),
    seconds=times,
    resting=st.booleans(),
    trace=traces,
)
logprobs = st.floats(-100, 0, width=32)
chances = st.builds(fr.Chance, logprobs, st.lists(st.tuples(small, logprobs), max_size=3).map(tuple))


@st.composite
def outcomes(draw: st.DrawFn) -> fr.Outcome:
    written = draw(tokens)
    told = draw(st.just(()) | st.tuples(*(chances for _ in written)))
    end = draw(st.none() | st.sampled_from(fr.End))
    return fr.Outcome(draw(big), draw(small), draw(rising), written, end, told, draw(tokens))


results = st.builds(
    fr.Result,
    epoch=big,
    number=big,
    outcomes=st.lists(outcomes(), max_size=3).map(tuple),
    seconds=times,
    rows=small,
    drafts=small,
    drafted=small,
)
lessons = st.builds(
    fr.Lesson,
    sequence=big,
    start=small,
    tokens=tokens,
    bonus=st.none() | small,
    step=st.none() | small,
    forced=tokens,
)


@st.composite
def features(draw: st.DrawFn) -> fr.Features:
    taught = tuple(draw(st.lists(lessons, max_size=3)))
    count = sum(len(lesson.tokens) for lesson in taught)
    rows = draw(tensors(count)) if count else draw(st.none() | tensors(0))
    return fr.Features(
        epoch=draw(big),
        number=draw(big),
        openings=tuple(draw(st.lists(openings(), max_size=2))),
        lessons=taught,
        closings=draw(sequences),
        rows=rows,
        fed=draw(small),
        seconds=draw(seconds),
        wall=draw(seconds),
        rested=draw(small),
        trace=draw(traces),
    )


drafts = st.builds(
    fr.Drafts,
    epoch=big,
    drafts=st.lists(st.builds(fr.Draft, sequence=big, step=small, tree=trees()), max_size=3).map(tuple),
    rest=small,
)
taps = st.builds(members.Tap, epoch=big, layer=small, weight=tensors())
losses = st.builds(Lost, peer=names, reason=text, epoch=big)
carried = st.one_of(frames, results, features(), drafts, taps, losses)

layers = st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda p: members.Range(p[0], p[0] + p[1]))
heads = st.builds(members.Head, taps=rising, width=small)
curves = st.dictionaries(st.integers(0, 4096), seconds, max_size=4).map(lambda d: tuple(sorted(d.items())))
shapes = st.builds(members.TreeShape, depth=small, top_k=small, nodes=small, fixed=st.booleans())
registrations = st.builds(
    members.Registration,
    kind=st.sampled_from(["worker", "drafter"]),
    name=names,
    address=names,
    fingerprint=text,
    model_layers=small,
    max_positions=small,
    kv_bytes=big,
    row_bytes=big,
    layers=st.none() | layers,
    curve=curves,
    head=st.none() | heads,
    protocol=small,
    drafters=st.lists(st.sampled_from(params.DRAFTERS), max_size=3).map(tuple),
    shape=st.none() | shapes,
    host=text,
    gpus=st.lists(names, max_size=2).map(tuple),
    memory=st.none() | big,
    weights=st.none() | st.builds(members.WeightBytes, big, big, big),
    rtt=st.none() | seconds,
    began=big,
    number_bytes=small,
    quantization=st.sampled_from(("", "int8", "int4")),
)
stages = st.builds(members.Stage, name=names, address=names, layers=layers)
configurations = st.builds(
    members.Configuration,
    epoch=big,
    you=names,
    stages=st.lists(stages, max_size=3).map(tuple),
    pages=small,
    page_rows=small,
    slots=small,
    rows=small,
    flight=small,
    layout=st.sampled_from(["packed", "batched"]),
    drafter=st.none() | names,
    head=st.none() | heads,
    shape=shapes,
    draft_timeout=seconds,
    curve=curves,
    transport=st.sampled_from(["grpc", "zmq", "direct"]),
    comm_mode=st.sampled_from(["p2p", "ring"]),
    gpu=st.none() | names,
)
upward = st.one_of(
    registrations,
    st.builds(members.Ready, big),
    st.builds(members.Broken, big, text),
    st.builds(members.Leaving, text),
    st.just(members.Beat()),
    results,
)
downward = st.one_of(
    configurations,
    st.builds(members.Disband, big, text),
    st.builds(members.StandBy, big),
    st.builds(members.Rejoined, big, names),
    st.just(members.Beat()),
    opens(),
    st.builds(fr.Close, big),
    st.builds(fr.Lease, big, small),
)

modes = st.sampled_from(params.MODES)
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
    laps=small,
    mean_accepted=seconds,
    branches=small,
    cached_tokens=small,
    phases=st.dictionaries(text, seconds, max_size=3),
)
candidates = st.builds(ev.Candidate, small, st.binary(max_size=6), logprobs)
told = st.lists(
    st.builds(ev.TokenLogprobs, candidates, st.lists(candidates, max_size=3).map(tuple)), max_size=2
).map(tuple)
merged = st.builds(ev.MergedText, small, text, told, small)
events = st.one_of(
    st.builds(
        ev.Started, request=text, model=text, mode=modes, seed=st.integers(0, 2**63 - 1), prompt_tokens=small
    ),
    st.builds(ev.SkeletonText, text, told),
    st.builds(ev.Planned, st.lists(points, max_size=3).map(tuple)),
    st.builds(ev.BranchStarted, small, text, small),
    st.builds(ev.BranchText, small, small, text, small, told),
    st.builds(ev.BranchFinished, small, reasons, small),
    merged,
    st.builds(ev.Finished, reasons, text, tokens, figures),
)
numbered = st.builds(ev.Numbered, big, events)

said = text.filter(lambda t: bool(t.strip()))
counts = st.integers(1, 2**31 - 1)
_rest = {
    "model": text,
    "mode": modes,
    "drafter": st.none() | st.sampled_from(params.DRAFTERS),
    "sampling": samplings,
    "limits": st.builds(params.Limits, counts, st.none() | counts, counts, counts),
    "stop": st.lists(said, max_size=2).map(tuple),
    "tools": st.lists(st.sampled_from(["search", "calculator"]), max_size=2).map(tuple),
    "constraint": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, params.MAX_LOGPROBS),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "priority": st.integers(-params.MOST_PRIORITY, params.MOST_PRIORITY),
    "resumable": st.booleans(),
    "window": st.none() | windows,
}
_held = _rest | {"mode": st.sampled_from(["auto", "direct"]), "form": forms}
conversations = st.lists(st.builds(params.Message, text, said), min_size=1, max_size=3).map(tuple)
prompts = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3).map(tuple)
_direct = {"mode": st.just("direct"), "window": st.none()}
policies = (
    st.just({})
    | st.fixed_dictionaries(_direct | {"pruning": prunings})
    | st.fixed_dictionaries(_direct | {"head_aware": st.just(True)})
)


def _asks(**given: st.SearchStrategy[Any]) -> st.SearchStrategy[params.Ask]:
    return st.builds(lambda policy, **told: params.Ask(**(told | policy)), policies, **given)


asks = (
    _asks(prompt=said, **_rest)
    | st.builds(params.Ask, prompt=said, **_held)
    | _asks(messages=conversations, **_rest)
    | _asks(tokens=prompts, **(_rest | {"mode": st.just("direct")}))
)

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
_laps = st.none() | st.builds(
    info.LapsInfo, big, big, seconds, seconds, seconds, st.lists(seconds, max_size=3).map(tuple)
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
        ),
        max_size=2,
    ).map(tuple),
    epoch=big,
    ready=st.booleans(),
    waiting_for=_lines,
    pages=_pages,
    requests=_requests,
    laps=_laps,
    version=text,
    protocol=small,
    plan=text,
    replicas=st.lists(
        st.builds(info.ReplicaInfo, small, big, st.booleans(), _lines, _pages, _laps, _requests, text),
        max_size=2,
    ).map(tuple),
)
