"""Prints what pyproject.toml asks for, one requirement a line: the plain list, or an extra's.

Refuses to know versions; constraints.txt has them. It lets an image keep its packages when only code changes.
"""

import sys
import tomllib
from pathlib import Path


def main(project: str, extra: str | None = None) -> None:
    table = tomllib.loads(Path(project).read_text())["project"]
    print("\n".join(table["optional-dependencies"][extra] if extra else table["dependencies"]))


main(*sys.argv[1:])
