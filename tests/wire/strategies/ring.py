"""What goes round the ring: openings, frames, results, features, drafts."""

from __future__ import annotations

from hypothesis import strategies as st

from specsot import members, params
from specsot.core import frames as fr
from specsot.core.soft_end import SoftEnd
from specsot.transport.links import Lost
from tests.wire.strategies.asking import forms, head_windows, importances, prunings, rules, samplings, windows
from tests.wire.strategies.plain import (
    big,
    names,
    rising,
    seconds,
    small,
    tensors,
    text,
    times,
    tokens,
    traces,
    trees,
)


@st.composite
def openings(draw: st.DrawFn) -> fr.Opening:
    prompt = draw(small)
    fork = draw(st.none() | st.builds(fr.Fork, sequence=big, length=st.integers(0, prompt)))
    pruning = draw(st.none() | prunings)
    left = prompt - (fork.length if fork else 0)
    kept = st.lists(small, max_size=min(left - 1, 5)).map(tuple) if left > 0 else st.just(())
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
        pruning=pruning,
        heads=draw(st.none() | head_windows),
        importance=draw(st.none() | importances) if pruning else None,
        min_tokens=draw(small),
        prompt_logprobs=draw(st.none() | small),
        reused=draw(st.none() | st.builds(fr.ReusedKV, big, kept, st.booleans())),
        soft_end=draw(st.none() | st.builds(SoftEnd, after=small, token=small)),
        excluded_first=draw(tokens),
    )


@st.composite
def opens(draw: st.DrawFn) -> fr.Open:
    fed, forked = draw(tokens), draw(st.none() | st.integers(0, 1000))
    fork = None if forked is None else fr.Fork(draw(big), forked)
    opening = fr.Opening(sequence=draw(big), prompt=len(fed) + (forked or 0), fork=fork)
    return fr.Open(opening, fed, draw(small))


parents = st.none() | st.builds(fr.ParentNode, draft_round=small, node=small)


@st.composite
def growths(draw: st.DrawFn) -> fr.TreeSegment:
    keep = draw(rising)
    committed = draw(st.integers(len(keep), 2**32 - 1))
    identity = draw(parents), draw(small), draw(rising)
    tree = draw(trees())
    earlier = draw(st.integers(0, len(tree) - 1))
    later = draw(st.integers(0, len(tree) - 1 - earlier))
    return fr.TreeSegment(draw(big), draw(small), committed, keep, tree, *identity, earlier, later)


segments = (
    st.builds(fr.PromptChunk, sequence=big, start=small, tokens=tokens, final=st.booleans()) | growths()
)
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
    paused=st.booleans(),
    catching_up=st.booleans(),
    extra_passes=small,
    replay=st.booleans(),
    part=small,
    last_part=small,
    trace=traces,
)
logprobs = st.floats(-100, 0, width=32)
chances = st.builds(fr.Logprob, logprobs, st.lists(st.tuples(small, logprobs), max_size=3).map(tuple))


@st.composite
def outcomes(draw: st.DrawFn) -> fr.Outcome:
    written = draw(tokens)
    told = draw(st.just(()) | st.tuples(*(chances for _ in written)))
    end = draw(st.none() | st.sampled_from(fr.End))
    read = draw(st.lists(chances, max_size=2).map(tuple))
    known = draw(big), draw(small), draw(rising), written, end, told
    return fr.Outcome(*known, draw(tokens), draw(st.booleans()), read, draw(rising), draw(small))


results = st.builds(
    fr.Result,
    epoch=big,
    number=big,
    outcomes=st.lists(outcomes(), max_size=3).map(tuple),
    seconds=times,
    rows=small,
    drafts=small,
    drafted=small,
    prefixes=st.lists(st.builds(fr.PrefixProgress, sequence=big, num_computed=small), max_size=3).map(tuple),
    verified_part=small,
)
feature_batches = st.builds(
    fr.FeatureBatch,
    sequence=big,
    start=small,
    tokens=tokens,
    bonus=st.none() | small,
    draft_round=st.none() | small,
    forced=tokens,
)


@st.composite
def features(draw: st.DrawFn) -> fr.Features:
    taught = tuple(draw(st.lists(feature_batches, max_size=3)))
    count = sum(len(feature_batch.tokens) for feature_batch in taught)
    rows = draw(tensors(count)) if count else draw(st.none() | tensors(0))
    return fr.Features(
        epoch=draw(big),
        number=draw(big),
        openings=tuple(draw(st.lists(openings(), max_size=2))),
        feature_batches=taught,
        closings=draw(sequences),
        rows=rows,
        fed=draw(small),
        seconds=draw(seconds),
        wall=draw(seconds),
        paused_trees=draw(small),
        trace=draw(traces),
        must_answer=draw(st.booleans()),
    )


drafts = st.builds(
    fr.Drafts,
    epoch=big,
    drafts=st.lists(
        st.builds(fr.Draft, sequence=big, draft_round=small, tree=trees(), parent=parents), max_size=3
    ).map(tuple),
    paused_trees=small,
    drafter=text,
)
taps = st.builds(members.Tap, epoch=big, layer=small, weight=tensors())
losses = st.builds(Lost, peer=names, reason=text, epoch=big)
kv_rows = st.builds(
    members.KvRows, epoch=big, sequence=big, layer=small, first=small, rows=st.none() | tensors()
)
carried = st.one_of(frames, results, features(), drafts, taps, kv_rows, losses)
