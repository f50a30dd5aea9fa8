"""The recipe of docs/operations.md: certificates by openssl, services as in compose.tls.yaml, clients' lines.

The same processes stand here on loopback.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from specsot.transport.security import Tls, read_pems
from specsot_app.cli import main
from tests.conftest import REPOSITORY
from tests.contracts.grpcurl import parse, replay
from tests.contracts.test_grpcurl import ALL
from tests.process.test_services import Service, free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ROLES = ("master", "worker", "drafter")
LINES = [line for line in ALL if "-cacert" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recipe") / "certificates"
    run_recipe(made)
    return made


def run_recipe(folder: Path) -> None:
    recipe = [REPOSITORY / "docker" / "certificates.sh", folder, "fleet.example", "10.1.2.3"]
    subprocess.run(recipe, check=True, capture_output=True)


def names(certificate: Path) -> set[str]:
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    listed = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in listed}


@pytest.mark.parametrize("role", ROLES)
def test_every_service_has_only_its_own_role(folder: Path, role: str) -> None:
    own = folder / role
    read_pems(Tls(own / "ca.pem", own / "own.pem", own / "own.key"))
    assert names(own / "own.pem") & set(ROLES) == {role}
    assert ("fleet.example" in names(own / "own.pem")) == (role == "master")
    for secret in (own / "own.key", folder / "ca.key", folder / "token"):
        assert secret.stat().st_mode & 0o077 == 0, "for nobody else's eyes"
    assert not (own / "ca.key").exists()


def test_again_means_new_certificates_by_the_same_authority(tmp_path: Path) -> None:
    run_recipe(tmp_path)
    kept, renewed = ("ca.pem", "ca.key", "token", "master/tokens"), ("master/own.pem", "worker/own.key")
    before = {name: (tmp_path / name).read_bytes() for name in (*kept, *renewed)}
    run_recipe(tmp_path)
    changed = {name for name in before if (tmp_path / name).read_bytes() != before[name]}
    assert changed == set(renewed)


def test_the_override_only_changes_papers() -> None:
    """Every service it names is one of the fleet, and none of them says that it is insecure."""
    base, override = (
        yaml.safe_load((REPOSITORY / name).read_text()) for name in ("docker-compose.yml", "compose.tls.yaml")
    )
    assert set(override["services"]) == {*ROLES, "prometheus"} <= set(base["services"])
    for role in ROLES:
        assert base["services"][role]["environment"]["SPECSOT_INSECURE"] == "on"
        assert "--insecure" not in base["services"][role]["command"]
        assert "--master" not in base["services"][role]["command"]
        assert set(override["services"][role]) == {"environment", "volumes"}
        assert override["services"][role]["environment"]["SPECSOT_INSECURE"] == "off"
    for port in base["services"]["master"]["ports"]:
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("role", ROLES)
def test_containers_can_do_little(role: str) -> None:
    service = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"][role]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "user", "cap_add", "devices"} & set(service)
    stages = (REPOSITORY / "docker" / "Dockerfile").read_text().split("\nFROM ")
    assert next(one for one in stages if "USER 1000:1000" in one).startswith("base AS service")
    assert any(one.startswith(f"service AS {role}") for one in stages)


class Fleet:
    """Processes with the environment that the override gives them, at addresses of this machine."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._override = yaml.safe_load((REPOSITORY / "compose.tls.yaml").read_text())
        self._fleet = f"127.0.0.1:{free_port()}"
        self.address = f"127.0.0.1:{free_port()}"

    def environment(self, role: str) -> Mapping[str, str]:
        given: dict[str, str] = self._override["services"][role]["environment"]
        moved = {"SPECSOT_MASTER": self._fleet, "SPECSOT_FLEET_LISTEN": self._fleet}
        tls_files = {
            name: value.replace("/certificates", str(self._folder / role)) for name, value in given.items()
        }
        return tls_files | {name: value for name, value in moved.items() if name in given}

    def start(self, role: str, *arguments: str) -> Service:
        with pytest.MonkeyPatch.context() as here:
            for name, value in self.environment(role).items():
                here.setenv(name, value)
            return self._stack.enter_context(Service(f"specsot_{role}", *arguments))

    def health(self, role: str, address: str) -> int:
        """As the image's own health check asks."""
        with pytest.MonkeyPatch.context() as here:
            for name, value in self.environment(role).items():
                here.setenv(name, value)
            return main(["health", address, "--timeout", "20"])


