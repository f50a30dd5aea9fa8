"""`specsot bench policies`: the perplexity of texts under each KV policy, and what every head attends to."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specsot.checkpoint.config import HEADS_FILE, ModelConfig, read_heads, read_importance, write_heads
from specsot.checkpoint.resolving import folder_of_model
from specsot.errors import InvalidRequest
from specsot.params import HeadCounts, HeadImportance, HeadPruning, HeadWindows, Pruning, Window
from specsot.service.options import ModelOptions
from specsot_bench.asking import counting_bar
from specsot_bench.core.methods import window_of
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.perplexity import Policy, losses
from specsot_bench.reference_model import load_decoder
from specsot_bench.results import Row, named, publish
from specsot_bench.rounds import read_reference
from specsot_master.text import Text
from specsot_model.attention import AttentionPlan
from specsot_model.decoder import Decoder

# Options of the model's precision that are reported as settings.
NUMBERS = ("dtype", "quantization", "kv_cache_dtype")
# Tokens that attention sees, sinks included, in the rows of windows.
WINDOWS = (256, 512, 1024)
# Further policies that are compared, by the names of their rows.
OTHERS: tuple[tuple[str, Policy], ...] = (
    ("recent 512", Window(0, 512)),
    ("L2 norm, 0.8 every 64", Pruning(0.8, 64, 0)),
    ("L2 norm, 0.8 every 64, 2 layers whole", Pruning(0.8, 64, 2)),
    ("L2 norm, 0.8 every 256, 2 layers whole", Pruning(0.8, 256, 2)),
)


def policies(
    windows: Sequence[int], heads: HeadWindows | None, importance: HeadImportance | None
) -> list[tuple[str, Policy]]:
    """Return the name and the policy of every row that is compared. The first row is "full", with None for no
    policy.

    windows: Tokens that attention sees, sinks included, a row each.
    heads: The windows that were measured for the model's heads; None if they were not.
    importance: The importance that was measured for the model's heads; None if it was not.

    The rows are in this order: "full", one for each window, those of OTHERS, "head-aware windows" if `heads`
    is given, and a pruning by each head's importance if `importance` is given.
    """
    found: list[tuple[str, Policy]] = [("full", None)]
    found += [(f"sinks + window {tokens}", window_of(tokens)) for tokens in windows]
    found += OTHERS
    if heads is not None:
        found.append(("head-aware windows", heads))
    if importance is not None:
        pruning = HeadPruning(1.0, 64, 0, importance.layers)
        found.append(("L2 norm, 0.5 + 0.5 importance of each head, every 64", pruning))
    return found


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """A text that is read in pieces, and the model that reads it.

    weights: The model, its precision and its device.
    text: File of the text; None: the one that `specsot bench quick` reads.
    length: Tokens of each piece.
    pieces: Maximum number of pieces that are read, from the beginning.
    """

    weights: ModelOptions
    text: Path | None
    length: int
    pieces: int

    @property
    def settings(self) -> Row:
        """Return the settings of the reading, by name."""
        numbers = {name: getattr(self.weights, name) for name in ("base", *NUMBERS, "device")}
        return numbers | {"text": self.text, "length": self.length, "pieces": self.pieces}

    def load(self) -> tuple[Decoder, list[tuple[int, ...]]]:
        """Return the model, and the pieces of the text as token ids, at least one.

        Raises ModelError if the model cannot be loaded, and InvalidRequest for a length that the model does
        not support, or for a text that is shorter than one piece.

        A length must be above SKIPPED and at most the model's maximum number of positions. Tokens after the
        last whole piece, and pieces after the first `pieces`, are left out.
        """
        decoder = load_decoder(self.weights)
        most = decoder.config.max_positions
        if not SKIPPED < self.length <= most:
            raise InvalidRequest(f"length must be in ({SKIPPED}, {most}], got {self.length}", "length")
        tokens = Text(self.weights.base).encode_prompt(read_reference(self.text))
        whole = range(0, len(tokens) - self.length + 1, self.length)
        if not whole:
            raise InvalidRequest(f"the text has {len(tokens)} tokens, a piece {self.length}", "text")
        return decoder, [tuple(tokens[at : at + self.length]) for at in whole[: self.pieces]]


def measure(readings: Sequence[ReadingOptions], output: Path | None, windows: Sequence[int] = WINDOWS) -> int:
    """Measure all policies, and publish a table for each length of pieces. Return the exit status 0.

    readings: The text and the model, once for each length of pieces; at least one.
    output: The JSON file; None: the tables are only printed.
    windows: Tokens that attention sees, sinks included, a row each.

    The windows and importance of heads are read from the model's directory; their rows are left out if the
    model has none. If no windows are found, a line says how to measure them. With several lengths, the length
    is part of each row's name in the JSON file. Raises what `ReadingOptions.load` raises.
    """
    rows = list[Row]()
    pages = list[str]()
    heads = None
    folder = folder_of_model(readings[0].weights.base)
    for reading in readings:
        decoder, pieces = reading.load()
        heads = read_heads(folder, decoder.config)
        importance = read_importance(folder, decoder.config)
        kept = policies(windows, heads, importance)
        found = [{**row, "length": reading.length} for row in _rows(decoder, pieces, kept)]
        pages.append(page_of(found, len(pieces), reading.length))
        rows += named(found, "name", "length") if len(readings) > 1 else found
    settings = {**readings[0].settings, "length": [reading.length for reading in readings]}
    publish("policies", settings, rows, "\n\n".join(pages), output)
    if heads is None:
        print("head-aware: nothing was measured of this model's heads (--find-heads does)")
    return 0


def _rows(
    decoder: Decoder, pieces: Sequence[tuple[int, ...]], kept: Sequence[tuple[str, Policy]]
) -> Iterator[Row]:
    """Yield a row for each policy: the perplexity of all pieces, and the number of rows that the last token
    of a piece attends to.

    decoder: The model.
    pieces: Token ids of each piece, all equally long.
    kept: The name and the policy of each row.

    A row has the entries "name", "perplexity" (exp of the mean loss) and "rows" (a mean over layers and
    heads). A progress bar on stderr advances after each row.
    """
    with counting_bar(sys.stderr, "policies", len(kept)) as count:
        for name, policy in kept:
            found = [loss for tokens in pieces for loss in losses(decoder, tokens, policy)]
            yield {
                "name": name,
                "perplexity": math.exp(sum(found) / len(found)),
                "rows": rows_seen(decoder.config, len(pieces[0]), policy),
            }
            count()


def page_of(rows: Sequence[Row], pieces: int, length: int) -> str:
    """Return the table in Markdown.

    rows: The rows, of which the first one is "full". Their figure "rows" is the number of rows that the last
        token of a piece attends to, the mean over layers and heads.
    pieces: Number of pieces.
    length: Tokens of each piece.

    The last column compares each perplexity with that of "full", as a signed percentage. A line below the
    table says how many pieces of how many tokens were read.
    """
    full = rows[0]["perplexity"]
    columns = (
        text("policy", "name"),
        figure("rows", "rows", 0),
        figure("perplexity", "perplexity", 3),
        Column("against full", lambda row: f"{row['perplexity'] / full - 1:+.1%}"),
    )
    return f"{markdown(columns, rows)}\n\n{pieces} pieces of {length} tokens"


def find_heads(reading: ReadingOptions, gathering: int | None) -> int:
    """Measure what the model's heads attend to, write into the model's directory what each head should keep,
    and print it. Return the exit status 0.

    reading: The text and the model.
    gathering: Number of recent tokens that heads keep which attend everywhere; None: all.

    An existing file is replaced. Each row of the printed table is one KV head of one layer. Raises what
    `ReadingOptions.load` raises.
    """
    decoder, pieces = reading.load()
    looks = measure_heads(decoder, pieces)
    config = decoder.config
    file = folder_of_model(reading.weights.base) / HEADS_FILE
    layers = [keep_by_head(layer, config.kv_heads, gathering) for layer in looks]
    write_heads(file, layers, {"pieces": len(pieces), "length": reading.length})
    rows = [{"layer": layer, "head": number, **head} for layer, heads in enumerate(layers)
            for number, head in enumerate(heads)]  # fmt: skip
    print(markdown(HEAD_COLUMNS, rows))
    print(f"written to {file}")
    return 0


# The columns of the table of heads.
HEAD_COLUMNS = (
    text("layer", "layer"),
    text("KV head", "head"),
    Column("its query heads", lambda row: ", ".join(row["classes"]), text=True),
    figure("sinks", "sinks", 0),
    Column("recent", lambda row: "all" if row["recent"] is None else str(row["recent"])),
    figure("importance", "importance"),
)

# Tokens. The first tokens of a sequence, which count as sinks. Untuned.
SINKS = 4
# Tokens. The newest tokens, which count as local. Untuned.
LOCAL = 8
# Rows. The first rows of a piece, which have too few tokens to attend to and are not counted. Untuned.
SKIPPED = 64
# Rows of a KV page.
PAGE_ROWS = 256
# By class of a head: the number of sinks and of recent tokens that it keeps.
KEEPS = {
    "mixed": (4, 64),
    "sink_mixed": (4, 24),
    "sink_positional": (4, 8),
    "positional": (0, 8),
    "dead": (4, 0),
}


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """The means of one query head over all rows.

    sink: The fraction of its attention on the first SINKS tokens.
    local: The fraction of its other attention on the newest LOCAL tokens.
    entropy: The entropy of its attention, in nats.
    even: This entropy divided by that of a head that attends to all tokens equally.
    """

    sink: float
    local: float
    entropy: float
    even: float

    @property
    def importance(self) -> float:
        """The fraction of the head's attention that goes neither to sinks nor to the newest tokens. Pruning
        may evict the rows in between, so a head that attends to them much keeps more of them.
        """
        return (1 - self.sink) * (1 - self.local)

    @property
    def kind(self) -> str:
        """The class of the head: the first one that fits, "mixed" if no other does.

        "dead" if the attention is nearly even (even > 0.9); else "gathering" if the entropy is above 3 nats;
        else, with more than 0.3 on the sinks, "sink_positional" if more than 0.6 of the other attention is
        local, "sink_mixed" if not; else "positional" if more than 0.6 is local; else "mixed".
        """
        if self.even > 0.9:
            return "dead"
        if self.entropy > 3:
            return "gathering"
        if self.sink > 0.3:
            return "sink_positional" if self.local > 0.6 else "sink_mixed"
        return "positional" if self.local > 0.6 else "mixed"


def measure_heads(decoder: Decoder, texts: Iterable[Sequence[int]]) -> list[list[HeadAttention]]:
    """Return what each query head attends to, by layer; [] without texts.

    decoder: The model.
    texts: Token ids of each text, which is read in one pass: longer than SKIPPED, and no longer than the
        model's context.

    The first SKIPPED rows of each text are not counted; the values are means over all other rows of all
    texts.
    """
    sums: list[Tensor] | None = None
    rows = 0
    for tokens in texts:
        found = _sums(decoder, tokens)
        sums = found if sums is None else [a + b for a, b in zip(sums, found)]
        rows += len(tokens) - SKIPPED
    return [[HeadAttention(*head) for head in (layer / rows).tolist()] for layer in sums or ()]


def keep_by_head(
    looks: Sequence[HeadAttention], kv_heads: int, gathering: int | None
) -> list[dict[str, Any]]:
    """Return what each KV head of a layer should keep, in the form that `write_heads` gets, with the classes
    of its query heads and the largest importance among them.

    looks: What each query head of the layer attends to. Query heads of one KV head follow each other.
    kv_heads: Number of KV heads; it divides the number of query heads.
    gathering: Number of recent tokens that heads of the class "gathering" keep in addition to the sinks;
        None: all.

    Each entry has the keys "classes", "importance" (0..1), "sinks" and "recent"; "recent" is None if the head
    keeps all tokens.
    """
    size = len(looks) // kv_heads
    groups = [looks[at : at + size] for at in range(0, len(looks), size)]
    return [_kept_of(group, gathering) for group in groups]


def _kept_of(group: Sequence[HeadAttention], gathering: int | None) -> dict[str, Any]:
    """Return what one KV head should keep, the classes of its query heads, and the largest importance among
    them.

    group: What each query head of the KV head attends to.
    gathering: Number of recent tokens that heads of the class "gathering" keep; None: all.

    The keys are "classes", "importance" (limited to 0..1 and rounded to 4 digits), "sinks" and "recent";
    "recent" is None if all tokens are kept.
    """
    classes = [one.kind for one in group]
    importance = min(max(max(one.importance for one in group), 0.0), 1.0)  # sums of bf16 may miss by a bit
    return {"classes": classes, "importance": round(importance, 4)} | _keep(classes, gathering)


def _keep(kinds: Sequence[str], gathering: int | None) -> dict[str, Any]:
    """Return the number of sinks and of recent tokens that a KV head should keep: the most that one of its
    query heads needs. "recent" is None if all tokens should be kept.

    kinds: The classes of its query heads, at least one.
    gathering: Number of recent tokens that heads of the class "gathering" keep; None: all.

    If `gathering` is None and one query head is of the class "gathering", the result is 0 sinks and "recent"
    None. A "gathering" head with a number keeps SINKS sinks and that many recent tokens.
    """
    if gathering is None and "gathering" in kinds:
        return {"sinks": 0, "recent": None}
    kept = [KEEPS.get(kind, (SINKS, gathering or 0)) for kind in kinds]
    return {"sinks": max(sinks for sinks, _ in kept), "recent": max(recent for _, recent in kept)}


def _sums(decoder: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """Return for each layer what `HeadAttention` has, summed over the rows of a text, [query_heads, 4].

    decoder: The model.
    tokens: Token ids of the text.

    The columns are those of `HeadAttention` in its order: sink, local, entropy, even. The first SKIPPED rows
    are left out. The whole text is read in one forward pass.
    """
    sums: list[Tensor] = []
    positions = torch.arange(len(tokens), device=decoder.device)
    kv = decoder.make_kv(-(-len(tokens) // PAGE_ROWS), PAGE_ROWS)
    plan = AttentionPlan((), (), None, None, partial(_attend, sums=sums))
    entry = decoder.embed(torch.tensor(tokens, device=decoder.device))
    decoder.forward(entry, positions, positions, plan, kv)
    return sums


def _attend(q: Tensor, layer: Tensor, sums: list[Tensor]) -> Tensor:
    """Return the attention of all rows over their text, [rows, heads * head_dim], and append to `sums` what
    they attended to.

    q: Queries, [rows, kv_heads, query heads of each, head_dim].
    layer: Keys and values of one layer, in pages.
    sums: Gets one tensor [query_heads, 4].

    Attention is causal over the rows of this text alone, which are the first rows of the layer's pages. The
    queries must be scaled already. Only the rows from SKIPPED on enter `sums`.
    """
    count = len(q)
    keys, values = layer.transpose(2, 3).flatten(1, 2)[:, :count]  # [rows, kv_heads, head_dim]
    scores = torch.einsum("rhgd,chd->hgrc", q, keys).float()
    later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill_(later, -math.inf).softmax(-1)
    sums.append(_look(weights.flatten(0, 1)[:, SKIPPED:]))
    return torch.einsum("hgrc,chd->rhgd", weights.to(q.dtype), values).flatten(1)


def _look(weights: Tensor) -> Tensor:
    """Return what `HeadAttention` has, summed over rows, [heads, 4].

    weights: Attention weights of the rows from SKIPPED on, [heads, rows, columns].

    The columns are sink, local, entropy and even, in fp64 on the CPU. "Local" leaves out the sinks, and is
    divided by the attention that does not go to sinks (at least 1e-6).
    """
    rows = torch.arange(SKIPPED, SKIPPED + weights.shape[1], device=weights.device)[:, None]
    columns = torch.arange(weights.shape[2], device=weights.device)[None]
    sink = weights[..., :SINKS].sum(-1)
    local = weights.masked_fill((columns <= rows - LOCAL) | (columns < SINKS), 0).sum(-1)
    entropy = torch.special.entr(weights).sum(-1)
    parts = sink, local / (1 - sink).clamp_min(1e-6), entropy, entropy / (rows[:, 0] + 1).log()
    return torch.stack([part.double().sum(-1) for part in parts], -1).cpu()


def rows_seen(config: ModelConfig, length: int, policy: Policy) -> float:
    """Return the number of rows that the last token of a sequence attends to, its own included, as the mean
    over layers and heads.

    config: The model.
    length: Tokens of the sequence.
    policy: The policy; None: nothing is evicted, so that the token attends to all `length` rows.

    A window gives sinks + recent + 1, at most `length`. A pruning gives what its last eviction left plus the
    rows since; layers that it skips count with all `length` rows. `HeadWindows` gives the mean over its
    heads.
    """
    match policy:
        case Window(sinks, recent):
            return min(sinks + recent + 1, length)
        case HeadPruning():
            return _rows_seen_by_head(config, length, policy)
        case Pruning():
            left = 0
            for _ in range(0, length - policy.prune_every, policy.prune_every):
                left = policy.num_kept_rows(left + policy.prune_every)
            seen = left + (length - 1) % policy.prune_every + 1
            skip = min(policy.skip_layers, config.layers)
            return (skip * length + (config.layers - skip) * seen) / config.layers
        case HeadWindows(layers):
            seen = [min(sinks + recent + 1, length) for heads in layers for sinks, recent in heads]
            return sum(seen) / len(seen)
        case None:
            return length


def _rows_seen_by_head(config: ModelConfig, length: int, policy: HeadPruning) -> float:
    """Return what `rows_seen` returns if every head keeps a fraction of its own.

    config: The model.
    length: Tokens of the sequence.
    policy: The pruning of each head.

    The result is the mean over layers and KV heads of the rows that the last token attends to: what the last
    eviction left to each head plus the rows since. Skipped layers count with all `length` rows.
    """
    every = policy.prune_every
    skip = min(policy.skip_layers, config.layers)
    kept: HeadCounts = policy.no_rows_kept
    for _ in range(0, length - every, every):
        kept = policy.rows_kept_by_head(kept, every)
    fresh = (length - 1) % every + 1
    seen = [rows + fresh for heads in kept[skip:] for rows in heads] + [length] * (skip * config.kv_heads)
    return sum(seen) / len(seen)
