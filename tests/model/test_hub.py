"""Models by their names on the hub: who fetches which files, and what is said when there are none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.hub import HubName, hub_name
from specsot.checkpoint.resolving import address_of_model, name_of_model, resolve_model
from specsot.errors import ModelError
from specsot.members import Configuration, Overrides, Range, Stage
from specsot.service.options import DraftModelOptions, ModelOptions
from specsot.service.runtime_env import set_runtime_defaults
from specsot_drafter.loader import DraftLoader
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.master import assemble
from specsot_model.loaded_parts import AbsentWeights
from specsot_model.weights import WeightFiles
from specsot_worker.loader import StageLoader
from tests.local_hub import LocalHub, commit_of, point_at, serving, use_cache
from tests.model.gguf_files import KINDS, write_gguf
from tests.model.published import HERE as QUANTIZED
from tests.model.tiny import MODEL_TYPES, write_model
from tests.models import Shape, write_base, write_head

TEXTS = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
SHARDS = ["first.safetensors", "second.safetensors", "third.safetensors"]  # layers 0, 1; 2, 3; what is behind
TAPS = Overrides(aux_layers=(1, 2, 3))  # a head's own choice takes more layers
BASE, HEAD = "acme/tiny", "acme/tiny-eagle"


def write_shards(directory: Path, shape: Shape) -> Path:
    """A base whose layers 0, 1 and 2, 3 are in files of their own; the lm_head is not its embedding."""
    tensors = load_file(write_base(directory, shape) / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    (directory / "model.safetensors").unlink()

    def shard(name: str) -> str:
        found = [layer for layer in range(shape.layers) if f"layers.{layer}." in name]
        return SHARDS[found[0] // 2] if found else SHARDS[0 if "embed" in name else 2]

    for file in SHARDS:
        kept = {name: tensor for name, tensor in tensors.items() if shard(name) == file}
        save_file(kept, directory / file)
    index = {"metadata": {}, "weight_map": {name: shard(name) for name in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: shape.vocabulary]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "README.md").write_text("Nobody here reads this.")
    (directory / "pytorch_model.bin").write_bytes(b"nor this")
    return directory


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Mapping[str, Path]:
    folder, shape = tmp_path_factory.mktemp("published"), Shape(layers=4)
    return {BASE: write_shards(folder / "base", shape), HEAD: write_head(folder / "head", shape)}


@pytest.fixture
def hub(published, tmp_path, monkeypatch):
    with serving(monkeypatch, tmp_path / "cache") as hub:
        for name, folder in published.items():
            hub.add(name, folder)
        yield hub


def configuration(layers: Range) -> Configuration:
    rest = Range(layers.last, 4) if layers.last < 4 else Range(0, layers.first)
    stages = Stage("w", "w", layers), Stage("other", "other", rest)
    return Configuration(1, "w", stages, pages=2, page_rows=16, slots=1)


def worker(layers: Range | None = None) -> StageLoader:
    return StageLoader(ModelOptions(BASE, dtype="fp32", kv_memory=1 << 20), "w", layers=layers)


def test_the_master_fetches_text_alone(hub: LocalHub) -> None:
    master = assemble(resolve_model(BASE), RingOptions(workers=2))
    assert hub.fetched() == {BASE: TEXTS}
    assert (master.model.name, master.model.fingerprint) == (BASE, commit_of(BASE)[:16])


@pytest.mark.parametrize(
    ("layers", "shards"),
    [(Range(0, 2), SHARDS[:1]), (Range(2, 3), SHARDS[1:2]), (Range(1, 4), SHARDS), (Range(3, 4), SHARDS[1:])],
)
def test_a_worker_fetches_the_files_of_its_layers_once_it_knows_them(hub, published, layers, shards) -> None:
    loader = worker()
    joining = loader.registration()
    assert hub.fetched() == {BASE: TEXTS}
    local = StageLoader(ModelOptions(published[BASE], dtype="fp32", kv_memory=1 << 20), "w").registration()
    assert joining.weights == local.weights
    assert joining.curve
    before = loader.fetched
    stage = loader.make_stage(configuration(layers), layers)
    assert hub.fetched() == {BASE: {*shards}}
    assert loader.fetched - before == sum((published[BASE] / file).stat().st_size for file in shards)
    if layers.last == 4:
        verifier = loader.make_verifier(stage, configuration(layers))
        assert verifier is not None
    assert hub.fetched() == {}


@pytest.mark.parametrize(("layers", "built"), [(Range(0, 2), 0), (Range(2, 4), 1)])
def test_only_the_last_stage_builds_grammars_and_only_once_its_layers_are_loaded(
    hub: LocalHub, monkeypatch, layers: Range, built: int
) -> None:
    """They take seconds of processor time, beside which a layer would be measured too slow."""
    loaded = list[int]()
    loader = worker()
    monkeypatch.setattr(
        "specsot_worker.loader.prebuild", lambda vocabulary, idle: loaded.append(loader.fetched)
    )
    loader.registration()
    stage = loader.make_stage(configuration(layers), layers)
    assert not loaded
    if layers.last == 4:
        loader.make_verifier(stage, configuration(layers))
    assert loaded == [loader.fetched] * built


def test_a_worker_of_fixed_layers_fetches_theirs_alone(hub: LocalHub) -> None:
    worker(Range(2, 3)).registration()
    assert hub.fetched() == {BASE: TEXTS | {SHARDS[1]}}


def test_a_worker_that_stands_by_fetches_nothing_ahead(hub: LocalHub) -> None:
    loader = worker()
    loader.registration()
    hub.fetched()
    assert not loader.preload()
    assert hub.fetched() == {}


def test_a_worker_that_is_about_to_join_fetches_the_files_of_its_layers_ahead(hub: LocalHub) -> None:
    loader = worker()
    loader.registration()
    hub.fetched()
    loader.fetch(Range(2, 3))
    assert hub.fetched() == {BASE: {*SHARDS[1:2]}}


def test_the_drafter_fetches_its_head_and_the_embedding_of_its_base(hub: LocalHub) -> None:
    options = DraftModelOptions(BASE, dtype="fp32", kv_memory=1 << 20, draft_model=HEAD, overrides=TAPS)
    assert DraftLoader(options, "d").registration().head is not None
    assert hub.fetched() == {BASE: TEXTS | {SHARDS[0]}, HEAD: {"config.json", "model.safetensors"}}


def test_what_is_in_the_cache_serves_without_the_hub(hub: LocalHub, tmp_path, monkeypatch) -> None:
    worker(Range(2, 3)).registration()
    hub.fetched()
    use_cache(monkeypatch, tmp_path / "cache", offline=True)
    worker(Range(2, 3)).registration()
    with pytest.raises(
        ModelError,
        match=r"acme/tiny: no such file or directory here, HF_HUB_OFFLINE is set, and its first\.safet",
    ):
        worker(Range(0, 1)).registration()
    use_cache(monkeypatch, tmp_path / "another", offline=True)
    with pytest.raises(
        ModelError, match=r"HF_HUB_OFFLINE is set, and its config\.json is not in the cache \(.*another"
    ):
        resolve_model(BASE)
    assert hub.fetched() == {}


def test_an_unreachable_hub_is_reported_in_one_line(hub: LocalHub, tmp_path, monkeypatch, capsys) -> None:
    """Cached models are used although offline mode was not requested."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    hub.add("acme/one", write_base(tmp_path / "one", Shape(layers=4)))
    (tmp_path / "gguf").mkdir()
    hub.add("acme/gguf", write_gguf(tmp_path / "gguf" / "m.gguf", write_model(tmp_path / "hf")).parent)
    names = (BASE, "acme/one", "acme/gguf", "acme/gguf:m.gguf")
    here = [resolve_model(name) for name in names]
    use_cache(monkeypatch, tmp_path / "cache")
    point_at(monkeypatch, "http://127.0.0.1:9")
    capsys.readouterr()
    assert [resolve_model(name) for name in names] == here
    with pytest.raises(
        ModelError, match=r"^acme/tiny-eagle: no such file or directory here, http://127\.0\.0\.1:9 cannot be"
    ):
        resolve_model(HEAD)
    lines = [line for line in capsys.readouterr().out.splitlines() if "fetching" not in line]
    assert len(lines) == 1
    assert "the hub cannot be reached" in lines[0]


