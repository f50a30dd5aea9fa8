"""MeasuredSpeeds of an earlier start are used if a few runs confirm them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from specsot_model import kept_speeds
from specsot_model.cuda_graphs import measure_curve
from specsot_model.kept_speeds import KeptSpeeds, MeasuredSpeeds

CURVE = ((1, 0.001), (16, 0.004), (128, 0.03))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specsot" / "speeds"


def test_what_was_written_is_read_and_what_was_damaged_is_not(cache: Path) -> None:
    kept = KeptSpeeds("cpu", model="a", form=("int8", 1))
    assert kept.read() is None
    kept.write(MeasuredSpeeds(CURVE, 7))
    assert KeptSpeeds("cpu", form=("int8", 1), model="a").read() == MeasuredSpeeds(CURVE, 7)
    (file,) = cache.iterdir()
    whole = file.read_text()
    for part in ("", whole[:-1], "{}", '{"curve": [[1]], "copy_speed": 1}', "[]"):
        file.write_text(part)
        assert kept.read() is None


def test_another_model_machine_or_version_has_another_file(cache: Path, monkeypatch) -> None:
    KeptSpeeds("cpu", model="a").write(MeasuredSpeeds(CURVE))
    assert KeptSpeeds("cpu", model="b").read() is None
    changes = (
        ("device_name", lambda device: "another processor, 2 cores"),
        ("__version__", "0"),
        ("source_digest", lambda folder: "other kernels"),
    )
    for name, other in changes:
        with monkeypatch.context() as patch:
            patch.setattr(kept_speeds, name, other)
            assert KeptSpeeds("cpu", model="a").read() is None
    assert KeptSpeeds("cpu", model="a").read() == MeasuredSpeeds(CURVE)


def test_a_cache_that_cannot_be_written_costs_time_alone(cache: Path) -> None:
    cache.parent.write_text("no folder")
    KeptSpeeds("cpu", model="a").write(MeasuredSpeeds(CURVE))
    assert KeptSpeeds("cpu", model="a").read() is None


@pytest.mark.parametrize(
    ("factor", "sizes", "used"),
    [
        (1.0, (1, 16, 128), True),
        (1.2, (1, 16, 128), True),
        (2.0, (1, 16, 128), False),
        (0.5, (1, 16, 128), False),
        (1.0, (1, 16), False),
    ],
)
def test_a_curve_is_measured_anew_unless_it_has_the_sizes_and_the_speed(
    factor: float, sizes: tuple[int, ...], used: bool
) -> None:
    runs = Counter[int]()
    seconds = dict(CURVE)

    def timer(rows: int) -> float:
        runs[rows] += 1
        return seconds[rows] * factor

    timers = {rows: partial(timer, rows) for rows in sizes}
    curve = measure_curve(timers, 0.0, 3, torch.device("cpu"), lambda: 0.0, known=CURVE)
    assert (curve is CURVE) == used
    assert (runs[128] == 0) == (used or 128 not in sizes)
    if not used:
        assert curve == tuple((rows, seconds[rows] * factor) for rows in sizes)


def test_a_device_that_is_slow_at_first_is_run_until_it_is_fast() -> None:
    """As an idle GPU is, whose clock rises with the work."""
    runs = Counter[int]()
    seconds = {1: 0.0001, 16: 0.0004}

    def timer(rows: int) -> float:
        runs[rows] += 1
        return seconds[rows] * (3.0 if runs[1] < 20 else 1.0)

    known = tuple(seconds.items())
    timers = {rows: partial(timer, rows) for rows in seconds}
    assert measure_curve(timers, 0.0, 3, torch.device("cpu"), known=known) is known
    assert runs[1] == 20
