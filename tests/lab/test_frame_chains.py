"""Several frames of one sequence in flight, simulated: what they take, and what they cannot bring."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specsot.core.cost_curve import CostCurve
from specsot_app.cli import main
from specsot_lab.bench.chains import HOSTS, compare
from specsot_lab.bench.draft_record import read_record
from specsot_lab.bench.frame_chains import ChainPolicy, DraftedText, DraftTree, RingCosts, write

# Seconds. A step takes 4 whatever its rows, drafting nothing, and hops nothing.
COMPUTING = RingCosts(4, 0.0, CostCurve(((1, 4.0), (2, 4.0))), CostCurve(((1, 0.0), (2, 0.0))))
PLAIN = ChainPolicy(1, 0, 0)


def chain_tree(tokens: list[int]) -> DraftTree:
    """Return a tree that is a chain of these tokens, each of probability 0.9."""
    depths = np.arange(1, len(tokens) + 1)
    return DraftTree(np.array(tokens, np.int32), depths - 1, depths, depths * np.log(0.9))


def text_of(tokens: list[int], levels: int, wrong: Collection[int] = ()) -> DraftedText:
    """Return a text whose drafts are the next tokens, but for positions whose token no draft has."""
    drafts = [-1 if position in wrong else token for position, token in enumerate(tokens)]
    return DraftedText(
        tuple(tokens),
        tuple(chain_tree(drafts[at + 1 : at + 1 + levels]) for at in range(len(tokens) - 1)),
    )


def test_a_single_tree_takes_its_steps_one_after_another() -> None:
    text = text_of(list(range(13)), levels=3)
    costs = RingCosts(4, 0.5, CostCurve(((1, 4.0), (4, 7.0))), CostCurve(((1, 0.25), (4, 0.25))))
    plain = write([text], costs, PLAIN)
    assert (plain.tokens, plain.frames, plain.seconds) == (12, 12, 12 * (4 * 0.5 + 4.0))
    tree = write([text], costs, ChainPolicy(1, 3, 3))
    # Every step writes three drafts and a bonus token; a tree of three levels takes 0.75 s to grow.
    assert (tree.frames, tree.rows) == (3, 12)
    assert tree.seconds == pytest.approx(3 * (2.0 + 7.0 + 0.75))


def test_frames_of_a_chain_fill_the_stages() -> None:
    """Four stages take a second each: with four frames in flight, a token comes every second."""
    text = text_of(list(range(41)), levels=8)
    assert write([text], COMPUTING, PLAIN).seconds == 160
    chain = write([text], COMPUTING, ChainPolicy(4, 1, 8, spread=False))
    assert chain.seconds == 4 + 38, "the first frame tells two tokens, every further one a token"


def test_one_tree_in_several_frames_fills_the_stages_but_waits_for_its_end() -> None:
    """Four stages take a second each: a tree of four nodes in four frames is verified after seven seconds,
    and the next tree begins then.
    """
    text = text_of(list(range(41)), levels=8)
    cut = write([text], COMPUTING, ChainPolicy(4, 1, 4, one_draft=True))
    assert (cut.tokens, cut.frames) == (40, 4 * 8)
    assert cut.seconds == 8 * 7
    chain = write([text], COMPUTING, ChainPolicy(4, 1, 8, spread=False))
    assert chain.seconds < cut.seconds < write([text], COMPUTING, ChainPolicy(1, 1, 1)).seconds


def test_a_wrong_draft_costs_a_round_trip_and_drops_what_is_in_flight() -> None:
    tokens = list(range(41))
    right = write([text_of(tokens, 8)], COMPUTING, ChainPolicy(4, 1, 8, spread=False))
    wrong = write([text_of(tokens, 8, {20})], COMPUTING, ChainPolicy(4, 1, 8, spread=False))
    assert wrong.tokens == right.tokens == 40
    assert 2 <= wrong.seconds - right.seconds <= 4
    assert wrong.frames > right.frames


def random_text(dice: random.Random) -> DraftedText:
    """Return a text over three tokens, with random trees."""
    tokens = [dice.randrange(3) for _ in range(30)]

    def tree() -> DraftTree:
        """Return up to twelve nodes of falling scores, siblings of different tokens."""
        nodes: list[tuple[int, int, int]] = []
        taken = set[tuple[int, int]]()
        for _ in range(24):
            parent, token = dice.randint(0, len(nodes)), dice.randrange(3)
            if (parent, token) not in taken and len(nodes) < 12:
                taken.add((parent, token))
                nodes.append((token, parent, 1 + (nodes[parent - 1][2] if parent else 0)))
        columns = [np.array(column) for column in zip(*nodes)]
        return DraftTree(*columns, -0.1 * np.arange(len(nodes)))

    return DraftedText(tuple(tokens), tuple(tree() for _ in tokens))


@pytest.mark.parametrize("frames", [2, 5])
@pytest.mark.parametrize("root_first", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_a_chain_of_steady_drafts_is_never_faster_than_one_tree_of_all_nodes_for_free(
    frames: int, root_first: bool, spread: bool
) -> None:
    """A child frame sent before any result knows no more than a larger tree would.

    The drafts after a token continue those after the token before, so that no later draft adds a path.
    """
    curves = CostCurve(((1, 1e-9), (2, 1e-9))), CostCurve(((1, 0.0), (2, 0.0)))
    dice = random.Random(frames)
    for number in range(5):
        hops = RingCosts(4, 1.0, *curves, shared_host=number % 2 == 0)
        wrong = {position for position in range(40) if dice.random() < 0.3}
        text = text_of(list(range(40)), 40, wrong)
        one_tree = write([text], hops, ChainPolicy(1, 40, 40))
        chain = write([text], hops, ChainPolicy(frames, 2, 40, root_first, spread))
        assert chain.tokens == one_tree.tokens
        assert chain.seconds >= one_tree.seconds - 1e-6


@pytest.mark.parametrize("frames", [1, 3])
def test_random_drafts_write_the_whole_text_no_slower_than_plainly(frames: int) -> None:
    dice = random.Random(7)
    for _ in range(10):
        text = random_text(dice)
        policy = ChainPolicy(frames, 4, 12, root_first=dice.random() < 0.5, spread=dice.random() < 0.5)
        written = write([text], COMPUTING, policy)
        assert written.tokens == len(text.tokens) - 1
        assert written.seconds <= write([text], COMPUTING, PLAIN).seconds + 1e-9


def test_the_comparison_is_with_the_best_single_tree() -> None:
    """A head that is always right: the deepest tree is the best single one, and has no other nodes."""
    host = HOSTS["smollm2-vnni"]
    costs = RingCosts(4, 0.05, CostCurve(host.step), CostCurve(host.level), host.frame, host.proposal)
    row = compare([text_of(list(range(40)), 12)], costs)
    assert row["tree_shape"] == "12, 15", "of which only the chain of 12 is there"
    assert row["free_tree"] > 1
    assert row["chain"] >= row["two"] > 0
    assert row["cut"] > 0


def test_a_drafter_on_the_host_of_the_last_stage_takes_its_time_from_it() -> None:
    """A stage takes a second, drafting too: together two seconds a frame, apart one."""
    text = text_of(list(range(41)), levels=8)
    level = CostCurve(((1, 0.125), (2, 0.125)))
    shared = RingCosts(4, 0.0, CostCurve(((1, 4.0), (2, 4.0))), level)
    policy = ChainPolicy(8, 1, 8, spread=False)
    together = write([text], shared, policy).seconds
    apart = write([text], replace(shared, shared_host=False), policy).seconds
    assert together / apart == pytest.approx(2, abs=0.2)
    tree = ChainPolicy(1, 8, 8)
    assert write([text], shared, tree) == write([text], replace(shared, shared_host=False), tree)


@pytest.mark.torch
def test_a_record_of_the_small_pair_is_made_once_and_simulated(tmp_path: Path) -> None:
    record, output, prompts = tmp_path / "drafts.npz", tmp_path / "chains.json", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["tides", "and why?"]}) + "\n")
    asked = ["bench", "chains", "--record", str(record), "--rtt", "20", "--json", str(output)]
    assert main([*asked, "--prompts", str(prompts), "--tokens", "12"]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["tree"] > 1, "the small pair's head is often right"
    (text,) = read_record(record)
    assert len(text.tokens) == 12
    assert len(text.trees) == 12
    for tree in text.trees:
        parents = [0.0, *tree.scores.tolist()]
        assert (tree.parents <= np.arange(len(tree.tokens))).all(), "parents come first"
        assert all(score <= parents[parent] for score, parent in zip(tree.scores, tree.parents))
    made = record.stat().st_mtime_ns
    assert main([*asked, "--hosts", "1.5b-h200"]) == 0
    assert record.stat().st_mtime_ns == made
    assert main([*asked, "--hosts", "abacus"]) != 0