def test_a_model_in_one_file_is_fetched_whole(hub: LocalHub, tmp_path) -> None:
    hub.add("acme/one", write_base(tmp_path / "one", Shape(layers=4)))
    StageLoader(ModelOptions("acme/one", dtype="fp32", kv_memory=1 << 20), "w").registration()
    assert hub.fetched() == {"acme/one": {"config.json", "model.safetensors"}}


def test_quantized_weights_are_fetched_by_layers_too(hub: LocalHub, tmp_path) -> None:
    """And counted, before any of them is here, as they are where all are."""
    folder = shutil.copytree(QUANTIZED / "awq", tmp_path / "awq")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: SHARDS[1 if "layers.1." in name else 0] for name in tensors}
    for file in SHARDS[:2]:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    hub.add("acme/awq", folder)
    given = {"dtype": "fp32", "kv_memory": 1 << 20}
    loader = StageLoader(ModelOptions("acme/awq", **given), "w")
    joining = loader.registration()
    assert hub.fetched() == {"acme/awq": TEXTS - {"tokenizer.json"}}
    assert joining.weights == StageLoader(ModelOptions(folder, **given), "w").registration().weights
    loader.make_stage(configuration(Range(0, 1)), Range(0, 1))
    assert hub.fetched() == {"acme/awq": {SHARDS[0]}}


