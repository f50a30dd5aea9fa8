"""The gate against import circles and long files, on a made-up tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from house import main


def test_a_circle_by_a_lazy_import_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "shared" / "specsot"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "rows.py").write_text("from specsot.sizes import MOST\n")
    (package / "sizes.py").write_text("MOST = 4\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert main(["gate"], root=tmp_path) == 0
    (package / "sizes.py").write_text("MOST = 4\n\n\ndef late() -> None:\n    import specsot.rows\n")
    assert main(["gate"], root=tmp_path) == 1
    assert "specsot.rows -> specsot.sizes -> specsot.rows" in capsys.readouterr().out


def test_a_long_file_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = tmp_path / "lab" / "specsot_lab" / "long.py"
    long.parent.mkdir(parents=True)
    long.write_text("\n" * 500)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert main(["gate"], root=tmp_path) == 0
    long.write_text("\n" * 501)
    assert main(["gate"], root=tmp_path) == 1
    assert capsys.readouterr().out == "lab/specsot_lab/long.py has more than 500 lines\n"


def test_every_module_belongs_to_a_feature(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/results/house.toml; and a feature without files would be a line of nothing."""
    assert main(["features"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| feature | files |")
    assert [row for row in rows if row.endswith("is of no feature")] == []
    assert [row for row in rows if row.split("|")[2].strip() == "0"] == []
