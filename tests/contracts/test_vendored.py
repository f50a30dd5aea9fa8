"""Code of others that the house keeps a copy of."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

PAGE = Path(__file__).parents[2] / "services/master/specsot_master/http/page/vendor"


def test_what_others_keep_is_as_they_published_it() -> None:
    told = re.search(r"SHA-256 `(\w{64})`", (PAGE / "README.md").read_text(encoding="utf-8"))
    assert told
    assert sha256((PAGE / "marked.umd.js").read_bytes()).hexdigest() == told[1]
