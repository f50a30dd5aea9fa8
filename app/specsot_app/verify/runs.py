"""Whole generations against recorded ones: trees, accepted lengths, ids; replays of sampled rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specsot.core.sampling import Floats, leaf_rows, residual_walk, trial_rows, warp
from specsot.core.tree import Tree, accept, children, depths
from specsot.errors import ModelError
from specsot.model.decoder import Decoder
from specsot_app.verify.compare import (
    CHANCE_TOLERANCE,
    SCORE_TIE,
    Check,
    check_close,
    check_same,
    check_tree,
    likeliest,
)
from specsot_app.verify.laps import Accepted, DrivenLaps
from specsot_app.verify.record import ReferenceCase, RoundRecord, RunRecord, SamplingRecord, TreeRecord
from specsot_drafter.heads.eagle import EagleHead


@dataclass(slots=True)
class GreedyRun:
    """What we did behind one prompt, by round; written: all accepted roots and drafts."""

    committed: list[int] = field(default_factory=list[int])
    trees: list[Tree] = field(default_factory=list[Tree])
    paths: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    bonus: list[int] = field(default_factory=list[int])
    written: list[int] = field(default_factory=list[int])

    def note(self, committed: int, tree: Tree, accepted: Accepted) -> None:
        self.committed.append(committed)
        self.trees.append(tree)
        self.paths.append(accepted.nodes)
        self.bonus.append(accepted.bonus)
        self.written += (tree.tokens[node] for node in accepted.nodes)


def check_runs(case: ReferenceCase, base: Decoder, head: EagleHead) -> Iterator[Check]:
    """Every setting, all prompts side by side."""
    for setting in case.shapes:
        records = {i: prompt.runs[setting] for i, prompt in enumerate(case.prompts) if setting in prompt.runs}
        runs = generate(case, base, head, setting, {i: len(one.lengths) for i, one in records.items()})
        for i, record in records.items():
            yield from _check_run(f"p{i} {setting}", runs[i], record)


def generate(
    case: ReferenceCase, base: Decoder, head: EagleHead, setting: str, rounds: dict[int, int]
) -> dict[int, GreedyRun]:
    """Greedy generation behind these prompts, so many rounds each."""
    prompts = {i: case.prompts[i].tokens for i in rounds}
    shape = case.shapes[setting]
    most = max(rounds.values(), default=0) * (shape.depth + 2)
    laps = DrivenLaps(base, head, shape, [len(tokens) for tokens in prompts.values()], most)
    begin(laps, prompts)
    runs = {i: GreedyRun() for i in rounds}
    for lap in range(max(rounds.values(), default=0)):
        for i, (tree, verdict) in take_lap(laps, [i for i in rounds if lap < rounds[i]]).items():
            runs[i].note(len(prompts[i]) + len(runs[i].written), tree, verdict)
    return runs


def begin(laps: DrivenLaps, prompts: Mapping[int, Sequence[int]]) -> None:
    """Feed prompts, and take the likeliest token behind each."""
    logits = laps.prefill(prompts)
    laps.accept({i: Accepted((0,), likeliest(row.view(1, -1))[0]) for i, row in logits.items()})


def take_lap(laps: DrivenLaps, going: Iterable[int]) -> dict[int, tuple[Tree, Accepted]]:
    """One greedy lap of these texts: the tree of each, and what of it was accepted."""
    trees = {i: laps.trees[i] for i in going}
    verdicts = {i: judge(trees[i], likeliest(rows)) for i, rows in laps.verify(trees).items()}
    laps.accept(verdicts)
    return {i: (trees[i], verdict) for i, verdict in verdicts.items()}


def judge(tree: Tree, targets: Sequence[int]) -> Accepted:
    """The one rule of acceptance, and the token behind the last accepted node."""
    nodes = accept(tree, targets)
    return Accepted(nodes, targets[nodes[-1]])


def _check_run(name: str, run: GreedyRun, record: RunRecord) -> Iterator[Check]:
    for number, (tree, committed, wanted) in enumerate(zip(run.trees, run.committed, record.trees), start=1):
        yield from _check_tree(f"{name} tree {number}", tree, committed, wanted, leaf_rows(tree))
    lengths = [len(nodes) - 1 for nodes in run.paths]
    yield check_same(f"{name} accept_lengths", lengths, record.lengths)
    yield check_same(f"{name} generated_ids", run.written, record.generated)
    if record.bonus is not None:
        yield check_same(f"{name} bonus_tokens", run.bonus, record.bonus)
    if record.best is not None:
        best = [_best_row(leaf_rows(tree), nodes) for tree, nodes in zip(run.trees, run.paths)]
        yield _check_best(f"{name} best_candidate", best, record, record.best)
    if record.tau is not None:
        mean = sum(len(nodes) for nodes in run.paths) / max(len(run.paths), 1)
        yield check_close(f"{name} tau", torch.tensor(mean), torch.tensor(record.tau))


def _check_tree(
    name: str, tree: Tree, committed: int, wanted: TreeRecord, rows: Sequence[tuple[int, ...]]
) -> Iterator[Check]:
    """The tree, and what follows from it and from where it stands."""
    yield check_tree(name, tree, wanted.tree, wanted.gap)
    if wanted.committed is not None:
        yield check_same(f"{name} committed_len", [committed], [wanted.committed])
    if tree != wanted.tree:
        return  # node numbers mean something else
    deep = depths(tree.parents)
    if wanted.depths is not None:
        yield check_same(f"{name} depth", deep, wanted.depths)
    if wanted.positions is not None:
        yield check_same(f"{name} position_ids", [committed + depth for depth in deep], wanted.positions)
    if wanted.rows is not None:
        yield check_same(f"{name} retrieve_indices", rows, wanted.rows)


def _check_best(name: str, ours: Sequence[int], record: RunRecord, recorded: Sequence[int]) -> Check:
    """The row of the accepted path among a tree's leaves, which changes with any leaf before it.

    In rounds whose tree was not recorded, the last node may have been chosen between two that nearly tie:
    one such row may differ.
    """
    firm = _firm(record)
    exact = check_same(name, ours[:firm], recorded[:firm])
    loose = len(recorded) if record.rank_gap >= SCORE_TIE else firm
    apart = [r for r in range(firm, min(loose, len(ours))) if ours[r] != recorded[r]]
    if exact.difference is not None or len(ours) != len(recorded) or len(apart) > 1:
        return check_same(name, ours[:loose], recorded[:loose])
    if not apart:
        return exact
    told = f"round {apart[0] + 1}: ours {ours[apart[0]]}, recorded {recorded[apart[0]]}"
    return Check(name, note=f"{told}; its tree, and how near its last node's score was, are not recorded")


def _firm(record: RunRecord) -> int:
    """In how many first rounds the reference's trees are beyond doubt."""
    if min(record.rank_gap, record.cut_gap) >= SCORE_TIE:
        return len(record.lengths)
    firm = 0
    while firm < len(record.trees) and (record.trees[firm].gap or 0.0) >= SCORE_TIE:
        firm += 1
    return firm


