"""What members and the master tell each other."""

from __future__ import annotations

from hypothesis import strategies as st

from specsot import members, params
from specsot.core import frames as fr
from tests.wire.strategies.plain import big, names, rising, seconds, small, text
from tests.wire.strategies.ring import opens, results

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
    epoch=st.integers(0, (1 << 62) - 1),
    lends=st.booleans(),
    device=text,
    dtype=text,
    copy_speed=big,
    hands_over=st.booleans(),
    hidden_bytes=st.integers(0, 2**32 - 1),
)
several = st.lists(big, max_size=3).map(tuple)
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
    drafters=st.lists(st.builds(members.DrafterPlace, names, names), max_size=2).map(tuple),
    head=st.none() | heads,
    shape=shapes,
    draft_timeout=seconds,
    curve=curves,
    transport=st.sampled_from(["grpc", "zmq", "direct"]),
    comm_mode=st.sampled_from(["p2p", "ring"]),
    gpu=st.none() | names,
    hop_dtype=st.sampled_from(["auto", "int8"]),
)
upward = st.one_of(
    registrations,
    st.builds(members.Ready, big),
    st.builds(members.Progress, big, small, small, big, st.none() | layers, small, several),
    st.builds(members.Broken, big, text),
    st.builds(members.MemberLeaving, text),
    st.just(members.Beat()),
    results,
)
downward = st.one_of(
    configurations,
    st.builds(members.Disband, big, text),
    st.builds(members.StandBy, big, st.none() | layers),
    st.builds(
        members.HandOver,
        big,
        st.lists(stages, max_size=2).map(tuple),
        st.lists(stages, max_size=2).map(tuple),
        st.lists(st.builds(members.RowsOf, big, st.integers(0, 9), st.integers(10, 99)), max_size=2).map(
            tuple
        ),
        small,
        st.booleans(),
    ),
    st.builds(members.Rejoined, big, names, names),
    st.builds(members.DrafterLost, big, names),
    st.just(members.Beat()),
    opens(),
    st.builds(fr.Close, big, st.booleans()),
    st.builds(fr.Lease, big, small),
)
