"""`specsot demo fetch`: SmolLM2 into the cache, or into a folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from specsot.checkpoint.cache import cache_folder
from specsot.service.command import Example, command
from specsot.service.option_table import option
from specsot_app.fleet import demo as files


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Options of `specsot demo`.

    what: The action; "fetch" is the only one.
    dir: Folder to put the model into; None: the cache.
    """

    HEADING: ClassVar[str] = "Arguments"

    what: Literal["fetch"] = option("fetch", "What to do: fetch.", positional=True)
    dir: Path | None = option(None, "Folder to put the model into.", metavar="DIR", unset="the cache")


EXAMPLES = (
    Example("specsot demo fetch", "Before going offline"),
    Example("specsot demo fetch --dir models/smollm2", "Into a folder, for --model"),
)


@command(FetchOptions, examples=EXAMPLES)
def demo(options: FetchOptions) -> int:
    """Fetch SmolLM2-135M-Instruct, which answers without --model, and print where it is.

    Exit status 1 if it cannot be fetched.

    \f The path of the file is printed on stdout; nothing is fetched if the file exists already. Raises
    Unavailable or OSError with the reason if it cannot be fetched or written. Lines about the download go to
    stderr.
    """
    print(files.fetch(options.dir or cache_folder(), sys.stderr))
    return 0
