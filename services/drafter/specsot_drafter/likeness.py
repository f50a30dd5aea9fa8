"""Whether two models write with the same tokens.

Refuses to know weights: directories and numbers of ids in, an error or nothing out.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from specsot.core.vocabulary import read_vocabulary
from specsot.errors import HeadMismatch

TOKENIZER = "tokenizer.json"


def check_tokenizers(base: Path, base_ids: int, draft: Path, draft_ids: int) -> None:
    """Raise HeadMismatch unless every id that both models have means the same in both.

    base_ids, draft_ids: how many ids each has logits for; padding may differ. Equal files are equal at
    once, and without any file only the numbers of ids can be compared.
    """
    files = [directory / TOKENIZER for directory in (base, draft)]
    there = [file for file in files if file.exists()]
    if not there:
        _require(base_ids == draft_ids, draft, f"it has {draft_ids} token ids, the base {base_ids}")
        return
    for file in files:
        _require(file in there, draft, f"{file} is missing, so its tokens cannot be compared")
    if _digest(files[0]) != _digest(files[1]):
        _compare(base, draft)


def _compare(base: Path, draft: Path) -> None:
    """Token by token, as bytes."""
    theirs, ours = read_vocabulary(base).bytes, read_vocabulary(draft).bytes
    for token in range(max(len(theirs), len(ours))):
        here = ours[token] if token < len(ours) else None
        there = theirs[token] if token < len(theirs) else None
        _require(here == there, draft, f"its token {token} is {here!r}, the base's {there!r}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _require(holds: bool, draft: Path, reason: str) -> None:
    if not holds:
        raise HeadMismatch(f"{draft}: not the base's tokenizer: {reason}")
