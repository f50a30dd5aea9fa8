"""`specsot verify`: whether base, head and decoding do what they must, as an exit status.

Refuses to know what is compared; specsot_app.verify does, and is imported only when asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specsot.errors import InvalidRequest
from specsot_app.commands import options
from specsot_app.fleets import Dtype


def verify(
    ctx: typer.Context,
    prompts: Annotated[
        Path | None, typer.Argument(help="File of prompts, one a line; some of our own if not given.")
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(help="Directory of reference vectors: a head, its base, their record.")
    ] = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    draft_format: options.DraftFormat = "safetensors",
    model_format: options.ModelFormat = "safetensors",
    drafter_rope_theta: options.RopeTheta = None,
    aux_layers: options.AuxLayers = None,
    drafter: options.Drafter = None,
    preset: options.AnyPreset = None,
    dtype: Annotated[Dtype, typer.Option(help="Numbers to compute with; only fp32 is exact.")] = "fp32",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    batch_invariant: options.BatchInvariant = False,
    draft_dtype: options.DraftNumbers = None,
    draft_quantization: options.DraftRounding = None,
    device: options.Device = "cpu",
    stages: Annotated[int | None, typer.Option(help="Layer ranges; two if not given.")] = None,
    layers: options.Layers = None,
    fleet: options.FleetKind = "embedded",
    master: Annotated[
        str | None, typer.Option(help="host:port of a master that serves the same model already.")
    ] = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    near: Annotated[
        float, typer.Option(min=0, help="Logits nearer than this may be decided either way by rounding.")
    ] = 1e-4,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Compare a fleet's answers with Transformers, token for token, and say whether the head fits.

    Exit status 0: all the same, and it fits. A base in fewer bits is compared with itself, read in one pass.
    With --vectors: compare with what was recorded instead.
    """
    if vectors is not None:
        if prompts is not None:
            raise InvalidRequest("a directory of vectors has its own prompts", field="prompts")
        from specsot_app.verify.vectors import check

        return check(vectors)
    wanted = options.wanted_by(ctx.params)
    from specsot_app.terminal.show import open_with_progress
    from specsot_app.verify import pair

    return pair.verify(wanted, prompts, max_new_tokens, near, json, open_with_progress(sys.stderr))
