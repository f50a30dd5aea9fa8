"""Prints what pyproject.toml asks for, one requirement a line: the plain list, or those of some extras.

Versions are those of constraints.txt. It lets an image keep its packages when only code changes.
"""

import sys
import tomllib
from pathlib import Path


def main(project: str, *extras: str) -> None:
    table = tomllib.loads(Path(project).read_text())["project"]
    lists = [table["optional-dependencies"][extra] for extra in extras] or [table["dependencies"]]
    print("\n".join(line for listed in lists for line in listed))


main(*sys.argv[1:])