def test_a_repository_of_one_gguf_file_is_that_file(hub: LocalHub, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "gguf").mkdir()
    one = write_gguf(tmp_path / "gguf" / "tiny.F32.gguf", write_model(tmp_path / "hf"), KINDS[:1])
    hub.add("acme/gguf", one.parent)
    path = resolve_model("acme/gguf")
    assert "model.norm.weight" in WeightFiles(path)
    assert address_of_model(path) == f"acme/gguf@{commit_of('acme/gguf')}:tiny.F32.gguf"
    assert name_of_model(path) == "tiny.F32"
    assert hub.fetched() == {"acme/gguf": {"tiny.F32.gguf"}}
    shutil.copy(one, one.parent / "another.gguf")
    use_cache(monkeypatch, tmp_path / "another")
    with pytest.raises(ModelError, match=r"2 GGUF files; name one, such as acme/gguf:another\.gguf"):
        resolve_model("acme/gguf")
    resolve_model("acme/gguf:tiny.F32.gguf")
    assert hub.fetched() == {"acme/gguf": {"tiny.F32.gguf"}}


def test_pickles_are_fetched_when_asked_for_and_never_else(hub: LocalHub, tmp_path) -> None:
    folder = write_base(tmp_path / "pickled", Shape(layers=4))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    hub.add("acme/pickled", folder)
    path = resolve_model("acme/pickled")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, which is read when asked for"):
        WeightFiles(path)
    assert hub.fetched() == {"acme/pickled": {"config.json"}}
    assert "model.norm.weight" in WeightFiles(path, allow_pickle_bin=True).names()
    assert hub.fetched() == {"acme/pickled": {"pytorch_model.bin"}}


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (
            "acme/nothing",
            r"acme/nothing: no such file or directory here, and no such repository at http://127.*token",
        ),
        ("acme/tiny@v9", r"acme/tiny@v9: acme/tiny at http://127.* has no revision v9"),
        ("acme/secret", r"acme/secret: gated: accept its terms at http.*/acme/secret; then it takes a token"),
        ("acme/tiny:no.gguf", r"acme/tiny:no\.gguf: no no\.gguf in this repository"),
        ("acme/empty", r"acme/empty: neither config\.json nor a GGUF file in this repository"),
        ("no/such/place", r"no/such/place: no such file or directory, and no name on the hub"),
    ],
)
def test_what_cannot_be_had_is_one_clear_line(
    hub: LocalHub, published, tmp_path, named: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    hub.add("acme/empty", tmp_path / "empty")
    hub.add("acme/secret", published[BASE], gated=True)
    with pytest.raises(ModelError, match=said) as failed:
        resolve_model(named)
    assert "\n" not in str(failed.value)


def test_a_token_opens_what_is_gated(hub: LocalHub, published, monkeypatch) -> None:
    hub.add("acme/secret", published[BASE], gated=True)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert read_config(resolve_model("acme/secret")).layers == 4


def test_what_is_here_wins_over_the_hub(hub: LocalHub, published, tmp_path, monkeypatch) -> None:
    shutil.copytree(published[BASE], tmp_path / BASE)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(BASE) == Path(BASE)
    assert hub.fetched() == {}


def test_one_commit_is_one_model_wherever_it_lies(hub: LocalHub) -> None:
    path = resolve_model(BASE)
    assert address_of_model(path) == f"{BASE}@{commit_of(BASE)}"
    assert resolve_model(address_of_model(path)) == path
    assert fingerprint(path) == commit_of(BASE)[:16]


@pytest.mark.parametrize(
    ("named", "parts"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", ("HuggingFaceTB/SmolLM2-135M-Instruct", None, None)),
        ("a/b@refs/pr/1", ("a/b", "refs/pr/1", None)),
        ("a/b:x/y.Q4_K_M.gguf", ("a/b", None, "x/y.Q4_K_M.gguf")),
        ("a/b@v1:y.gguf", ("a/b", "v1", "y.gguf")),
    ],
)
def test_a_name_on_the_hub_says_repository_revision_and_file(named: str, parts: tuple[str, ...]) -> None:
    assert hub_name(named) == HubName(*parts)
    assert str(hub_name(named)) == named


@pytest.mark.parametrize("named", ["model", "./a/b", "/a/b", "../a", "a/b/c", "a b/c", "a/b:c.bin", "~/a"])
def test_everything_else_is_a_path(named: str) -> None:
    assert hub_name(named) is None


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_sizes_by_the_config_are_those_of_the_files(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    files, config = WeightFiles(tmp_path), read_config(tmp_path)
    absent = AbsentWeights(files.names(), config)
    assert {name: absent.shape(name) for name in absent.names()} == {
        name: files.shape(name) for name in absent.names()
    }
    first = files.under(config.names.layer.format(0))
    # Angles are computed, and indexers choose among more tokens than the served contexts have.
    unread = ("rotary", "indexer")
    assert {name for name in first if not any(part in name for part in unread)} <= {*absent.names()}


def test_services_may_ask_the_hub(monkeypatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    set_runtime_defaults()
    assert "HF_HUB_OFFLINE" not in os.environ
