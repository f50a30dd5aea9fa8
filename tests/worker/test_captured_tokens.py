"""Tokens that graphs choose are the same as without graphs, which write to the same tensors again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specsot.core.frames import Opening
from specsot.core.tree import chain
from specsot.params import Sampling
from specsot_model.captured_tokens import CapturedTokens
from specsot_model.cuda_graphs import Captured, GraphCapture, Work
from specsot_model.decoder import Decoder
from specsot_worker import sampling, verifier
from specsot_worker.core.accept import DecodeState
from specsot_worker.loader import capture_tokens
from specsot_worker.penalties import without_tokens
from specsot_worker.sampling import TargetQuery, choose_on_device, find_targets, read_targets, takes_argmax
from tests.models import Shape, write_base
from tests.there import there
from tests.worker.test_next_step import (
    LENGTHS,
    Choosing,
    Orders,
    engine_of,
    opened,
    tells_early,
    write,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (1, 4, 16)


def again(work: Work) -> Captured:
    """As a device does: run the work once, and later into the same outputs."""
    outputs = work()
    return lambda: outputs[0].copy_(work()[0]), outputs


class Counted(CapturedTokens):
    """Counts its calls."""

    calls = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        self.calls += 1
        return super().__call__(hidden)


def captured_of(logits: Callable[[torch.Tensor], torch.Tensor], width: int) -> Counted:
    capture = GraphCapture() if DEVICE == "cuda" else again
    choose = partial(_choose, logits)
    return Counted(choose, width, torch.float32, torch.device(DEVICE), capture, SIZES)


def _choose(logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return choose_on_device(logits(hidden), ())


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = write_base(tmp_path_factory.mktemp("base"), Shape(layers=2))
    return Decoder.load(base, None, torch.float32, "cpu")


@pytest.fixture
def captured(decoder: Decoder) -> Counted:
    if DEVICE == "cuda":
        pytest.skip("the loop runs on a CPU")
    return captured_of(decoder.logits, decoder.config.hidden)


@torch.inference_mode()
def test_a_graph_chooses_what_its_first_rows_need() -> None:
    weight = torch.eye(32, device=DEVICE)[:, :8].contiguous()
    captured = captured_of(lambda hidden: hidden @ weight.t(), 8)
    hidden = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    hidden[5] = float("nan")
    wanted = choose_on_device(hidden @ weight.t(), ()).tolist()
    assert wanted[5] == -1
    for rows in (16, 1, 3, 7, 4, 16):
        # The rows of the call before are still there.
        found = captured(hidden[-rows:])
        assert found is not None
        assert found.dtype == torch.int32
        assert found.tolist() == wanted[-rows:]
    assert captured(hidden.repeat(2, 1)) is None


def mixed(drafted: bool = False) -> Orders:
    """As long as the shortest sequence draws, all need logits; afterwards, all take the argmax."""
    drawn = {4: {"sampling": Sampling(temperature=0.9), "seed": 5}}
    return {0: [opened(one, drafted=drafted, **drawn.get(one, {})) for one in LENGTHS]}


@pytest.mark.parametrize("passes", [False, True])
def test_law_1_steps_write_the_same_by_captured_tokens(
    decoder: Decoder, captured: Counted, passes: bool
) -> None:
    wanted, *_ = write(decoder, False, mixed())
    found, *_ = write(decoder, True, mixed(), passes=passes, captured=captured)
    assert found == wanted
    assert captured.calls > 5


def test_law_1_drafts_are_verified_the_same_by_captured_tokens(
    decoder: Decoder, captured: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is launched before the host has read them."""
    wanted, *_ = write(decoder, False, mixed())
    read = sampling.read_tokens

    def reads_late(tokens: torch.Tensor, meanwhile: Any = None) -> list[int | None]:
        if meanwhile:
            meanwhile(tokens)
        return read(tokens)

    monkeypatch.setattr(sampling, "read_tokens", reads_late)
    monkeypatch.setattr(sampling, "choose_tokens", tells_early)
    monkeypatch.setattr(verifier, "find_targets", partial(sampling.find_targets, at_once=True))
    for seed in range(3):
        captured.calls = 0
        engine = engine_of(Choosing(wanted, seed), None)
        found, _, steps, number = write(decoder, True, mixed(True), engine, True, captured=captured)
        assert found == wanted
        assert steps.unread > number / 2
        assert captured.calls > 5


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 1},
        {"min_tokens": 4},
        {"sampling": Sampling(logit_bias=((3, -100.0),))},
        {"sampling": Sampling(temperature=0.7), "seed": 4},
        {"sampling": Sampling(repetition_penalty=1.3)},
    ],
    ids=["logprobs", "min_tokens", "bias", "drawn", "penalty"],
)
def test_who_needs_logits_gets_them(decoder: Decoder, captured: Counted, more: dict[str, Any]) -> None:
    wanted, *_ = write(decoder, False, {0: [opened(1, **more)]})
    found, *_ = write(decoder, True, {0: [opened(1, **more)]}, passes=True, captured=captured)
    assert found == wanted
    assert captured.calls == 0


@pytest.mark.parametrize("forbidden", [(), (6,), (6, 5)])
def test_logits_are_computed_only_if_a_mask_excludes_an_argmax(forbidden: tuple[int, ...]) -> None:
    """The targets are those of `find_targets`; the sequence whose mask excludes nothing is not discarded."""
    logits = torch.zeros(4, 8)
    logits[:, 4:7] = torch.tensor([1.0, 2.0, 3.0])
    mask = np.ones(8, bool)
    mask[list(forbidden)] = False
    states = [DecodeState(Opening(sequence, 5, limit=99)) for sequence in (1, 2)]
    masks = [[None, mask], [None, np.ones(8, bool)]]
    queries = [TargetQuery(states[row // 2], row, chain((1, 6)), 6, masks[row // 2]) for row in (0, 2)]
    discards, computed = list[int](), list[int]()
    wanted = find_targets(logits, queries, at_once=True)

    def compute_logits() -> torch.Tensor:
        computed.append(1)
        return logits

    tokens = choose_on_device(logits, ())
    assert all(map(takes_argmax, queries))
    assert read_targets(tokens, queries, compute_logits, lambda _: None, discards.append) == wanted
    assert wanted == [[6, 6 - len(forbidden)], [6, 6]]
    assert discards == [1] * bool(forbidden)
    assert len(computed) == bool(forbidden)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_graphs_choose_the_tokens_that_kernels_choose_one_by_one(tmp_path: Path) -> None:
    """In small steps, whatever the surplus rows of a graph are."""
    decoder = Decoder.load(write_base(tmp_path, Shape(layers=2)), None, torch.bfloat16, "cuda")
    logits = without_tokens(decoder.logits, (3, 5))
    captured = there(capture_tokens(decoder, logits))
    assert decoder.runs_small_steps
    generator = torch.Generator().manual_seed(1)
    for rows in (32, 1, 2, 3, 17, 31, 16, 32):
        hidden = torch.randn(rows, decoder.config.hidden, generator=generator).to("cuda", torch.bfloat16)
        found = there(captured(hidden))
        assert found.tolist() == choose_on_device(logits(hidden), ()).tolist()
