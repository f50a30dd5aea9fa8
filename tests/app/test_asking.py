"""From loose keywords, and the seeds' spellings, to one Ask."""

from __future__ import annotations

import pytest

from specsot.errors import InvalidRequest
from specsot.params import Ask, Limits, Message, Sampling
from specsot_app.aliases import translate
from specsot_app.asking import ask_of


def test_nothing_said_is_the_default() -> None:
    assert ask_of("Why?", mode=None, temperature=None, stop=None) == Ask("Why?")


def test_options_find_their_places() -> None:
    ask = ask_of("Why?", temperature=0.8, top_k=5, max_new_tokens=9, max_parallel=2, stop="\n", seed=3)
    assert ask.sampling == Sampling(0.8, 1.0, 5)
    assert ask.limits == Limits(max_new_tokens=9, max_parallel=2)
    assert (ask.stop, ask.seed) == (("\n",), 3)


def test_a_conversation_is_taken_as_mappings_or_values() -> None:
    turns = [{"role": "system", "content": "Be short."}, Message("user", "Why?")]
    ask = ask_of(turns)
    assert ask.prompt is None
    assert ask.messages == (Message("system", "Be short."), Message("user", "Why?"))


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ("  \n", {}, "prompt"),
        ([{"role": "user"}], {}, "messages"),
        ("Why?", {"temperatur": 1}, "temperatur"),
        ("Why?", {"temperature": -1}, "temperature"),
        ("Why?", {"temperature": float("nan")}, "temperature"),
        ("Why?", {"top_p": 0}, "top_p"),
        ("Why?", {"max_new_tokens": -1}, "max_new_tokens"),
        ("Why?", {"max_branch_tokens": 0}, "max_branch_tokens"),
        ("Why?", {"mode": "fast"}, "mode"),
        ("Why?", {"stop": ("",)}, "stop"),
    ],
)
def test_what_cannot_be_is_refused_by_name(prompt, options, field) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_of(prompt, **options)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_the_seeds_spellings_mean_ours() -> None:
    theirs = {
        "base_model_path": "base",
        "ea_model_path": "head",
        "use_eagle3": True,
        "device_map": {"": "cuda:0"},
        "enable_parallel": False,
        "use_semantic_constraint": True,
        "use_scheduling": True,
        "comm_mode": "ring",
        "layer_splits": "4,6",
    }
    assert translate(theirs) == {
        "model": "base",
        "draft_model": "head",
        "device": "cuda:0",
        "mode": "direct",
        "constraint": True,
        "stages": 3,
    }


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("device_map", "auto", {"device": "auto"}),
        ("device_map", 0, {"device": "cuda:0"}),
        ("torch_dtype", "torch.bfloat16", {"dtype": "bf16"}),
        ("torch_dtype", "float16", {"dtype": "fp16"}),
        ("devices", "127.0.0.1#0,127.0.0.1#1", {"stages": 2}),
        ("enable_parallel", True, {"mode": "auto"}),
        ("world_size", 3, {"stages": 3}),
    ],
)
def test_an_alias_turns_the_value_too(name, value, ours) -> None:
    assert translate({name: value}) == ours


def test_one_option_under_two_names_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="another name of model"):
        translate({"model": "a", "base_model_path": "b"})


def test_several_devices_in_a_map_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 devices"):
        translate({"device_map": {"a": 0, "b": 1}})
