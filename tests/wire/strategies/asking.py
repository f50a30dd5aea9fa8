"""What is asked: sampling, forms, policies, whole requests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from specsot import params
from specsot.core.skeleton import PlanRules
from specsot.params import Form
from tests.wire.strategies.plain import small, text

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
    listed=st.booleans(),
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
_shares = st.floats(0, 1)
head_windows = st.lists(st.tuples(_pairs, _pairs), min_size=1, max_size=3).map(
    lambda layers: params.HeadWindows(tuple(layers))
)

importances = st.lists(st.tuples(_shares, _shares), min_size=1, max_size=3).map(
    lambda layers: params.HeadImportance(tuple(layers))
)

modes = st.sampled_from(params.MODES)
said = text.filter(lambda t: bool(t.strip()))
counts = st.integers(1, 2**31 - 1)
_rest = {
    "model": text,
    "mode": modes,
    "drafter": st.none() | st.sampled_from(params.DRAFTERS),
    "sampling": samplings,
    "limits": st.builds(params.Limits, counts, st.none() | counts, counts, counts),
    "min_tokens": st.sampled_from([0, 1]),
    "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=2).map(tuple),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "stop": st.lists(said, max_size=2).map(tuple),
    "tools": st.lists(st.sampled_from(["search", "calculator"]), max_size=2).map(tuple),
    "constraint": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, params.MAX_LOGPROBS),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "priority": st.integers(-params.MAX_PRIORITY, params.MAX_PRIORITY),
    "window": st.none() | windows,
}
ends = st.fixed_dictionaries({"resumable": st.booleans()}) | st.fixed_dictionaries(
    {"finish_within_s": st.floats(0.001, 1e6)}
)
_held = _rest | {"mode": st.sampled_from(["auto", "direct"]), "form": forms, "min_tokens": st.just(0)}
conversations = st.lists(st.builds(params.Message, text, said), min_size=1, max_size=3).map(tuple)
prompts = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3).map(tuple)
_direct = {"mode": st.just("direct"), "window": st.none()}
policies = (
    st.just({})
    | st.fixed_dictionaries(_direct | {"pruning": prunings})
    | st.fixed_dictionaries(_direct | {"head_aware": st.just(True), "pruning": st.none() | prunings})
)


def _asks(**given: st.SearchStrategy[Any]) -> st.SearchStrategy[params.Ask]:
    return st.builds(lambda policy, end, **told: params.Ask(**(told | policy | end)), policies, ends, **given)


asks = (
    _asks(prompt=said, **_rest)
    | st.builds(params.Ask, prompt=said, **_held)
    | st.builds(params.Ask, prompt=said, mode=st.sampled_from(["auto", "sot"]), polish=st.booleans())
    | _asks(messages=conversations, **_rest)
    | _asks(tokens=prompts, **(_rest | {"mode": st.just("direct"), "prompt_logprobs": _rest["logprobs"]}))
)
