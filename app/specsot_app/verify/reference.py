"""Finds the tokens of a text that greedy decoding by the reference would not have chosen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specsot.model.attention import RowSpan, plan_attention
from specsot.model.decoder import Decoder
from specsot.model.kv import KVPages
from specsot_app.core.verify_report import TokenDifference
from specsot_app.reference_model import load_in_transformers
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.eagle import EagleHead


def feed_base(base: Decoder, tokens: Tensor, taps: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The states [n, H] behind the last layer, and the sum [n, Hd] over the taps, where there are any."""
    rows = len(tokens)
    plan = base.plan([RowSpan(rows, 0, rows, (0,))], rows, "packed")
    places = torch.arange(rows, device=base.device)
    slices = {layer: part.to(base.device, base.dtype) for layer, part in taps.items()}
    return base.forward(base.embed(tokens), places, places, plan, base.make_kv(1, rows), slices)


def feed_head(head: EagleHead, tokens: Tensor, features: Tensor, room: int = 0) -> tuple[Tensor, KVPages]:
    """Outputs [n, hidden] from features [n, hidden], and the KV in a page with `room` for more rows."""
    rows = len(tokens)
    kv = head.make_kv(1, rows + room)
    span = RowSpan(rows, 0, rows, (0,))  # every row sees itself and all before it
    plan = plan_attention([span], rows + room, head.group, "packed", head.dtype, head.device)
    places = torch.arange(rows, device=head.device)
    return head.forward(tokens, features, HeadRows(places, places, plan, kv)), kv


Logits = Callable[[Sequence[int], int], Tensor]  # (a text, how many of its last rows) -> [rows, V]


def of_transformers(model: Path, dtype: torch.dtype, device: str) -> Logits:
    """A model as Transformers loads and runs it. Raises ModelError where it cannot."""
    held = load_in_transformers(model, dtype).to(device).eval()
    return lambda text, rows: held(torch.tensor([text], device=device), logits_to_keep=rows).logits[0]


def of_base(base: Decoder) -> Logits:
    """A model as SpecSoT reads a whole text, in one pass without drafts."""
    return lambda text, rows: base.logits(
        feed_base(base, torch.tensor(text, device=base.device), {})[0][-rows:]
    )


@torch.inference_mode()
def compare(
    reference: Logits, prompt: Sequence[int], written: Sequence[int], ends: Collection[int] | None
) -> list[TokenDifference]:
    """Every token that is not the reference's choice behind the tokens before it.

    With none, greedy decoding by the reference writes exactly this. ends: one of these must come next; None
    where the answer was cut off.
    """
    logits = reference([*prompt, *written], len(written) + 1).float()
    first, second = logits.topk(2).values.unbind(-1)
    choices, gaps = logits.argmax(-1).tolist(), (first - second).tolist()
    wrong = [at for at, token in enumerate(written) if choices[at] != token]
    found = [TokenDifference(at, written[at], choices[at], gaps[at]) for at in wrong]
    if ends is not None and choices[-1] not in ends:
        found.append(TokenDifference(len(written), None, choices[-1], gaps[-1]))
    return found
