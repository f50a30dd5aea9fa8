"""What may be a target and a draft: directories, loaded ones, models of Transformers in memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from specsot.checkpoint.config import read_config
from specsot.eagle import Eagle, EagleConfig
from specsot.errors import HeadMismatch, InvalidRequest, ModelError
from specsot.members import Range
from specsot_bench.eagle.models import config_of, decoder_from_transformers
from specsot_drafter.heads.loading import load_head
from specsot_model.decoder import Decoder
from tests.conftest import some
from tests.laws.plain import load
from tests.model.test_families import KINDS
from tests.model.tiny import greedy_reference, make_model, write_model
from tests.models import Shape, write_base, write_head

SHAPE, PROMPT, LIMIT = Shape(), [5, 6, 7, 50, 21], 24
# Of every family one, and of what is converted; all of them as directories are in test_families.py.
COVER = (
    *("llama tied", "llama biases", "llama 3.1", "mistral", "mixtral odd", "qwen2 tied", "qwen3 biases"),
    *("qwen3 moe and dense", "qwen3 moe unnormalised", "pythia", "neox tied", "neox no bias"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_base(folder / "base", SHAPE)
    write_head(folder / "head", SHAPE)
    return folder


def decoder(folder: Path, layers: int = SHAPE.layers, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder.load(folder / "base", Range(0, layers), dtype, "cpu")


class Module:
    """A head as some training code holds it: tensors under their published names, and a config."""

    def __init__(self, directory: Path) -> None:
        self._tensors = load_file(directory / "model.safetensors")
        fields = json.loads((directory / "config.json").read_text())
        self.config = SimpleNamespace(to_dict=lambda: fields)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._tensors


def test_every_way_to_give_the_same_pair_writes_and_drafts_the_same(folder: Path) -> None:
    base, head = folder / "base", folder / "head"
    config, loaded = EagleConfig(4, 3, 12), load_head(head, base, torch.float32, "cpu")
    pairs: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "directories": (str(head), base, {"dtype": "fp32"}),
        "a decoder, a directory": (head, decoder(folder), {}),
        "a decoder, a loaded head": (loaded, decoder(folder), {}),
        "Transformers, a directory": (head, load(base), {}),
        "Transformers, a loaded head": (loaded, load(base), {}),
        "Transformers, a module": (Module(head), load(base), {}),
    }
    runs = [
        Eagle(draft, target, config, **more).generate(PROMPT, LIMIT) for draft, target, more in pairs.values()
    ]
    assert len({tuple(ids) for ids, _ in runs}) == 1
    assert len({stats.sequences for _, stats in runs}) == 1


@pytest.mark.parametrize("name", some(KINDS, *(list(KINDS).index(name) for name in COVER)))
def test_a_model_in_memory_of_every_family_generates_its_own_tokens(name: str, tmp_path: Path) -> None:
    kind, changes = KINDS[name]
    model = write_model(tmp_path, kind, **changes)
    ids, stats = Eagle(None, model).generate([PROMPT, PROMPT[:2]], 16, eos_token_id=())
    assert ids == [[*prompt, *greedy_reference(model, prompt, 16)] for prompt in (PROMPT, PROMPT[:2])]
    assert stats.trees.total_proposed == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_config_in_memory_says_what_its_directory_says(name: str, tmp_path: Path) -> None:
    kind, changes = KINDS[name]
    model = make_model(kind, **{name: value for name, value in changes.items() if name != "shards"})
    model.config.save_pretrained(tmp_path)
    assert config_of(model) == read_config(tmp_path)


def test_what_need_not_be_converted_is_shared(folder: Path) -> None:
    model = load(folder / "base")
    adopted = decoder_from_transformers(model)
    assert adopted.edges.embedding().data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert (adopted.dtype, adopted.device) == (model.dtype, model.device)


def test_a_model_is_left_as_it_was(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Eagle(folder / "head", model, EagleConfig(temperature=0.7)).generate([PROMPT] * 2, LIMIT)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_bf16_stays_bf16(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    ids, stats = Eagle(folder / "head", model, EagleConfig(2, 2, 5)).generate(PROMPT, LIMIT)
    assert decoder_from_transformers(model).dtype == torch.bfloat16
    assert len(ids) == len(PROMPT) + stats.new_tokens


@pytest.mark.parametrize(
    ("draft", "target", "more", "said"),
    [
        ("head", 7, {}, "target must be a directory, a Decoder or a Transformers model, got int"),
        (7, "base", {}, "draft must be an EAGLE head: its directory, or loaded; got int"),
        ("head", "part", {}, "target must have all 8 layers, this one has 0:5"),
        ("head", "decoder", {"dtype": "fp32"}, "dtype needs a directory"),
        ("head", "decoder", {"device": "cpu"}, "device needs a directory"),
        ("head", "base", {"dtype": "fp99"}, "dtype must be one of"),
        ("head", "base", {"config": EagleConfig(topk=121, num_draft_tokens=9)}, "topk is 121, .* 120 tokens"),
    ],
)
def test_what_is_no_pair_is_refused(
    folder: Path, draft: Any, target: Any, more: dict[str, Any], said: str
) -> None:
    known = {"part": lambda: decoder(folder, 5), "decoder": lambda: decoder(folder)}
    target = known[target]() if target in known else folder / target if isinstance(target, str) else target
    draft = folder / draft if isinstance(draft, str) else draft
    with pytest.raises(InvalidRequest, match=said):
        Eagle(draft, target, **more)


def test_heads_that_do_not_fit_are_refused_with_both_shapes(folder: Path, tmp_path: Path) -> None:
    wide = write_base(tmp_path / "wide", Shape(hidden=96))
    with pytest.raises(HeadMismatch, match=r"fc.weight is \[64, 192\], .* need \[64, 288\]"):
        Eagle(folder / "head", wide)
    loaded = load_head(folder / "head", folder / "base", torch.float32, "cpu")
    with pytest.raises(HeadMismatch, match=r"taps layer 2 with \[64, 64\], .* states of \[96\]"):
        Eagle(loaded, wide, dtype="fp32")
    with pytest.raises(HeadMismatch, match=r"the head is torch.float32 on cpu, the target torch.bfloat16"):
        Eagle(loaded, decoder(folder, dtype=torch.bfloat16))


def test_a_model_that_is_not_there_or_no_head_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such"):
        Eagle(folder / "head", tmp_path / "nothing")
    for draft in (load(folder / "base"), folder / "base"):
        with pytest.raises(ModelError, match=r"no EAGLE head, as there is no tensor fc\.weight"):
            Eagle(draft, folder / "base")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=64, num_hidden_layers=2))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: .* is on no device"):
        Eagle(None, empty)


def test_a_model_on_several_devices_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2))
    model.model.layers[1].to("meta")
    with pytest.raises(ModelError, match="LlamaForCausalLM is spread over cpu, meta"):
        Eagle(None, model)


def test_nothing_is_proposed_without_a_draft(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="without a draft"):
        Eagle(None, folder / "base").propose(PROMPT)
