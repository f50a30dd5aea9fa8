"""`specsot chat`: a conversation, answer by answer before your eyes.

Refuses to know how a fleet works, how lines are read and how an answer is drawn.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsot.params import Ask
from specsot_app.ask import ask_of
from specsot_app.commands import options
from specsot_app.fleets import Opener, Wanted, models_of, open_fleet

if TYPE_CHECKING:
    from specsot_app.terminal.chat import Conversation
    from specsot_app.terminal.line_input import LineInput
    from specsot_app.terminal.show import Streams

TERMINATED = 143


def chat(
    ctx: typer.Context,
    system_prompt: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    mode: options.AnyMode = "auto",
    drafter: options.Drafter = None,
    max_new_tokens: options.MaxNewTokens = None,
    max_branch_tokens: options.MaxBranchTokens = None,
    max_parallel: options.MaxParallel = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    sinks: options.Sinks = None,
    recent: options.Recent = None,
    keep_ratio: options.KeepRatio = None,
    prune_every: options.PruneEvery = None,
    skip_layers: options.SkipLayers = None,
    head_aware: options.HeadAware = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    constraint: options.Constraint = True,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    draft_format: options.DraftFormat = "safetensors",
    model_format: options.ModelFormat = "safetensors",
    drafter_rope_theta: options.RopeTheta = None,
    aux_layers: options.AuxLayers = None,
    draft_mode: options.DraftShape = None,
    draft_tokens: options.DraftTokens = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_threshold: options.DraftThreshold = None,
    tuner: options.Tuner = "measured",
    blend: options.Blend = True,
    preset: options.AnyPreset = None,
    dtype: options.Numbers = "auto",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    kv_memory: options.KvMemory = None,
    batch_invariant: options.BatchInvariant = False,
    draft_dtype: options.DraftNumbers = None,
    draft_quantization: options.DraftRounding = None,
    device: options.Device = "cpu",
    branch_layout: options.BranchLayout = "batched",
    stages: options.Stages = None,
    layers: options.Layers = None,
    fleet: options.FleetKind = "embedded",
    master: options.Master = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
) -> int:
    """Talk to the model: questions and answers in turn, until Ctrl-D. /help there tells the commands.

    Ctrl-C ends the answer that is being written; between answers it leaves.
    """
    wanted = options.wanted_by(ctx.params)
    if master is None:
        models_of(wanted)  # what cannot be is told before anything is loaded
    asked = options.asked_by(ctx.params) | {"model": model if master else None}
    ask_of("What cannot be asked?", **asked)
    from specsot_app.terminal.chat import Conversation
    from specsot_app.terminal.line_input import input_from
    from specsot_app.terminal.show import Streams, open_with_progress

    streams = Streams(sys.stdout, sys.stderr)
    keyboard, talk = input_from(sys.stdin, sys.stdout), Conversation(mode, system_prompt)
    signal.signal(signal.SIGTERM, leave)
    return converse(wanted, talk, asked, keyboard, streams, open_with_progress(sys.stderr))


def leave(number: int, frame: FrameType | None) -> None:
    """The fleet is closed on the way out."""
    raise SystemExit(TERMINATED)


def converse(
    wanted: Wanted,
    talk: Conversation,
    asked: Mapping[str, Any],
    keyboard: LineInput,
    streams: Streams,
    opener: Opener = open_fleet,
) -> int:
    """Open the fleet, talk, close the fleet."""
    from specsot_app.event_loop import BackgroundLoop
    from specsot_app.terminal.chat import Chat
    from specsot_app.terminal.show import format_for

    def asker(talk: Conversation, question: str) -> Ask:
        return ask_of(talk.with_question(question), **{**asked, "mode": talk.mode})

    background = BackgroundLoop()
    try:
        fleet = background.run(opener(wanted))
        try:
            known = background.run(fleet.info()).models
            positions = known[0].max_positions if known else None
            if sys.stdin.isatty():
                print(
                    f"{known[0].name} · {positions} positions · /help" if known else "/help", file=streams.err
                )
            return Chat(
                background, fleet, asker, keyboard, streams, format_for(streams, False), positions
            ).go_on(talk)
        finally:
            background.run(fleet.close())
    finally:
        background.stop()
