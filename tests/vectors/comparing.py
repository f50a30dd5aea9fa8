"""Compares base and head with recorded states, logits, draft steps and generations of the reference."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from specsot.core.tree import single
from specsot.members import TreeShape
from specsot_bench.reference_model import feed_base, feed_head
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_drafter.heads.eagle import EagleHead, FinalHidden, identity_slices
from specsot_drafter.heads.loading import load_head
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from tests.vectors.checks import Check, check_close, check_replays, check_runs, check_same
from tests.vectors.record import PromptRecord, ReferenceCase, read_case
from tests.vectors.steps import Accepted, DrivenSteps, likeliest

PLAIN = TreeShape(depth=0, top_k=1, nodes=1, fixed=True)


class RecordingHead:
    """A head that keeps what it is asked in drafting, and what it answers."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self.steps: list[dict[str, Tensor]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._head, name)

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        outputs = self._head.forward(tokens, features, rows)
        step = {"input_ids": tokens, "position_ids": rows.positions, "hidden_in": features, "hidden": outputs}
        self.steps.append({name: value.clone() for name, value in step.items()})
        return outputs


def check_base(case: ReferenceCase, base: Decoder, head: EagleHead) -> Iterator[Check]:
    """Tapped states, logits and plain greedy text of the base alone."""
    texts = plain_texts(base, case.prompts)
    for i, prompt in enumerate(case.prompts):
        states, logits = _states(base, head, prompt.prompt_ids)
        yield check_close(f"p{i} prompt_features", states, case.tensors[f"p{i}.prompt_features"])
        yield check_close(f"p{i} base_logits", logits, case.tensors[f"p{i}.base_logits"])
        yield check_same(f"p{i} base_greedy_ids", texts[i], prompt.base_greedy_ids)


def check_head(case: ReferenceCase, head: EagleHead) -> Iterator[Check]:
    """The head over whole prompts, from recorded states."""
    for i, prompt in enumerate(case.prompts):
        followers = (*prompt.prompt_ids[1:], *prompt.base_greedy_ids[:1])
        yield check_same(
            f"p{i} head_input_ids", followers, case.tensors[f"p{i}.head_input_ids"].flatten().tolist()
        )
        outputs, _ = head_pass(case, head, i)
        yield check_close(f"p{i} head_hidden", outputs, case.tensors[f"p{i}.head_hidden"])
        last = head.logits(outputs[-1:])[0]
        yield check_close(f"p{i} head_logits_last", last, case.tensors[f"p{i}.head_logits_last"])


def check_steps(case: ReferenceCase, head: EagleHead) -> Iterator[Check]:
    """Every recorded draft step: frontier tokens, positions, features in and out."""
    for i in range(len(case.prompts)):
        for setting in _settings_with_steps(case, i):
            steps = _draft_steps(case, head, i, case.shapes[setting])
            for name in sorted(case.tensors):
                found = re.fullmatch(rf"p{i}\.{re.escape(setting)}\.draft(\d+)_(\w+)", name)
                if found:
                    yield _check_step(
                        name.replace(".", " "), steps, int(found[1]), found[2], case.tensors[name]
                    )


def head_pass(case: ReferenceCase, head: EagleHead, i: int, room: int = 0) -> tuple[Tensor, KVPages]:
    """The head over prompt i: outputs [n, hidden], and its KV in one page with `room` for more."""
    tokens = torch.tensor(_followers(case.prompts[i]))
    return feed_head(head, tokens, recorded_features(case, head, i), room)


def _followers(prompt: PromptRecord) -> tuple[int, ...]:
    """For each prompt token the one behind it: what the head is fed beside its feature."""
    return (*prompt.prompt_ids[1:], prompt.base_greedy_ids[0])


