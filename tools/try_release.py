"""Installs a release from a local package index into an empty environment, and has it answer a question.

python tools/try_release.py DIST

DIST has the wheels of this project and the files of its heads (`make dist`). Packages that are not in DIST
come from pip's own index. The environment has nothing but what `pip install 'specsot[all]'` brings, the
working directory is empty, and so is the cache; `specsot chat` answers with the model that it fetches itself.
Then every head is fetched from a server of DIST, and checked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

QUESTION = "What are the benefits of regular exercise?"
# Run in the new environment with the address of DIST: fetches every head, and prints their names.
FETCH_HEADS = """
import sys
from specsot.checkpoint.released_heads import fetch_head, released_heads
for name, head in released_heads().heads.items():
    print(name, *sorted(path.name for path in fetch_head(head, sys.argv[1]).iterdir()))
"""


class PackageIndex(ThreadingHTTPServer):
    """A package index on loopback (PEP 503) that has the wheels of a folder.

    `/simple/NAME/` lists all files of the folder, of which pip takes those called NAME. `/files/FILE` is a
    file.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        """Listen on a free port.

        folder: Folder with the wheels.
        """
        super().__init__(("127.0.0.1", 0), partial(_Visit, directory=str(folder)))

    @property
    def address(self) -> str:
        """Address of the server, without a slash at its end."""
        return f"http://127.0.0.1:{self.server_port}"


class _Visit(SimpleHTTPRequestHandler):
    """Answers requests for `/simple/...` with the list of files, and for `/files/...` with a file."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer a request."""
        self.path = "/" if self.path.startswith("/simple/") else self.path.removeprefix("/files")
        super().do_GET()

    def list_directory(self, path: str | os.PathLike[str]) -> None:  # type: ignore[override]
        """Send links to all files of the folder.

        path: The folder.
        """
        names = sorted(os.listdir(path))
        page = "".join(f'<a href="/files/{name}">{name}</a>\n' for name in names).encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


@contextmanager
def serving(folder: Path) -> Generator[PackageIndex]:
    """Serve a folder as a package index within the context, which yields the server.

    folder: Folder with the wheels.
    """
    index = PackageIndex(folder)
    threading.Thread(target=index.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield index
    finally:
        index.shutdown()
        index.server_close()


def pip_install(python: Path, requirement: str, index: PackageIndex, *options: str) -> None:
    """Install a requirement into an environment, by the pip of this process.

    python: Interpreter of the environment, which needs no pip of its own.
    requirement: What to install, such as "specsot[all]".
    index: The local index, in addition to what pip is configured to use.
    options: Further options of `pip install`.
    Raises subprocess.CalledProcessError if pip fails.
    """
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    command = [
        *pip,
        "install",
        "--quiet",
        "--no-compile",
        f"--extra-index-url={index.address}/simple",
        *options,
    ]
    subprocess.run([*command, requirement], check=True)


def run(command: Sequence[str], folder: Path, text: str = "") -> str:
    """Run a command with an empty home, cache and working directory; return what it prints.

    command: The command.
    folder: The folder that is all of these.
    text: What the command reads from its standard input.
    Raises subprocess.CalledProcessError if it fails.
    """
    environment = os.environ | {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder),
        "XDG_STATE_HOME": str(folder),
    }
    finished = subprocess.run(
        command, cwd=folder, env=environment, input=text, stdout=subprocess.PIPE, text=True, check=True
    )
    return finished.stdout


def main() -> int:
    """Return 0 if the release answers and its heads are the listed ones; otherwise 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dist", type=Path, help="folder with the wheels and the files of the heads")
    parser.add_argument("--question", default=QUESTION)
    given = parser.parse_args()
    with TemporaryDirectory(prefix="specsot-try-") as temporary, serving(given.dist.resolve()) as index:
        environment, home = Path(temporary) / "environment", Path(temporary) / "home"
        home.mkdir()
        # With a pip of its own, by which `specsot chat` fetches the model that answers.
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip_install(environment / "bin" / "python", "specsot[all]", index)
        answer = run([str(environment / "bin" / "specsot"), "chat"], home, f"{given.question}\n")
        print(answer)
        print(run([str(environment / "bin" / "python"), "-c", FETCH_HEADS, f"{index.address}/files"], home))
    return 0 if len(answer.split()) > 20 else 1


if __name__ == "__main__":
    sys.exit(main())
