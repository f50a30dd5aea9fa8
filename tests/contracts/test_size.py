"""The repository can be sent around whole: a machine with GPUs takes 64 MiB of a working tree at most."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import REPOSITORY

MOST = 56 * 1024**2  # bytes of tracked files


def test_tracked_files_stay_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("no git repository here")
    files = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= MOST