@pytest.fixture(scope="module")
def fleet(folder: Path, demo_model: Path) -> Iterator[tuple[Fleet, dict[str, str]]]:
    """A complete ring of two workers and a drafter, and where everybody listens."""
    pytest.importorskip("torch")
    base = ("--model", str(demo_model / "base"))
    with ExitStack() as stack:
        made = Fleet(folder, stack)
        master = made.start("master", *base, "--workers", "2", "--listen", made.address)
        member = (*base, "--kv-memory", "64M", "--dtype", "fp32")
        workers = [made.start("worker", *member) for _ in range(2)]
        drafter = made.start("drafter", *member, "--draft-model", str(demo_model / "eagle3"))
        reached = {
            "master": made.address,
            "worker": workers[0].wait_for(r"listening +at=(\S+)")[1],
            "drafter": drafter.wait_for(r"listening +at=(\S+)")[1],
        }
        master.wait_for(r"ring complete.*drafter=127")
        yield made, reached


@pytest.mark.parametrize("role", ROLES)
def test_everybody_calls_itself_healthy(
    fleet: tuple[Fleet, dict[str, str]], role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made, reached = fleet
    assert made.health(role, reached[role]) == 0
    assert capsys.readouterr().out == f"{reached[role]}: SERVING\n"


@pytest.mark.parametrize("role", ["worker", "drafter"])
def test_members_answer_no_client_without_a_certificate(
    fleet: tuple[Fleet, dict[str, str]], folder: Path, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, reached = fleet
    assert main(["health", reached[role], "--tls-ca", str(folder / "ca.pem")]) == 1
    assert "no process answers" in capsys.readouterr().out


def test_the_documents_have_such_lines() -> None:
    assert len(LINES) > 1


@pytest.mark.parametrize("text", LINES)
async def test_a_documented_line(
    fleet: tuple[Fleet, dict[str, str]], folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    line = parse(text, {"TOKEN": (folder / "token").read_text().strip()})
    answers = await asyncio.to_thread(replay, line, fleet[0].address)
    if line.words == ("list",):
        assert "specsot.v1.Master" in answers
        assert "specsot.v1.Fleet" not in answers, "that is behind another endpoint"
    else:
        assert answers[0]["ready"]


def test_the_command_line_reaches_it(
    fleet: tuple[Fleet, dict[str, str]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ("--master", fleet[0].address)
    tls_files = ("--tls-ca", str(folder / "ca.pem"), "--token-file", str(folder / "token"))
    asked = ("infer", "--mode", "direct", "--max-new-tokens", "8", "--json", "Explain Photosynthesis.")
    assert main([*asked, *to, *tls_files]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["event"] == "finished"
    assert main(["info", "--json", *to, *tls_files]) == 0
    assert json.loads(capsys.readouterr().out)["ready"]


@pytest.mark.parametrize(
    ("tls_files", "line"),
    [
        ((), "one side speaks TLS and the other does not"),
        (("--tls-ca", "ca.pem"), "a token is needed"),
        (("--tls-ca", "ca.pem", "--token-file", "wrong"), "this token is not known here"),
        (("--tls-ca", "nowhere.pem"), "nowhere.pem: no such file or directory"),
    ],
)
def test_the_command_line_says_what_is_missing(
    fleet: tuple[Fleet, dict[str, str]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tls_files: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "wrong").write_text("guess\n")
    assert main(["info", "--master", fleet[0].address, *tls_files]) in (1, 2)
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


async def test_python_reaches_it(fleet: tuple[Fleet, dict[str, str]], folder: Path) -> None:
    from specsot import SpecSoT

    token = (folder / "token").read_text().strip()
    async with SpecSoT.connect(fleet[0].address, tls_ca=folder / "ca.pem", token=token) as model:
        answer = await model.generate("Explain Photosynthesis.", mode="direct", max_new_tokens=8)
    assert len(answer.tokens) == 8
    assert token not in repr(model._options)
