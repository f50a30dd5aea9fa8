"""Lists the draft heads of models/ for a release, and copies their files to be published.

python tools/heads.py                        write the list anew, after a head was added or trained again
python tools/heads.py FOLDER --address URL   copy the files into FOLDER, and list URL as their address

A head is a folder `models/NAME/eagle3` whose config.json names the sizes of its base. The list is
shared/specsot/checkpoint/heads.toml; `models/demo`, whose name says nothing of a model, is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LIST = REPOSITORY / "shared" / "specsot" / "checkpoint" / "heads.toml"
HEAD = "eagle3"  # The folder of a head in the folder of its model.
WITHOUT = ("demo",)  # Folders of models/ whose head is for no other model.
HEADER = """\
# Draft heads by the name of their base model, and their files in a release. Written by tools/heads.py.
# The address is that of the release; it is empty in a clone, which has the heads in models/.
"""


def heads(models: Path) -> list[Path]:
    """Return the folders of all heads, by name of the model.

    models: Folder with a folder for each model.
    """
    found = sorted(models.glob(f"*/{HEAD}/config.json"))
    return [config.parent for config in found if config.parents[1].name not in WITHOUT]


def asset_name(head: Path, file: Path) -> str:
    """Return the name of a file among those of a release: "qwen2.5-coder-1.5b.eagle3.config.json".

    head: Folder of the head.
    file: The file.
    """
    return f"{head.parent.name}.{HEAD}.{file.name}"


def list_text(folders: list[Path], address: str) -> str:
    """Return the list of heads as TOML.

    folders: Folders of the heads.
    address: Address of the folder that has the files; "": there is none yet.
    """
    lines = [f'{HEADER}address = "{address}"', *(line for folder in folders for line in _head_lines(folder))]
    return "\n".join(lines) + "\n"


def _head_lines(head: Path) -> Iterator[str]:
    """Yield the lines of one head in the list.

    head: Folder of the head.
    Raises KeyError if its config lacks a size.
    """
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    yield f'\n[heads."{head.parent.name}"]'
    yield f"hidden_size = {config.get('target_hidden_size', config['hidden_size'])}"
    yield f"vocab_size = {config['vocab_size']}"
    for file in sorted(head.iterdir()):
        data = file.read_bytes()
        yield f'\n[heads."{head.parent.name}".files."{file.name}"]'
        yield f'asset = "{asset_name(head, file)}"'
        yield f'sha256 = "{hashlib.sha256(data).hexdigest()}"'
        yield f"size = {len(data)}"


def main() -> None:
    """Write the list, and copy the files if a folder is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="folder that gets the files")
    parser.add_argument("--address", default="", help="address that the files will have")
    given = parser.parse_args()
    folders = heads(REPOSITORY / "models")
    LIST.write_text(list_text(folders, given.address), encoding="utf-8")
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
        for head in folders:
            for file in sorted(head.iterdir()):
                shutil.copyfile(file, given.folder / asset_name(head, file))


if __name__ == "__main__":
    main()
