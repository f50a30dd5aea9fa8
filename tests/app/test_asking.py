"""From loose keywords, and the seeds' spellings, to one Ask."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot.params import Ask, Limits, Message, Sampling
from specsot_app.api import translate
from specsot_app.core.ask import SAMPLING, ask_of
from specsot_app.core.device_map import parse_ranges


def test_an_omitted_option_takes_its_default() -> None:
    assert ask_of("Why?", mode=None, temperature=None, stop=None) == Ask("Why?")


def test_options_find_their_places() -> None:
    ask = ask_of("Why?", temperature=0.8, top_k=5, max_new_tokens=9, max_parallel=2, stop="\n", seed=3)
    assert ask.sampling == Sampling(0.8, 1.0, 5)
    assert ask.limits == Limits(max_new_tokens=9, max_parallel=2)
    assert (ask.stop, ask.seed) == (("\n",), 3)


def test_what_other_clients_send_for_nothing_given() -> None:
    assert ask_of("Why?", seed=-1, max_new_tokens=-1) == Ask("Why?")
    assert ask_of("Why?", seed=-(2**70)).seed is None


def test_top_p_0_is_greedy() -> None:
    assert ask_of("Why?", top_p=0, temperature=1.5, top_k=5).sampling == Sampling(0.0, 1.0, 5)


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
        ("caf\udce9", {}, "prompt"),  # a command line in Latin-1
        ([{"role": "user", "content": "\ud83d"}], {}, "prompt"),
        ("Why?", {"stop": "\udcff"}, "stop"),
        ([{"role": "user"}], {}, "messages"),
        ("Why?", {"temperatur": 1}, "temperatur"),
        ("Why?", {"temperature": -1}, "temperature"),
        ("Why?", {"temperature": float("nan")}, "temperature"),
        ("Why?", {"top_p": -0.1}, "top_p"),
        ("Why?", {"max_new_tokens": -2}, "max_new_tokens"),
        ("Why?", {"max_branch_tokens": 0}, "max_branch_tokens"),
        ("Why?", {"mode": "fast"}, "mode"),
        ("Why?", {"stop": ("",)}, "stop"),
        ("Why?", {"temperature": "hot"}, "temperature"),
        ("Why?", {"top_k": 2.5}, "top_k"),
        ("Why?", {"top_k": 2**40}, "top_k"),
        ("Why?", {"min_p": 2}, "min_p"),
        ("Why?", {"repetition_penalty": 0}, "repetition_penalty"),
        ("Why?", {"presence_penalty": -2.1}, "presence_penalty"),
        ("Why?", {"frequency_penalty": float("nan")}, "frequency_penalty"),
        ("Why?", {"logit_bias": {"five": 1}}, "logit_bias"),
        ("Why?", {"logit_bias": {5: "much"}}, "logit_bias"),
        ("Why?", {"logit_bias": {5: 1000}}, "logit_bias"),
        ("Why?", {"logit_bias": {-1: 1}}, "logit_bias"),
        ("Why?", {"logit_bias": ["5"]}, "logit_bias"),
        ("Why?", {"logit_bias": ["5=1", "5=2"]}, "logit_bias"),
        ("Why?", {"logit_bias": 5}, "logit_bias"),
        ("Why?", {"logprobs": 21}, "logprobs"),
        ("Why?", {"logprobs": True}, "logprobs"),
        (5, {}, "prompt"),
        ([{"role": "user", "content": None}], {}, "prompt"),
        *(
            ("Why?", {name: value}, name)
            for name in ("max_new_tokens", "max_branch_tokens", "max_skeleton_tokens", "max_parallel", "seed")
            for value in (0.5, 5.0, True, "5", [5])
        ),
        ("Why?", {"stop": 5}, "stop"),
        ("Why?", {"stop": [None]}, "stop"),
        ("Why?", {"tools": [5]}, "tools"),
        ("Why?", {"stop_token_ids": 0.5}, "stop_token_ids"),
        ("Why?", {"ignore_eos": "no"}, "ignore_eos"),
        ("Why?", {"skip_special_tokens": 0}, "skip_special_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(prompt, options, field) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_of(prompt, **options)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    given = ask_of("Why?", max_new_tokens=np.int64(5), top_k=np.int32(2), polish=np.bool_(True))
    assert given == ask_of("Why?", max_new_tokens=5, top_k=2, polish=True)


@pytest.mark.parametrize("given", [{7: -2, 3: 1.5}, {"3": "1.5", "7": -2.0}, ["7=-2", "3=1.5"]], ids=str)
def test_a_bias_is_a_mapping_or_what_a_command_line_says(given) -> None:
    assert ask_of("Why?", logit_bias=given).sampling.logit_bias == ((3, 1.5), (7, -2.0))
    assert ask_of("Why?", logit_bias="7=-2").sampling.logit_bias == ((7, -2.0),)


def test_every_option_of_sampling_is_passed_on() -> None:
    given = dict(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1,
                 presence_penalty=0.2, frequency_penalty=0.3)  # fmt: skip
    ask = ask_of("Why?", logprobs=0, logit_bias={1: 2}, **given)
    assert ask.sampling == Sampling(**given, logit_bias=((1, 2.0),))
    assert ask.logprobs == 0
    assert set(SAMPLING) == {field.name for field in fields(Sampling)}


@pytest.mark.parametrize("written", ["0:3,3:8", "0:3,3:", [" 0:3", "3:8 "]])
def test_layer_ranges_follow_each_other(written) -> None:
    assert parse_ranges(written, 8) == (Range(0, 3), Range(3, 8))


@pytest.mark.parametrize(
    "written",
    ["", "3", "0:3", "0:3,4:8", "0:4,3:8", "1:8", "0:9", "0:3,3:3,3:8", "0:,3:8", "0:-3,3:8", "a:b"],
)
def test_other_layer_ranges_are_refused(written) -> None:
    with pytest.raises(InvalidRequest, match="the model's 8, such as 0:4,4:8") as caught:
        parse_ranges(written, 8)
    assert caught.value.field == "layers"


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
        "use_eagle3": True,
        "device": "cuda:0",
        "mode": "direct",
        "constraint": True,
        "comm_mode": "ring",
        "layers": "0:4,4:6,6:",
    }


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("device_map", "auto", {"device": "auto"}),
        ("device_map", 0, {"device": "cuda:0"}),
        ("torch_dtype", "torch.bfloat16", {"dtype": "bf16"}),
        ("torch_dtype", "float16", {"dtype": "fp16"}),
        ("dtype", "torch.float16", {"dtype": "fp16"}),
        ("dtype", "auto", {"dtype": "auto"}),
        ("gpu_ids", [0, 1], {"devices": "127.0.0.1#0,127.0.0.1#1"}),
        ("gpu_ids", "0, 1", {"devices": "127.0.0.1#0,127.0.0.1#1"}),
        ("enable_parallel", True, {"mode": "auto"}),
        ("world_size", 3, {"stages": 3}),
        ("layer_splits", [14, 28], {"layers": "0:14,14:28,28:"}),
        ("num_samples", 5, {"samples": 5}),
    ],
)
def test_an_alias_turns_the_value_too(name, value, ours) -> None:
    assert translate({name: value}) == ours


def test_two_names_may_say_the_same() -> None:
    theirs = {"world_size": 2, "gpu_ids": [0, 1], "devices": "127.0.0.1#0,127.0.0.1#1", "layer_splits": "4"}
    assert translate(theirs) == {"stages": 2, "devices": "127.0.0.1#0,127.0.0.1#1", "layers": "0:4,4:"}


def test_one_option_under_two_names_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="another name of model"):
        translate({"model": "a", "base_model_path": "b"})


def test_several_devices_in_a_map_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 devices"):
        translate({"device_map": {"a": 0, "b": 1}})
