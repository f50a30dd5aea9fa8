"""`specsot verify`: whether base, head and decoding do what they must, as an exit status.

Refuses to know what is compared; specsot_app.verify does, and is imported only when asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsot.errors import InvalidRequest
from specsot.members import WeightFormat
from specsot.params import DrafterName
from specsot_app.fleets import Dtype, Kind, Wanted


def verify(
    prompts: Annotated[
        Path | None, typer.Argument(help="File of prompts, one a line; some of our own if not given.")
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(help="Directory of reference vectors: a head, its base, their record.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model directory; the demo if not given.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Directory of the EAGLE head.")] = None,
    draft_format: Annotated[
        WeightFormat, typer.Option(help="bin: the head's pytorch_model.bin.")
    ] = "safetensors",
    model_format: Annotated[
        WeightFormat, typer.Option(help="bin: the model's pytorch_model.bin.")
    ] = "safetensors",
    drafter_rope_theta: Annotated[
        float | None, typer.Option(help="The head's rotary base, if its config is wrong.")
    ] = None,
    aux_layers: Annotated[
        str | None, typer.Option(help="Layers whose input the head reads, such as 2,16,29.")
    ] = None,
    drafter: Annotated[
        DrafterName | None, typer.Option(help="Who drafts; if not given, a head where there is one.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Numbers to compute with; only fp32 is exact.")] = "fp32",
    device: Annotated[str, typer.Option(help="Torch device of all that runs here.")] = "cpu",
    stages: Annotated[int | None, typer.Option(help="Layer ranges; two if not given.")] = None,
    layers: Annotated[str | None, typer.Option(help="The ranges themselves, such as 0:4,4:8.")] = None,
    fleet: Annotated[Kind, typer.Option(help="In this process, or three kinds of processes.")] = "embedded",
    master: Annotated[
        str | None, typer.Option(help="host:port of a master that serves the same model already.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    near: Annotated[
        float, typer.Option(min=0, help="Logits nearer than this may be decided either way by rounding.")
    ] = 1e-4,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Compare a fleet's answers with Transformers, token for token, and say whether the head fits.

    Exit status 0: all the same, and it fits. With --vectors: compare with what was recorded instead.
    """
    if vectors is not None:
        if prompts is not None:
            raise InvalidRequest("a directory of vectors has its own prompts", field="prompts")
        from specsot_app.verify.vectors import check

        return check(vectors)
    wanted = Wanted(
        kind=fleet,
        master=master,
        model=model,
        draft_model=draft_model,
        draft_format=draft_format,
        model_format=model_format,
        drafter_rope_theta=drafter_rope_theta,
        aux_layers=aux_layers,
        dtype=dtype,
        device=device,
        stages=stages,
        layers=layers,
        drafter=drafter,
    )
    from specsot_app.verify import pair

    return pair.verify(wanted, prompts, max_new_tokens, near, json)