def recorded_features(case: ReferenceCase, head: EagleHead, i: int) -> Tensor:
    """[n, hidden] as the head takes them. EAGLE-1's are recorded so, EAGLE-3's as states side by side."""
    name = f"p{i}.prompt_features"
    recorded, slices = case.tensors[name], tuple(head.tap_slices().values())
    if isinstance(head.fusion, FinalHidden):
        return recorded
    states = recorded.chunk(len(slices), dim=1)
    return head.features(torch.stack([state @ part.T for state, part in zip(states, slices)]).sum(0))


def plain_texts(base: Decoder, prompts: Sequence[PromptRecord]) -> list[list[int]]:
    """Greedy text behind every prompt, as long as recorded, one token a step."""
    most = max((len(prompt.base_greedy_ids) for prompt in prompts), default=0)
    steps = DrivenSteps(base, None, PLAIN, [len(prompt.prompt_ids) for prompt in prompts], most)
    logits = steps.prefill({i: prompt.prompt_ids for i, prompt in enumerate(prompts)})
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(most):
        tokens = {i: likeliest(row.view(1, -1))[0] for i, row in logits.items()}
        for i, token in tokens.items():
            texts[i].append(token)
        steps.accept({i: Accepted((0,), token) for i, token in tokens.items()})
        logits = steps.verify({i: single(token) for i, token in tokens.items()})
    return [text[: len(prompt.base_greedy_ids)] for text, prompt in zip(texts, prompts)]


def _states(base: Decoder, head: EagleHead, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A prompt's tapped states side by side [n, taps * H] (EAGLE-1: its features), and its last logits."""
    hidden, states = feed_base(
        base, torch.tensor(tokens), identity_slices(head.taps, base.config.hidden, base.dtype)
    )
    assert states is not None
    return head.features(states) if isinstance(head.fusion, FinalHidden) else states, base.logits(
        hidden[-1:]
    )[0]


def _settings_with_steps(case: ReferenceCase, i: int) -> list[str]:
    return [name for name in case.shapes if any(key.startswith(f"p{i}.{name}.draft") for key in case.tensors)]


def _draft_steps(case: ReferenceCase, head: EagleHead, i: int, shape: TreeShape) -> list[dict[str, Tensor]]:
    room = shape.slots
    outputs, kv = head_pass(case, head, i, room)
    witness, rows = RecordingHead(head), len(outputs)
    ground = TreeRoom(rows, (0,), range(rows, rows + room), rows)
    TreeGrowth(cast(DraftHead, witness), kv, [ground], shape.top_k).run(outputs[-1:], shape.depth + 1)
    return witness.steps


def _check_step(name: str, steps: list[dict[str, Tensor]], step: int, kind: str, recorded: Tensor) -> Check:
    if not 1 <= step <= len(steps) or kind not in steps[step - 1]:
        return Check(name, "nothing of this kind is computed here")
    ours = steps[step - 1][kind]
    if recorded.is_floating_point():
        return check_close(name, ours, recorded)
    return check_same(name, ours.tolist(), recorded.flatten().tolist())


@torch.inference_mode()
def checks(directory: Path) -> Iterator[Check]:
    """All checks of a directory, one by one, in fp32."""
    case = read_case(directory)
    head = load_head(
        case.head, case.base, torch.float32, "cpu", allow_pickle_bin=True, allow_pickle_base=True
    )
    head.positions = sys.maxsize  # the reference drafts on behind the end of the base's context
    base = Decoder.load(case.base, None, torch.float32, "cpu", allow_pickle_bin=True)
    yield from check_kind(case, head)
    yield from check_base(case, base, head)
    yield from check_head(case, head)
    yield from check_steps(case, head)
    yield from check_runs(case, base, head)
    yield from check_replays(case, base, head)


def check_kind(case: ReferenceCase, head: EagleHead) -> Iterator[Check]:
    """The head's family and its taps, where they were recorded."""
    if case.record.algo is not None:
        kind = "eagle3" if case.record.algo == "eagle3" else "eagle1"
        yield check_same(f"head is {case.record.algo}", [head.kind], [kind])
    if case.record.aux_layers is not None:
        yield check_same("aux_layers", head.taps, case.record.aux_layers)
