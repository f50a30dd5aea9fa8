"""Chains are counted as verification accepts them; rows keep, split and come in order."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from specsot.errors import ModelError
from specsot_lab.train import rows as stock
from specsot_lab.train.trainer import chain_acceptance


def test_a_chain_ends_with_its_first_miss_and_the_next_begins_after_the_bonus_token() -> None:
    hits = np.zeros((10, 3), np.bool_)
    learned = np.zeros(10, np.bool_)
    learned[2:] = True  # the root is token 2, drafted from row 1
    hits[1] = True, True, False  # tokens 3 and 4 accepted, 5 is the bonus: root 5
    hits[4] = True, True, True  # 6, 7, 8 accepted, 9 is the bonus: root 9, the end
    found = chain_acceptance(hits, learned, 3)
    assert (found.tested, found.accepted, found.steps) == ((2, 2, 2), (2, 2, 1), 2)
    assert found.per_step == pytest.approx(5 / 6)
    assert found.tokens_per_step == 3.5


def test_an_answer_of_one_token_drafts_nothing() -> None:
    assert chain_acceptance(np.ones((3, 2), np.bool_), np.array([False, False, True]), 2).steps == 0


def made(lengths: list[int]) -> list[stock.Row]:
    return [
        stock.row_of((((1,) * 2, False), (range(size), True)), place // 2)
        for place, size in enumerate(lengths)
    ]


def test_rows_come_back_as_they_were_kept(tmp_path: Path) -> None:
    rows = made([3, 70, 5])
    stock.save(rows, tmp_path / "rows.npz")
    for row, back in zip(rows, stock.load(tmp_path / "rows.npz"), strict=True):
        assert row.group == back.group
        assert row.tokens.tolist() == back.tokens.tolist()
        assert row.learned.tolist() == back.learned.tolist()


def test_rows_are_replaced_whole(tmp_path: Path) -> None:
    stock.save(made([3]), tmp_path / "rows.npz")
    before = (tmp_path / "rows.npz").read_bytes()
    with (tmp_path / "rows.npz").open("rb") as old:
        stock.save(made([70, 5]), tmp_path / "rows.npz")
        assert old.read() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npz"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "array"])
def test_a_damaged_or_foreign_file_is_refused(damage: str, tmp_path: Path) -> None:
    path, array = tmp_path / "rows.npz", io.BytesIO()
    stock.save(made([3, 70, 5]), path)
    np.save(array, np.zeros(3))
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[:-30],
            "flipped": bytes(255 - byte if 100 < place < 140 else byte for place, byte in enumerate(whole)),
            "empty": b"",
            "text": b"What is a photon?\n",
            "array": array.getvalue(),
        }[damage]
    )
    with pytest.raises(ModelError, match="no whole file of rows"):
        stock.load(path)


def test_no_question_is_both_learned_and_measured() -> None:
    learnt, measured = stock.split(made([4] * 20), 0.3, 0)
    assert len(measured) == 6
    assert not {row.group for row in learnt} & {row.group for row in measured}


def test_an_epoch_has_every_row_once_and_no_batch_too_large() -> None:
    rows = made(np.random.default_rng(0).integers(2, 200, 50).tolist())
    order = stock.batches(rows, 512, 1, 0)
    assert sorted(number for batch in order for number in batch) == list(range(50))
    assert all(stock.pad([rows[number] for number in batch])[0].size <= 512 for batch in order)
    assert order == stock.batches(rows, 512, 1, 0) != stock.batches(rows, 512, 1, 1)


def test_the_draft_vocabulary_is_what_occurs_most() -> None:
    assert stock.most_frequent(np.array([5, 0, 7, 5, 9]), 3).tolist() == [0, 2, 4]
