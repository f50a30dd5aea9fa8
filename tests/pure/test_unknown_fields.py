"""What is a slip for a known name, and what another name."""

from __future__ import annotations

import pytest

from specsot_master.http.unknown_fields import is_slip


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("max_token", "max_tokens"),
        ("max_tokenss", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("mxa_tokens", "max_tokens"),
        ("max_tokems", "max_tokens"),
        ("topP", "top_p"),
        ("stops", "stop"),
    ],
)
def test_one_stroke_or_another_spelling(name: str, known: str) -> None:
    assert is_slip(name, known)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("top_a", "top_k"),
        ("m", "n"),
        ("ns", "n"),
        ("min_tokens", "max_tokens"),
        ("max_length", "max_tokens"),
        ("max_tokens_xy", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
        ("", "stop"),
    ],
)
def test_another_name(name: str, known: str) -> None:
    assert not is_slip(name, known)
