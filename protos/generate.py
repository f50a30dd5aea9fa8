"""Generates the checked-in stubs of protos/specsot/v1 into shared/specsot/v1, or into a given folder.

Refuses to run with another generator than the pinned one: generated code sets the users' floor of
protobuf and grpcio.
"""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.resources import files
from pathlib import Path

GENERATOR = "1.76.0"  # of grpcio-tools: emits code for protobuf >= 6.31.1 and grpcio >= 1.76
SOURCES = Path(__file__).parent
STUBS = SOURCES.parent / "shared"


def generate(target: Path) -> list[Path]:
    """Write the stubs below `target`/specsot/v1; returns their paths. Raises RuntimeError."""
    from grpc_tools import protoc

    protos = sorted(SOURCES.glob("specsot/v1/*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={SOURCES}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *map(str, protos),
        ]
    )
    if status:
        raise RuntimeError(f"protoc ended with {status}")
    return drop_empty_services(target, protos)


def drop_empty_services(target: Path, protos: list[Path]) -> list[Path]:
    """protoc writes a service stub for every file; keep those that hold one."""
    for proto in protos:
        stub = target / "specsot" / "v1" / f"{proto.stem}_pb2_grpc.py"
        if "class " not in stub.read_text():
            stub.unlink()
    return sorted((target / "specsot" / "v1").glob("*_pb2*"))


def installed_generator() -> str | None:
    """The version of grpcio-tools in this interpreter, or None."""
    try:
        return importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    found = installed_generator()
    if found != GENERATOR:
        print(f"grpcio-tools=={GENERATOR} is needed (pip install it with 'setuptools<81'), found {found}")
        return 2
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else STUBS
    (target / "specsot" / "v1").mkdir(parents=True, exist_ok=True)
    print(f"wrote {len(generate(target))} files below {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
