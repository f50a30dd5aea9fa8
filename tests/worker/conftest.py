"""A model of two layers, for all that only reads it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory):
    import torch

    from specsot.members import Range
    from specsot_model.decoder import Decoder
    from tests.models import write_base

    base = write_base(tmp_path_factory.mktemp("two layers") / "base")
    return Decoder.load(base, Range(0, 2), torch.float32, "cpu")
