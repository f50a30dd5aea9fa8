"""`specsot verify`: whether base, head and decoding do what they must, as an exit status.

Refuses to know what is compared; specsot_app.verify does, and is imported only when asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsot.errors import InvalidRequest


def verify(
    vectors: Annotated[
        Path | None, typer.Option(help="Directory of reference vectors: a head, its base, their record.")
    ] = None,
) -> int:
    """Compare with what was recorded, one line per check; 0 only if all hold."""
    if vectors is None:
        raise InvalidRequest("nothing to verify: give --vectors DIR", field="vectors")
    from specsot_app.verify.vectors import check

    return check(vectors)
