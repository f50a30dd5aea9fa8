"""The card this project was asked for by: folders, dependencies, services, scaling, and printed commands.

What is run elsewhere is not run again here: the grpcurl lines by test_grpcurl.py, the seeds' snippets and the
commands of docs/migrating.md by tests/app/test_seeds.py, several drafters by
tests/laws/test_several_drafters.py.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from specsot.service.command import TableCommand
from specsot_app.commands.infer import infer
from specsot_app.commands.serve import serve
from tests.app.test_seeds import given_to
from tests.conftest import REPOSITORY
from tests.contracts.test_grpcurl import LINES

SERVICES = ("master", "worker", "drafter")
FOLDERS = ("protos", "shared", "docker", "tests", *(f"services/{name}" for name in SERVICES))


@pytest.mark.parametrize("path", [*FOLDERS, "docker-compose.yml"])
def test_it_lies_where_the_card_says(path: str) -> None:
    found = REPOSITORY / path
    assert found.is_dir() if path in FOLDERS else found.is_file()


def requirements() -> dict[str, set[str]]:
    """Names of packages, by extra; under "" what every service installs."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: set(map(name_of_package, lines)) for extra, lines in lists.items()}


def name_of_package(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement)[0].lower()


IMPORT = re.compile(r"^[ \t]*(?:import ((?:[\w.]+(?:, )?)+)|from (\w+)[\w.]* import )", re.MULTILINE)


def imported(room: str) -> set[str]:
    """Top packages that a folder's files import."""
    found = set[str]()
    for path in (REPOSITORY / room).rglob("*.py"):
        for several, one in IMPORT.findall(path.read_text(encoding="utf-8")):
            found |= {name.partition(".")[0] for name in (one or several).split(", ")}
    return found


def test_the_packages_of_the_card_are_required_and_used() -> None:
    found = requirements()
    everywhere = {"grpcio", "protobuf", "pyzmq", "uvloop", "nvidia-ml-py", "structlog", "transformers"}
    assert everywhere <= found[""]
    assert {"torch", "numba"} <= found["model"], "int8 on a CPU needs no other extra"
    assert "torch" not in found[""]
    assert "grpcio-tools" in found["dev"]
    assert {"grpc", "google", "zmq", "uvloop", "pynvml", "structlog"} <= imported("shared/specsot")
    assert "torch" not in imported("services/master")
    assert all("torch" in imported(f"services/{name}") for name in ("worker", "drafter"))


def compose() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]


def test_compose_runs_the_three_services_each_from_its_own_target() -> None:
    found = compose()
    assert {name for name, service in found.items() if "profiles" not in service} == set(SERVICES)
    assert [found[name]["build"]["target"] for name in SERVICES] == list(SERVICES)


@pytest.mark.parametrize("name", ["worker", "drafter"])
def test_a_service_can_be_scaled(name: str) -> None:
    """A replica is given nothing that only one can have; it advertises its container's own name."""
    service = compose()[name]
    assert not {"container_name", "ports", "hostname"} & service.keys()
    words = service["command"].split()
    assert not {"--advertise", "--name"} & set(words)
    assert words[words.index("--listen") + 1].startswith("0.0.0.0:")


@pytest.mark.parametrize("name", ["worker", "drafter"])
def test_a_replica_in_kubernetes_advertises_its_own_pod(name: str) -> None:
    manifests = yaml.safe_load_all((REPOSITORY / f"deploy/kubernetes/base/{name}.yaml").read_text())
    (pods,) = (one for one in manifests if one["kind"] == "StatefulSet")
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value", "") for one in container["env"]}
    assert given["SPECSOT_ADVERTISE"].startswith(f"$(POD_NAME).{pods['spec']['serviceName']}:")


@pytest.mark.parametrize(
    "words",
    [
        "describe specsot.v1.GenerateRequest",
        *(f"specsot.v1.Master/{name}" for name in ("Generate", "GetInfo", "Cancel")),
    ],
)
def test_the_documents_have_a_grpcurl_line_for_it(words: str) -> None:
    assert any(line.endswith(words) for line in LINES)


MODELS = "--base_model_path B --eagle_model_path E --use_eagle3 True"
INFER = (
    f"--prompt Why? {MODELS} --max_new_tokens 512 --enable_parallel True --use_semantic_constraint True "
    "--use_scheduling True --max_parallel 2"
)


@pytest.mark.parametrize(
    ("command", "line", "path", "wanted"),
    [
        (infer, INFER, "question", "Why?"),
        (infer, INFER, "fleet.draft_model", "E"),
        (infer, INFER, "request.mode", "auto"),
        (infer, f"--prompt Why? {MODELS} --enable_parallel False", "request.mode", "direct"),
        (infer, "Why?", "fleet.device", "auto"),
        (serve, f"{MODELS} --host 0.0.0.0 --port 8000", "http_port", "8000"),
        (serve, "--model B", "fleet.device", "auto"),
        (serve, "--devices 127.0.0.1#0,127.0.0.1#0", "fleet.devices", "127.0.0.1#0,127.0.0.1#0"),
    ],
)
def test_a_printed_command_means_what_it_says(
    command: TableCommand, line: str, path: str, wanted: str
) -> None:
    value: Any = given_to(command, line)
    for name in path.split("."):
        value = getattr(value, name)
    assert str(value) == wanted
