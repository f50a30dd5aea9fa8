"""Graphs of layers that are split over devices, one a device: what they do together, on GPUs or threads."""

from __future__ import annotations

import random
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest
import torch

from specsot.core.frames import Opening
from specsot.core.tree import ancestry, depths
from specsot.members import Range
from specsot_model.attention import RowSpan
from specsot_model.cuda_graphs import Captured, CapturedSteps, GraphCapture, StepRows, Work
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from tests.model.test_tensor_parallel import TWO_GPUS
from tests.model.tiny import PAGE_ROWS, write_model
from tests.models import write_base
from tests.worker.writers import PAGE, Writer, feed, rows_of

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu.exchange import OPEN, PeerSums


class Turns(PeerSums):
    """Devices as threads that take turns, since Triton's interpreter is one: a sum waits for both."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.turn, self._met, self._alone = Lock(), Barrier(2, timeout=60), False

    @contextmanager
    def alone(self, part: int) -> Generator[None]:
        self._alone = True
        with super().alone(part):
            yield
        self._alone = False

    def add(self, part: int, place: int, hidden: torch.Tensor) -> None:
        if not self._alone:
            self.turn.release()
            self._met.wait()
            self.turn.acquire()
            self.peer_counts[part].fill_(OPEN)
        super().add(part, place, hidden)


class OnThreads(Decoder):
    """Parts as GPUs have them, on a CPU."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        assert self._split
        self.exchange = Turns(self._split.devices, 4, self.config.hidden, self.dtype)
        self._capture_parts(self._split.fuse(self.exchange))


class Threads:
    """Captures for two devices: the first one's replay returns at once, as a GPU's does."""

    def __init__(self, turn: Lock) -> None:
        self._turn, self._pool, self._running = turn, ThreadPoolExecutor(2), list[Future[None]]()

    def __call__(self, work: Work) -> Captured:
        outputs = work()

        @torch.inference_mode()
        def again() -> None:
            with self._turn:
                for old, new in zip(outputs, work()):
                    if old is not None and new is not None:
                        old.copy_(new)

        def replay() -> None:
            self._running.append(self._pool.submit(again))
            if len(self._running) == 2:
                self._running.pop().result()
                self._running.pop().result()

        return replay, outputs


@pytest.mark.parametrize("device", [TWO_GPUS if torch.cuda.is_available() else "cpu"])
def test_steps_of_all_parts_are_what_whole_layers_do(device: str, tmp_path: Path) -> None:
    """A tree, then one row behind those of it that are kept; features of the first part."""
    write_model(tmp_path, "qwen3", num_attention_heads=2)
    given, kind = (tmp_path, Range(0, 1), torch.float16, device), torch.float16
    whole = Decoder.load(*given)
    parts = (OnThreads if device == "cpu" else Decoder).load(*given, tensor_parallel=2)
    capture = Threads(parts.exchange.turn) if isinstance(parts, OnThreads) else GraphCapture()
    assert parts.capturable
    kvs = [each.make_kv(4, PAGE_ROWS) for each in (whole, parts)]
    taps = {0: torch.eye(whole.config.hidden, dtype=kind, device=device)}
    steps = CapturedSteps(parts, kvs[1], taps, capture, (1, 4))
    for base, parents, moves in ((0, (0, 0, 0, 2), ()), (2, (0,), ((50, 49),))):
        rows = range(base, base + len(parents))
        slots, at = [48 + row for row in rows], [base + depth for depth in depths(parents)]
        spans = [RowSpan(len(parents), base, len(parents), (3,), ancestry(parents))]
        tokens = [7 + row for row in rows]
        kvs[0].move(moves)
        plan = whole.plan(spans, PAGE_ROWS, "packed")
        entry, turns, places = (torch.tensor(each, device=device) for each in (tokens, at, slots))
        wanted = whole.forward(whole.embed(entry), turns, places, plan, kvs[0], taps)
        found = steps.run(StepRows(tokens, at, slots, spans, moves))
        assert found is not None
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_on_two_gpus_write_what_one_writes(tmp_path: Path) -> None:
    """Every frame runs as a graph; logits of parts are those of the whole head."""
    base, rows, logits = write_base(tmp_path / "base"), list[torch.Tensor](), list[list[torch.Tensor]]()
    for parts in (1, 2):
        decoder = Decoder.load(base, None, torch.float32, "cuda:0", tensor_parallel=parts)
        stage = DecoderStage(decoder, 40, PAGE)
        stage.capture()
        writers = [Writer(sequence, random.Random(sequence)) for sequence in (1, 2)]
        feed(writers, stage, 60, (Opening(1, 60), Opening(2, 60)))
        assert decoder.capturable
        assert stage.uncaptured == 0
        rows.append(torch.cat([rows_of(writer) for writer in writers]))
        logits.append([decoder.logits(rows[0][:many]) for many in (1, 9)])
    near = 1e-3
    torch.testing.assert_close(rows[0], rows[1], atol=near, rtol=near)
    torch.testing.assert_close(logits[0], logits[1], atol=near, rtol=near)
