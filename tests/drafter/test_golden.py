"""The drafter against the reference implementation of EAGLE: every recorded number of every case.

Refuses to know how any head works: heads are loaded and asked through `DraftHead`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specsot.frames import Features, Lesson
from specsot.model.attention import Span, plan_attention
from specsot.model.kv import KVPages
from specsot.tree import Tree, depths
from specsot.verify import residual_walk
from specsot_drafter.engine import DraftEngine
from specsot_drafter.growth import Ground, Growth
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.eagle3 import Eagle3Head
from tests.drafter.golden import CLOSE, Case, leaf_rows, recorded_tree, same_tree
from tests.drafter.ring import Ring, configuration, load_base, opening

CASES = (
    "llama31-eagle3",
    "llama31-eagle3-narrow",
    "vicuna-eagle3-fullvocab",
    "qwen3-eagle3",
    "qwen3-eagle3-headdim32",
)
SETTINGS = ("A", "B", "C")


@dataclass(frozen=True)
class Loaded:
    """A case with its head and base in memory."""

    case: Case
    head: DraftHead
    base: torch.nn.Module


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, reference: Path) -> Loaded:
    case = Case(reference / "golden" / "eagle" / request.param)
    head = Eagle3Head.load(case.head, case.base, torch.float32, "cpu", allow_pickle_bin=True)
    return Loaded(case, head, load_base(case.base))


def fused(loaded: Loaded, prompt: int) -> torch.Tensor:
    """[n, width] rows as the stages would send them, from the recorded states."""
    states = loaded.case.tensors[f"p{prompt}.prompt_features"]
    slices = loaded.head.tap_slices().values()
    return sum(part @ weight.T for part, weight in zip(states.chunk(len(slices), 1), slices))


def prompt_pass(loaded: Loaded, prompt: int) -> tuple[torch.Tensor, KVPages]:
    """The head over a whole prompt: outputs [n, hidden] and its KV, all in page 0."""
    head, tokens = loaded.head, loaded.case.tensors[f"p{prompt}.head_input_ids"]
    kv = KVPages(head.layers, 1, 256, head.kv_heads, head.head_dim, head.dtype, head.device)
    rows = torch.arange(len(tokens))
    plan = plan_attention(
        [Span(len(tokens), 0, len(tokens), (0,))], 256, head.group, "packed", head.dtype, "cpu"
    )
    return head.forward(tokens, head.features(fused(loaded, prompt)), rows, rows, plan, kv), kv


def test_the_base_agrees_with_the_recorded_states(loaded: Loaded) -> None:
    """Features are the base's tapped states, put through the head's fc where they are tapped."""
    for i, prompt in enumerate(loaded.case.prompts):
        ring = Ring(loaded.base, loaded.head, None)
        tokens = prompt["prompt_ids"]
        ring.open(opening(1, len(tokens)), tokens)
        torch.testing.assert_close(ring.heard[-1].rows, fused(loaded, i), atol=CLOSE, rtol=0)
        assert ring.writers[1].written == prompt["base_greedy_ids"][:1]


def test_head_outputs(loaded: Loaded) -> None:
    with torch.inference_mode():
        for i in range(len(loaded.case.prompts)):
            outputs, _ = prompt_pass(loaded, i)
            torch.testing.assert_close(outputs, loaded.case.tensors[f"p{i}.head_hidden"], atol=CLOSE, rtol=0)
            wanted = loaded.case.tensors[f"p{i}.head_logits_last"].log_softmax(-1)
            found = loaded.head.log_probs(outputs[-1:])[0]
            torch.testing.assert_close(found, wanted, atol=CLOSE, rtol=0)


class Witness:
    """A head that keeps what it is asked and what it answers."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.passes: list[tuple[torch.Tensor, ...]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._head, name)

    def forward(self, tokens, features, positions, slots, plan, kv, asked=None):
        outputs = self._head.forward(tokens, features, positions, slots, plan, kv, asked)
        self.passes.append((tokens.clone(), features.clone(), positions.clone(), outputs.clone()))
        return outputs


def test_every_draft_step_of_setting_a(loaded: Loaded) -> None:
    """Frontier tokens, positions, features in and out, level by level."""
    case, shape = loaded.case, loaded.case.shape("A")
    with torch.inference_mode():
        for i in range(len(case.prompts)):
            outputs, kv = prompt_pass(loaded, i)
            witness, n = Witness(loaded.head), len(outputs)
            growth = Growth(witness, kv, [Ground(n, (0,), range(n, n + 64))], shape.top_k)
            growth.run(outputs[-1:], shape.depth + 1)
            for step, (tokens, before, positions, after) in enumerate(witness.passes, start=1):
                name = f"p{i}.A.draft{step}"
                assert tokens.tolist() == case.tensors[f"{name}_input_ids"].tolist()
                assert positions.tolist() == case.tensors[f"{name}_position_ids"].tolist()
                torch.testing.assert_close(after, case.tensors[f"{name}_hidden"], atol=CLOSE, rtol=0)
                if f"{name}_hidden_in" in case.tensors:
                    torch.testing.assert_close(before, case.tensors[f"{name}_hidden_in"], atol=CLOSE, rtol=0)
            assert len(witness.passes) == shape.depth


