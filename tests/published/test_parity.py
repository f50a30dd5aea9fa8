"""Published GGUF files in fp32: token ids, logits and 200 greedy tokens are those of Transformers' reading.

Skipped unless SPECSOT_MODELS names the folder in which `make models` has put them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.published.conftest import LINE, ROW
from tests.published.halves import (
    against_their_logits,
    apart,
    our_answers,
    our_ids,
    our_logits,
    our_prompts,
    their_ids,
)
from tools.models import FILES

# A model of 1.5 billion numbers takes 6 GB in fp32, and minutes on a machine with other work. The limit of
# other tests, five minutes, has ended that of 0.5 billion.
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(3600)]

FOLDER = os.environ.get("SPECSOT_MODELS")
NUM_TOKENS = 200
# The largest difference of a logit, as a fraction of the range of the logits. Sums of fp32 in another order.
LOGIT_TOLERANCE = 1e-4
# Logits. Where Transformers' two best tokens are closer than this, rounding decides.
TIE_GAP = 1e-4

# Raw prompts: what a completion model is asked, without a chat template.
PROMPTS = (
    "The history of the lighthouse begins with fires that were lit on hilltops. Later,",
    'def merge(left: list[int], right: list[int]) -> list[int]:\n    """Merge two sorted lists."""\n',
    "春天来了,公园里的花都开了。孩子们",
)
# Texts on which tokenizers part: spaces, digits, contractions, scripts, emoji, code, control characters.
# "½" is left out: Transformers' reading of SmolLM2 writes two tokens, though its vocabulary has one for it.
TEXTS = (
    *PROMPTS,
    "", " ", "  a", "a  ", "\n", "\n\n\n", "\t\tx", "a\r\nb", " " * 31, "x" * 70,
    "don't we'll I'VE they'd", "1234567890 3.14159 1,000,000", "١٢٣ ४५६",
    "naïve café Ünïcödé", "e\u0301 e\u0301\u0302", "A" + "\u0300" * 20, "𝕳𝖊𝖑𝖑𝖔", "ﬁ ﬂ ™",
    "こんにちは世界", "안녕하세요", "Привет, мир", "שלום עולם", "สวัสดี",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪 🏳️\u200d🌈", "\u200b\u200d\ufeff", "\x00\x01\x7f", "…—–“”‘’",
    "for (int i = 0; i < n; ++i) { a[i] += 1; }", '<html>\n  <p class="x">&nbsp;</p>',
    "https://example.org/?q=a%20b#c", "$\\int_0^1 x^2\\,dx$", "----====####",
)  # fmt: skip


@pytest.fixture(params=FILES, ids=[file.name for file in FILES])
def file(request: pytest.FixtureRequest) -> Path:
    """One of the files."""
    if not FOLDER:
        pytest.skip("SPECSOT_MODELS names no folder of published models (make models)")
    path = Path(FOLDER) / request.param.name
    if not path.is_file():
        pytest.skip(f"{path} is missing (make models)")
    return path.resolve()


def test_token_ids_are_those_of_the_file_s_tokenizer(
    file: Path, record_property: Callable[[str, object], None]
) -> None:
    ours, theirs = apart(our_ids, file, TEXTS), apart(their_ids, file, TEXTS)
    differences = {text: (one, other) for text, one, other in zip(TEXTS, ours, theirs) if one != other}
    record_property(
        LINE, f"{file.name}: {len(TEXTS) - len(differences)} of {len(TEXTS)} texts have the same ids"
    )
    assert not differences


def test_logits_and_greedy_tokens_are_those_of_transformers(
    file: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    prompts = apart(our_prompts, file, PROMPTS)
    answers = apart(our_answers, file, prompts, NUM_TOKENS)
    texts = [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]
    apart(our_logits, file, texts, tmp_path)
    rows = apart(against_their_logits, file, texts, [len(prompt) for prompt in prompts], tmp_path)
    for number, row in enumerate(rows, 1):
        figures = f"{row['gap']:.1e}", f"{row['logits']:.1e}", f"{row['spread']:.1f}"
        record_property(ROW, (file.name, number, row["tokens"], row["differ"], *figures))
    assert [row["tokens"] for row in rows] == [NUM_TOKENS] * len(PROMPTS)
    assert all(row["gap"] < TIE_GAP for row in rows)
    assert all(row["logits"] < LOGIT_TOLERANCE * row["spread"] for row in rows)
