"""`Eagle` writes what the target alone writes, ends where it must, and counts what it did."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specsot.core.frames import End
from specsot.eagle import Eagle, EagleConfig, Piece
from specsot.errors import InvalidRequest
from specsot.params import Sampling
from specsot_bench.eagle.generation import StepLoop
from tests.conftest import some
from tests.eagle.knowing import KnowingHead
from tests.laws.plain import Excuses, load, write_plainly
from tests.models import SHALLOW, write_base, write_head

SHAPE, LIMIT, NEVER, GREEDY = SHALLOW, 20, (), Sampling()
TREES = [(1, 1, 2), (1, 4, 5), (2, 2, 4), (2, 3, 11), (3, 1, 4), (4, 3, 8), (4, 5, 24), (6, 4, 40)]
WARM = dict(temperature=0.9, top_p=0.95, top_k=40, min_p=0.01)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), SHAPE)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), SHAPE)


def prompts_of(count: int, seed: int = 3, most: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(rng.randrange(1, most))] for _ in range(count)]


def plainly(
    base: Path, prompt: list[int], sampling: Sampling = GREEDY, ordinal: int = 0, guess: Sequence[int] = ()
) -> Any:
    return write_plainly(base, tuple(prompt), LIMIT, sampling, 7, ordinal, guess)


def knowing(base: Path, prompts: list[list[int]], sampling: Sampling = GREEDY, slip: int = 6) -> KnowingHead:
    texts = {n: [*p, *plainly(base, p, sampling, n).tokens] for n, p in enumerate(prompts)}
    return KnowingHead(texts, SHAPE.hidden, SHAPE.vocabulary, slip)


def check(base: Path, eagle: Eagle, prompts: list[list[int]]) -> Any:
    """Every sequence as plain decoding has it; returns the figures."""
    ids, stats = eagle.generate(prompts, LIMIT, seed=7, eos_token_id=NEVER)
    excuses = Excuses()
    for ordinal, (prompt, whole) in enumerate(zip(prompts, ids)):
        assert whole[: len(prompt)] == prompt
        assert len(whole) == len(prompt) + LIMIT
        text = whole[len(prompt) :]
        excuses.compare(text, plainly(base, prompt, eagle.config.sampling, ordinal, text))
    excuses.settle()
    return stats


@pytest.mark.parametrize("warm", [{}, WARM], ids=["T0", "T0.9"])
@pytest.mark.parametrize(
    "tree", some([(tree,) for tree in TREES], 0, 7), ids=lambda t: "k{}s{}n{}".format(*t)
)
def test_a_batch_with_a_random_head_equals_plain_decoding(
    base: Path, head: Path, tree: tuple[int, int, int], warm: dict[str, float]
) -> None:
    check(base, Eagle(head, base, EagleConfig(*tree, **warm), dtype="fp32"), prompts_of(8))


@pytest.mark.parametrize("warm", [{}, WARM], ids=["T0", "T0.9"])
@pytest.mark.parametrize("tree", [(1, 6, 7), (2, 5, 14), (4, 4, 24)], ids=lambda t: "k{}s{}n{}".format(*t))
def test_deep_trees_of_a_head_that_knows_much_are_plain_decoding(
    base: Path, tree: tuple[int, int, int], warm: dict[str, float]
) -> None:
    config, prompts = EagleConfig(*tree, **warm), prompts_of(6)
    stats = check(base, Eagle(knowing(base, prompts, config.sampling), load(base), config), prompts)
    assert stats.mean_accept_length > 2
    assert stats.steps < LIMIT / 2
    lengths = [length for one in stats.sequences for length in one.accept_lengths]
    assert stats.trees.total_accepted == sum(lengths)
    assert [len(one.tokens) for one in stats.sequences] == [LIMIT] * 6
    assert all(1 + sum(one.accept_lengths) + len(one.accept_lengths) >= LIMIT for one in stats.sequences)


def test_transformers_own_generate_writes_the_same(base: Path, head: Path) -> None:
    model, prompt = load(base), torch.tensor([prompts_of(1, seed=5)[0]])
    wanted = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    ids, stats = Eagle(head, model).generate(prompt, 40, pad_token_id=0)
    assert ids.tolist() == wanted.tolist()
    assert stats.new_tokens == wanted.shape[1] - prompt.shape[1]


def test_a_batch_is_one_forward_a_step(base: Path) -> None:
    """As many steps as its longest sequence alone takes."""
    prompts, config = prompts_of(5), EagleConfig(1, 4, 5)
    head = knowing(base, prompts, slip=9)
    _, together = Eagle(head, load(base), config).generate(prompts, LIMIT, eos_token_id=NEVER)
    alone = []
    for n, prompt in enumerate(prompts):
        own = KnowingHead({0: head.texts[n]}, SHAPE.hidden, SHAPE.vocabulary, head.slip)
        alone.append(Eagle(own, load(base), config).generate(prompt, LIMIT, eos_token_id=NEVER)[1].steps)
    assert together.steps == max(alone)
    assert len(set(alone)) > 1


def test_a_drafter_that_answers_nothing_does_not_count_as_active() -> None:
    """While the drafter is paused or catches up, stage 0 must not take it for active."""
    engine = SimpleNamespace(begin=lambda: None, finish=tuple, paused_trees=0, awake=False)
    verifier, heard = SimpleNamespace(colocated=SimpleNamespace()), list[int]()
    sequencer = SimpleNamespace(passes_ahead=lambda: 1)
    loop = StepLoop(None, verifier, sequencer, engine)  # type: ignore[arg-type]
    for rest, awake in ((0, False), (3, False), (0, False), (0, True)):
        engine.paused_trees, engine.awake = rest, awake
        heard += [one.paused_trees for one in loop.start_drafts().result((), lambda: None)]
    assert heard == [3, 0]


def test_long_prompts_are_fed_in_segments(base: Path, head: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (300, 7, 280, 256)]
    check(base, Eagle(head, base, EagleConfig(2, 2, 5), dtype="fp32"), prompts)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_limit_is_met_exactly(base: Path, limit: int) -> None:
    prompts = prompts_of(3)
    eagle = Eagle(knowing(base, prompts), load(base), EagleConfig(2, 5, 11))
    ids, stats = eagle.generate(prompts, limit, eos_token_id=NEVER)
    for n, (prompt, whole) in enumerate(zip(prompts, ids)):
        assert tuple(whole[len(prompt) :]) == plainly(base, prompt).tokens[:limit]
        assert stats.sequences[n].end is End.LENGTH


def test_an_end_inside_an_accepted_run_cuts_it(base: Path) -> None:
    prompts = prompts_of(3)
    texts = [plainly(base, prompt).tokens for prompt in prompts]
    eos = texts[0][4]
    eagle = Eagle(knowing(base, prompts, slip=100), load(base), EagleConfig(1, 8, 9))
    ids, stats = eagle.generate(prompts, LIMIT, eos_token_id=eos)
    for prompt, whole, text, one in zip(prompts, ids, texts, stats.sequences):
        wanted = text[: text.index(eos) + 1] if eos in text else text
        assert tuple(whole[len(prompt) :]) == one.tokens == wanted
        assert one.end is (End.STOP if eos in text else End.LENGTH)
    assert stats.sequences[0].end is End.STOP
    _, several = eagle.generate(prompts, LIMIT, eos_token_id=[eos, texts[1][2]])
    assert len(several.sequences[1].tokens) <= 3


def test_the_models_own_end_counts_unless_another_is_given(base: Path, head: Path, tmp_path: Path) -> None:
    (prompt,) = prompts_of(1)
    text = plainly(base, prompt).tokens
    ending = Path(shutil.copytree(base, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text()) | {"eos_token_id": text[9]}
    (ending / "config.json").write_text(json.dumps(config))
    eagle = Eagle(head, ending, dtype="fp32")
    ids, stats = eagle.generate(prompt, LIMIT)
    assert tuple(ids[len(prompt) :]) == text[: text.index(text[9]) + 1]
    assert stats.sequences[0].end is End.STOP
    ids, stats = eagle.generate(prompt, LIMIT, eos_token_id=NEVER)
    assert tuple(ids[len(prompt) :]) == text
    assert stats.sequences[0].end is End.LENGTH


def test_pieces_are_the_text(base: Path) -> None:
    prompts = prompts_of(4)
    eagle = Eagle(knowing(base, prompts), load(base), EagleConfig(2, 4, 9))
    heard: list[Piece] = []
    ids, _ = eagle.generate(prompts, LIMIT, eos_token_id=NEVER, on_piece=heard.append)
    streamed = list(eagle.stream(prompts, LIMIT, eos_token_id=NEVER))
    assert streamed == heard
    for n, (prompt, whole) in enumerate(zip(prompts, ids)):
        mine = [piece for piece in streamed if piece.sequence == n]
        assert [token for piece in mine for token in piece.tokens] == whole[len(prompt) :]
        assert [piece.end for piece in mine] == [None] * (len(mine) - 1) + [End.LENGTH]
        assert 1 < len(mine) < LIMIT


def test_a_stream_may_be_left_and_refuses_at_once(base: Path, head: Path) -> None:
    eagle = Eagle(head, base, dtype="fp32")
    first = next(iter(eagle.stream([5, 6, 7], LIMIT)))
    assert first.tokens == plainly(base, [5, 6, 7]).tokens[:1]
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        eagle.stream([5, 6, 7], 0)


def test_the_seed_alone_decides_whatever_the_tree(base: Path, head: Path) -> None:
    prompts = prompts_of(3)
    wide = Eagle(head, base, EagleConfig(4, 4, 24, **WARM), dtype="fp32")
    slim = Eagle(None, base, EagleConfig(1, 1, 2, **WARM), dtype="fp32")
    ids, stats = wide.generate(prompts, LIMIT, seed=3)
    assert slim.generate(prompts, LIMIT, seed=3)[0] == ids
    assert wide.generate(prompts, LIMIT, seed=4)[0] != ids
    drawn_ids, drawn = wide.generate(prompts, LIMIT)
    assert wide.generate(prompts, LIMIT, seed=drawn.seed)[0] == drawn_ids
    assert stats.seed == 3


def test_samples_of_one_prompt_differ_by_their_number_in_the_batch(base: Path, head: Path) -> None:
    eagle = Eagle(head, base, EagleConfig(**WARM), dtype="fp32")
    ids, _ = eagle.generate([[5, 6, 7]] * 4, LIMIT, seed=7, eos_token_id=NEVER)
    assert len({tuple(one) for one in ids}) == 4
    for ordinal, one in enumerate(ids):
        assert tuple(one[3:]) == plainly(base, [5, 6, 7], eagle.config.sampling, ordinal).tokens


def test_a_padded_tensor_gives_what_its_rows_give(base: Path, head: Path) -> None:
    eagle = Eagle(head, base, dtype="fp32")
    given = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    ids, _ = eagle.generate(given, LIMIT, attention_mask=mask, eos_token_id=NEVER)
    assert ids.shape == (2, 4 + LIMIT)
    assert tuple(ids[0, 4:].tolist()) == plainly(base, [5, 6]).tokens
    assert tuple(ids[1, 4:].tolist()) == plainly(base, [7, 8, 9, 10]).tokens


def test_a_context_is_used_to_its_end_and_not_beyond(base: Path, head: Path) -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(200) for _ in range(SHAPE.positions - LIMIT)]
    check(base, Eagle(head, base, EagleConfig(2, 6, 20), dtype="fp32"), [prompt])
    with pytest.raises(InvalidRequest, match=r"input_ids\[1\] has 492 tokens; 21 more do not fit .* 512"):
        Eagle(head, base, dtype="fp32").generate([[1], prompt], LIMIT + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_writes_plain_decoding_too(base: Path, head: Path) -> None:
    eagle, prompts = Eagle(head, base, EagleConfig(4, 3, 12), dtype="fp32", device="cuda"), prompts_of(8)
    check(base, eagle, prompts)
    given = torch.tensor([prompts[0]], device="cuda")
    ids, _ = eagle.generate(given, LIMIT, eos_token_id=NEVER)
    assert ids.device == given.device
    assert eagle.propose(prompts).tree_mask.is_cuda


def test_a_broken_sequence_fails_alone(tmp_path: Path) -> None:
    """One token's embedding is no number: whoever writes or reads it ends, the others go on."""
    broken = write_base(tmp_path / "base", SHAPE, poison=9)
    eagle = Eagle(write_head(tmp_path / "head", SHAPE), broken, dtype="fp32")
    ids, stats = eagle.generate([[9, 5], [5, 6, 7]], 6, eos_token_id=NEVER)
    alone, _ = eagle.generate([5, 6, 7], 6, eos_token_id=NEVER)
    assert stats.sequences[0].end is End.FAILED
    assert ids[0] == [9, 5]
    assert ids[1] == alone


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(max_new_tokens=2.0), "max_new_tokens"),
        (dict(seed=-1), "seed"),
        (dict(input_ids=[200]), "input_ids"),
    ],
)
def test_what_cannot_be_written_is_refused(
    base: Path, head: Path, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as told:
        Eagle(head, base, dtype="fp32").generate(**{"input_ids": [1, 2]} | change)
    assert told.value.field == field