@pytest.mark.parametrize("setting", SETTINGS)
def test_first_trees_from_recorded_features(loaded: Loaded, setting: str) -> None:
    """All prompts at once, in one engine: batching changes nothing."""
    engine = DraftEngine(loaded.head, configuration(loaded.case.shape(setting), page_rows=96))
    prompts = loaded.case.prompts
    for i, prompt in enumerate(prompts):
        tokens = tuple(prompt["prompt_ids"])
        lesson = Lesson(i, 0, tokens, prompt["base_greedy_ids"][0], 1)
        opened = opening(i, len(tokens), limit=1000)
        engine.learn(Features(1, i, (opened,), (lesson,), (), fused(loaded, i), len(tokens), 0.0))
    drafts = {draft.sequence: draft.tree for draft in engine.draft()}
    for i, prompt in enumerate(prompts):
        assert same_tree(drafts[i], prompt["runs"][setting]["trees"][0]), f"prompt {i}"


@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_runs(loaded: Loaded, setting: str) -> None:
    """Trees of the first rounds, accepted lengths of every round, generated ids; all prompts side by side."""
    case, prompts = loaded.case, loaded.case.prompts
    engine = DraftEngine(loaded.head, configuration(case.shape(setting)))
    ring = Ring(loaded.base, loaded.head, engine)
    writers = [
        ring.open(opening(i, len(prompt["prompt_ids"]), limit=1000), prompt["prompt_ids"])
        for i, prompt in enumerate(prompts)
    ]
    for _ in range(max(len(prompt["runs"][setting]["accept_lengths"]) for prompt in prompts)):
        ring.turn()
    for i, (prompt, writer) in enumerate(zip(prompts, writers)):
        wanted = prompt["runs"][setting]
        assert writer.accepted[: len(wanted["accept_lengths"])] == wanted["accept_lengths"], f"prompt {i}"
        greedy = prompt["base_greedy_ids"][: len(writer.written)]
        assert writer.written[: len(greedy)] == greedy
        assert writer.written[: len(wanted["generated_ids"])] == wanted["generated_ids"]
        committed = len(prompt["prompt_ids"])
        for tree, record, accepted in zip(writer.trees, wanted["trees"], writer.accepted):
            assert same_tree(tree, record), f"prompt {i}"
            assert committed == record["committed_len"]
            assert sorted(committed + depth for depth in depths(tree.parents)) == sorted(
                record["position_ids"]
            )
            committed += accepted + 1


def test_sampling_replays(loaded: Loaded) -> None:
    """The residual walk over recorded logits and uniforms, and the distribution of the bonus token."""
    for j, run in enumerate(loaded.case.sampling):
        for r, record in enumerate(run["rounds"]):
            logits = loaded.case.tensors[f"s{j}.r{r}.node_logits"]
            chances = warp(logits, run["temperature"], run.get("top_p"), run.get("top_k"))
            tree = recorded_tree(record)
            walk = residual_walk(tree, leaf_rows(record), chances.tolist(), record["uniforms"])
            assert len(walk.accepted) - 1 == record["accept_length"]
            assert [tree.tokens[node] for node in walk.accepted] == record["accepted_path_tokens"]
            assert walk.drawn == len(record["uniforms"])
            wanted = loaded.case.tensors[f"s{j}.r{r}.sample_p"]
            torch.testing.assert_close(torch.tensor(walk.final), wanted, atol=1e-5, rtol=1e-4)
            assert walk.final[record["bonus_token"]] > 0


def test_some_case_samples(reference: Path) -> None:
    """The replays above are not all empty."""
    cases = [Case(reference / "golden" / "eagle" / name) for name in CASES]
    assert sum(len(run["rounds"]) for case in cases for run in case.sampling) > 4


def warp(logits: torch.Tensor, temperature: float, top_p: float | None, top_k: int | None) -> torch.Tensor:
    """The reference's order: temperature, top-p, top-k; then probabilities."""
    logits = logits / temperature
    if top_p and top_p < 1:
        ordered, indices = logits.sort(dim=-1, descending=False)
        gone = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        gone[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(gone).scatter(1, indices, gone), -torch.inf)
    if top_k:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.softmax(-1)


def test_a_tree_that_is_not_the_recorded_one_is_told_apart(loaded: Loaded) -> None:
    """The comparison itself can fail."""
    record = loaded.case.prompts[0]["runs"]["A"]["trees"][0]
    wanted = recorded_tree(record)
    assert same_tree(wanted, record)
    other = Tree((*wanted.tokens[:-1], wanted.tokens[-1] + 1), wanted.parents)
    assert not same_tree(other, record)
