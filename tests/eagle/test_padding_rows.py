"""`Eagle` never writes an id that the target's tokenizer does not know, as the services never do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot.eagle import Eagle, EagleConfig

pytestmark = [pytest.mark.slow, pytest.mark.torch]

PADDED, PROMPT, LIMIT = 64, [5, 6, 7, 50, 21], 24


@pytest.fixture(scope="module")
def padded(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with padding rows, each of which is three times a row that its answers begin with."""
    folder = shutil.copytree(demo_model / "small", tmp_path_factory.mktemp("padded") / "base")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = torch.cat((tensors[name], 3 * tensors[name][:PADDED]))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + PADDED}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("warm", [{}, {"temperature": 1.0}], ids=["T0", "T1"])
def test_a_padded_target_writes_what_the_target_without_padding_writes(
    padded: Path, demo_model: Path, warm: dict[str, float]
) -> None:
    config = EagleConfig(**warm)
    asked = {"seed": 7, "eos_token_id": ()}
    wanted, _ = Eagle(None, demo_model / "small", config, dtype="fp32").generate([PROMPT], LIMIT, **asked)
    found, _ = Eagle(None, padded, config, dtype="fp32").generate([PROMPT], LIMIT, **asked)
    assert found == wanted
