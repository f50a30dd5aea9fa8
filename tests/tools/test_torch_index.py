"""Which torch `make install` fetches: without CUDA where no GPU is, and from no index that is out of
reach.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.torch_index import INDEX, answers, has_nvidia_driver, pip_options

ROOT = Path(__file__).parents[2]


def unasked(address: str) -> bool:
    raise AssertionError(f"{address} was asked")


def test_a_machine_without_a_driver_takes_the_build_for_cpus() -> None:
    assert pip_options({}, "linux", False, lambda address: True) == f"--extra-index-url {INDEX}"


def test_an_index_out_of_reach_is_not_named() -> None:
    assert pip_options({}, "linux", False, lambda address: False) == ""
    assert not answers("http://127.0.0.1:9/whl/cpu")
    assert not answers("http://nowhere.invalid/whl/cpu")


@pytest.mark.parametrize(
    ("environment", "platform", "driver"),
    [
        ({}, "linux", True),
        ({}, "darwin", False),
        ({"PIP_EXTRA_INDEX_URL": "https://own"}, "linux", False),
        ({"PIP_INDEX_URL": "https://own"}, "linux", False),
        ({"PIP_NO_INDEX": "1"}, "linux", False),
    ],
)
def test_with_a_gpu_or_a_chosen_index_pip_is_left_alone(
    environment: dict[str, str], platform: str, driver: bool
) -> None:
    assert pip_options(environment, platform, driver, unasked) == ""


@pytest.mark.parametrize(
    "found", ["proc/driver/nvidia/version", "usr/lib/x86_64-linux-gnu/libcuda.so.1", "dev/dxg"]
)
def test_a_driver_is_known_by_its_files(tmp_path: Path, found: str) -> None:
    assert not has_nvidia_driver(tmp_path, lambda name: None)
    (tmp_path / found).parent.mkdir(parents=True)
    (tmp_path / found).touch()
    assert has_nvidia_driver(tmp_path, lambda name: None)


def test_a_driver_is_known_by_its_program(tmp_path: Path) -> None:
    assert has_nvidia_driver(tmp_path, lambda name: f"/usr/bin/{name}")


def test_installing_asks_for_it() -> None:
    """Once for a whole installation, however many packages of ours are installed."""
    recipes = re.findall(
        r"^\$\(VENV\)/(installed|developed):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M
    )
    assert [name for name, _ in recipes] == ["installed", "developed"]
    assert all("$(TORCH_INDEX)" in recipe for _, recipe in recipes)
