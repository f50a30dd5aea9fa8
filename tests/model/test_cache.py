"""What the cache keeps: what somebody uses, and what was used not long ago."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from specsot.checkpoint.cache import UNUSED_SECONDS, USED, remove_unused, use


def test_a_folder_is_removed_if_it_is_unused_for_a_month(tmp_path: Path) -> None:
    for name, age in (("used", UNUSED_SECONDS + 60), ("old", UNUSED_SECONDS + 60), ("new", 60)):
        (tmp_path / name / "blocks").mkdir(parents=True)
        use(tmp_path / name).close()
        os.utime(tmp_path / name / USED, (0, time.time() - age))
    held = (tmp_path / "used" / USED).open()
    fcntl.flock(held, fcntl.LOCK_SH)
    remove_unused(tmp_path, time.time())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["new", "used"]
    held.close()
    remove_unused(tmp_path, time.time())
    assert [one.name for one in tmp_path.iterdir()] == ["new"]


def test_using_a_folder_makes_it_new(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    use(tmp_path / "model").close()
    os.utime(tmp_path / "model" / USED, (0, 0))
    use(tmp_path / "model").close()
    remove_unused(tmp_path, time.time())
    assert (tmp_path / "model").is_dir()
