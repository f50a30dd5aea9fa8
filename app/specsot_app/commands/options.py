"""Options that several words have, each described once, and what becomes of them.

Refuses to know the words. A word lists its options, so that --help has them; here they are picked by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from specsot.drafting import DraftMode, TunerName
from specsot.errors import InvalidRequest
from specsot.members import CommMode, KvDtype, Layout, Quantization, Transport, WeightFormat
from specsot.params import DrafterName, Mode
from specsot_app.ask import OPTIONS
from specsot_app.commands.health import TlsCa as TlsCa
from specsot_app.fleets import Dtype, Kind, Wanted
from specsot_app.presets import Preset, fleet_with, request_with
from specsot_app.reaching import Reach, reach_of

# What a request asks for.
AnyMode = Annotated[Mode, typer.Option(help="auto: the model chooses; sot: a plan; direct: none.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(help="Tokens of everything written: plan, headings, branches.")
]
MaxBranchTokens = Annotated[int | None, typer.Option(help="Tokens of one branch.")]
MaxParallel = Annotated[int | None, typer.Option(help="Branches written at once.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float | None, typer.Option(help="Share of probability to draw from.")]
TopK = Annotated[int | None, typer.Option(help="Tokens to draw from; 0 for all.")]
MinP = Annotated[float | None, typer.Option(help="Least share of the likeliest token's probability.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Divides logits of what stands there already; 1 for none.")
]
PresencePenalty = Annotated[float | None, typer.Option(help="Off the logits of what was written already.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same, for each time it was written.")]
Sinks = Annotated[
    int | None, typer.Option(help="Attend to so many first tokens and what is recent, not to all. [4]")
]
Recent = Annotated[
    int | None, typer.Option(help="Attend to so many tokens before each, and the sinks, not to all. [508]")
]
KeepRatio = Annotated[
    float | None, typer.Option(help="Prune: of its rows every head keeps this share, by key norm. [0.8]")
]
PruneEvery = Annotated[int | None, typer.Option(help="Prune each time so many tokens were written. [64]")]
SkipLayers = Annotated[int | None, typer.Option(help="Prune: so many first layers keep all. [2]")]
HeadAware = Annotated[
    bool | None, typer.Option("--head-aware", help="Every head attends to what was measured for it.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="A text that ends a branch; repeatable.")]
Constraint = Annotated[bool, typer.Option(help="Hold the plan to its grammar.")]

# What a fleet is made of.
Model = Annotated[str | None, typer.Option(help="Model directory; the demo if not given.")]
ModelFormat = Annotated[WeightFormat, typer.Option(help="bin: the model's pytorch_model.bin.")]
Drafter = Annotated[
    DrafterName | None, typer.Option(help="Who drafts; if not given, a head where there is one.")
]
DraftModel = Annotated[str | None, typer.Option(help="Directory of the EAGLE head, or of the small model.")]
DraftFormat = Annotated[WeightFormat, typer.Option(help="bin: the head's pytorch_model.bin.")]
RopeTheta = Annotated[float | None, typer.Option(help="The head's rotary base, if its config is wrong.")]
AuxLayers = Annotated[str | None, typer.Option(help="Layers whose input the head reads, such as 2,16,29.")]
DraftShape = Annotated[DraftMode | None, typer.Option(help="A chain, a tree, or (of a model) a pruned tree.")]
DraftTokens = Annotated[int | None, typer.Option(help="How deep drafts go at most.")]
DraftBreadth = Annotated[int | None, typer.Option(help="Children of every node of a tree.")]
DraftNodes = Annotated[int | None, typer.Option(help="Nodes of a tree at most.")]
DraftThreshold = Annotated[
    float | None, typer.Option(help="Pruned: nothing below nodes less likely than this.")
]
Tuner = Annotated[
    TunerName, typer.Option(help="Who decides how much is drafted; seed and fixed are for comparisons.")
]
Blend = Annotated[bool, typer.Option(help="Let what the text suggests join the drafts.")]
Numbers = Annotated[Dtype, typer.Option(help="Numbers to compute with.")]
Rounding = Annotated[Quantization | None, typer.Option(help="Hold the model's matrices in fewer bits.")]
KvNumbers = Annotated[KvDtype | None, typer.Option(help="int8: KV pages of int8, with a scale a row.")]
KvMemory = Annotated[
    str | None, typer.Option(help="Memory for KV pages of each worker and the drafter, such as 4G.")
]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="On a GPU: the same bits in any company, at a price.")
]
DraftNumbers = Annotated[Dtype | None, typer.Option(help="Of what drafts; if not given, as --dtype.")]
DraftRounding = Annotated[Quantization | None, typer.Option(help="Hold what drafts in fewer bits.")]
AnyPreset = Annotated[
    Preset | None, typer.Option(help="Settings for short answers, long ones, or little memory; others win.")
]
Device = Annotated[str, typer.Option(help="Torch device of all that runs here.")]
BranchLayout = Annotated[Layout, typer.Option(help="How branches lie in a frame.")]
Stages = Annotated[int | None, typer.Option(help="Layer ranges the model is cut into.")]
Layers = Annotated[str | None, typer.Option(help="The ranges themselves, such as 0:4,4:8.")]
BetweenProcesses = Annotated[Transport | None, typer.Option(help="What carries messages between processes.")]
Neighbours = Annotated[
    CommMode | None, typer.Option(help="p2p, or ring: the drafter speaks to the last stage alone.")
]
FleetKind = Annotated[Kind, typer.Option(help="In this process, or three kinds of processes.")]
Master = Annotated[str | None, typer.Option(help="host:port of a master that runs already.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token to show; it may stand in SPECSOT_TOKEN instead.")
]


def place_for(file: Path | None) -> Path | None:
    """Known before anything is measured: that the file can be written, and is none that stands beside it."""
    if file is None:
        return None
    if file.is_dir() or file.suffix in (".md", ".tex", ".png"):
        raise typer.BadParameter(f"{file} is no name for JSON")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written")
    return file


def numbers_of(written: str | None, field: str) -> tuple[int, ...] | None:
    """ "1,2,4" as numbers. Raises InvalidRequest."""
    if written is None:
        return None
    parts = [part.strip() for part in written.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InvalidRequest(f"{field} must be numbers > 0, such as 1,2,4, got {written!r}", field=field)
    return tuple(map(int, parts))


# Of a measurement.
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "--json", "--output-json", callback=place_for, help="Also write the figures to this file."
    ),
]
OwnQuestions = Annotated[Path | None, typer.Option("--prompts", help="Questions of your own, one a line.")]
ReferenceText = Annotated[Path | None, typer.Option(help="Text for perplexity, if not the one it brings.")]

_ELSEWHERE = {"fleet": "kind", "branch_layout": "layout"}  # options that Wanted has other names for
_FIELDS = {field.name for field in fields(Wanted)}


def wanted_by(given: Mapping[str, Any]) -> Wanted:
    """The fleet that a word's options ask for."""
    filled = fleet_with(given.get("preset"), given)
    named = {_ELSEWHERE.get(name, name): value for name, value in filled.items()}
    reach = reach_of(given.get("tls_ca"), given.get("token_file")) if given.get("master") else Reach()
    return Wanted(reach=reach, **{name: value for name, value in named.items() if name in _FIELDS})


def asked_by(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a word's options ask of every request; a list that is empty was not given."""
    filled = request_with(given.get("preset"), given)
    return {name: filled[name] for name in OPTIONS if filled.get(name) not in (None, [], ())}