def _best_row(rows: Sequence[tuple[int, ...]], nodes: tuple[int, ...]) -> int:
    """The first row that begins with the accepted path; the first of all where nothing is accepted."""
    return next(i for i, row in enumerate(rows) if row[: len(nodes)] == nodes) if len(nodes) > 1 else 0


def check_replays(case: ReferenceCase, base: Decoder, head: EagleHead) -> Iterator[Check]:
    """Sampled generations, led along what the reference drew."""
    for j, record in enumerate(case.sampling):
        if not 0 <= record.prompt < len(case.prompts) or record.setting not in case.shapes:
            raise ModelError(f"{case.directory}: sampling[{j}] names no prompt or setting of this record")
        yield from _replay(case, base, head, j, record)


def _replay(
    case: ReferenceCase, base: Decoder, head: EagleHead, j: int, record: SamplingRecord
) -> Iterator[Check]:
    if not record.rounds:
        return
    prompt, shape = case.prompts[record.prompt].tokens, case.shapes[record.setting]
    laps = DrivenLaps(base, head, shape, [len(prompt)], len(record.rounds) * (shape.depth + 2))
    laps.prefill({j: prompt})
    laps.accept({j: Accepted((0,), record.rounds[0].tree.tree.tokens[0])})
    committed = len(prompt)
    for r, wanted in enumerate(record.rounds):
        name, ours = f"s{j} round {r + 1}", laps.trees[j]
        yield from _check_tree(f"{name} tree", ours, committed, wanted.tree, trial_rows(ours))
        recorded = case.tensor(f"s{j}.r{r}.node_logits")
        yield check_close(f"{name} node_logits", laps.verify({j: wanted.tree.tree})[j], recorded)
        chances = warp(recorded.numpy(), record.temperature, record.top_p, record.top_k)
        yield from _check_walk(name, wanted, chances, case.tensor(f"s{j}.r{r}.sample_p"))
        nodes = _nodes_of(wanted, f"{case.directory}: sampling[{j}].rounds[{r}]")
        laps.accept({j: Accepted(nodes, wanted.bonus)})
        committed += len(nodes)
    if record.lengths:
        lengths = [wanted.accepted for wanted in record.rounds]
        yield check_same(f"s{j} accept_lengths", lengths, record.lengths[: len(lengths)])


def _check_walk(name: str, wanted: RoundRecord, chances: Floats, left: Tensor) -> Iterator[Check]:
    """The residual walk over the recorded logits and uniforms. left: the recorded final distribution."""
    tree = wanted.tree.tree
    rows = trial_rows(tree)
    try:
        walk = residual_walk(tree, rows, chances, wanted.uniforms)
    except ValueError as error:
        yield Check(f"{name} walk", str(error))
        return
    path = [tree.tokens[node] for node in walk.accepted]
    yield check_same(f"{name} accept_length", [len(path) - 1], [wanted.accepted])
    yield check_same(f"{name} accepted_path_tokens", path, wanted.path)
    yield check_same(f"{name} uniforms used", [walk.drawn], [len(wanted.uniforms)])
    if wanted.best is not None:
        yield check_same(f"{name} best_candidate", [_best_row(rows, walk.accepted)], [wanted.best])
    yield check_close(f"{name} sample_p", torch.from_numpy(walk.final), left, CHANCE_TOLERANCE)
    possible = 0 <= wanted.bonus < len(walk.final) and walk.final[wanted.bonus] > 0
    yield Check(f"{name} bonus_token", None if possible else f"{wanted.bonus} has no chance of being drawn")


def _nodes_of(wanted: RoundRecord, where: str) -> tuple[int, ...]:
    """The recorded path as node numbers."""
    tree, nodes = wanted.tree.tree, [0]
    below = children(tree.parents)
    for token in wanted.path[1:]:
        found = next((node for node in below[nodes[-1]] if tree.tokens[node] == token), None)
        if found is None:
            raise ModelError(f"{where}: accepted_path_tokens is no path of its tree")
        nodes.append(found)
    return tuple(nodes)
