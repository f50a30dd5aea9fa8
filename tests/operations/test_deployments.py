"""What is shipped to run a fleet: every manifest and file is what its reader takes, and all agree.

Everything is checked offline.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from specsot.service.command import variable_of
from specsot.service.option_table import entries_of
from specsot_drafter.config import DrafterConfig
from specsot_master.config import MasterConfig
from specsot_worker.config import WorkerConfig
from tests.conftest import REFERENCE, REPOSITORY

pytestmark = pytest.mark.slow

DEPLOY = REPOSITORY / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("base", "overlays/pinned", "overlays/gpu")
GROUPED, WATCHED = (
    "overlays/leaderworkerset",
    "overlays/servicemonitor",
)  # with kinds that are not Kubernetes' own
CUSTOM = ("LeaderWorkerSet", "ServiceMonitor")
WORKLOADS = ("Deployment", "StatefulSet")
VERSION = "1.32"
WRITTEN = sorted(
    path.relative_to(REPOSITORY)
    for path in (
        *DEPLOY.rglob("*.yaml"),
        *REPOSITORY.glob("*compose*.y*ml"),
        *(REPOSITORY / "docker").glob("*.yaml"),
        *(REPOSITORY / ".github").rglob("*.y*ml"),
        REPOSITORY / ".pre-commit-config.yaml",
    )
)
STYLE = """
extends: default
rules:
  document-start: disable
  line-length: {max: 120}
  truthy: {check-keys: false}
  comments: {min-spaces-from-content: 1}
"""

Manifest = dict[str, Any]


def read(path: Path) -> list[Manifest]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def whole(folder: str) -> list[Manifest]:
    """The manifests of a folder that are whole in themselves: patches of an overlay are not."""
    kustomization = read(KUBERNETES / folder / "kustomization.yaml")[0]
    files = [name for name in kustomization["resources"] if name.endswith(".yaml")]
    return [one for name in files for one in read(KUBERNETES / folder / name)]


@cache
def rendered(folder: str) -> tuple[Manifest, ...]:
    """As kubectl would apply it."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl, which renders overlays")
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return tuple(yaml.safe_load_all(said.stdout))


def check(manifests: Iterator[Manifest] | list[Manifest] | tuple[Manifest, ...]) -> None:
    """Each once: most are the same in every overlay."""
    pytest.importorskip("kubernetes_validate")
    for manifest in manifests:
        if manifest["kind"] not in CUSTOM:
            fits(json.dumps(manifest, sort_keys=True))


@cache
def fits(manifest: str) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(json.loads(manifest), VERSION, strict=True)


def workloads(manifests: list[Manifest] | tuple[Manifest, ...]) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] in WORKLOADS}


def container(workload: Manifest) -> Manifest:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("path", WRITTEN, ids=str)
def test_every_file_is_well_written_yaml(path: Path) -> None:
    linter = pytest.importorskip("yamllint.linter")
    config = pytest.importorskip("yamllint.config").YamlLintConfig(STYLE)
    problems = [str(problem) for problem in linter.run((REPOSITORY / path).read_text(), config)]
    assert problems == []


@pytest.mark.parametrize("folder", OVERLAYS)
def test_manifests_fit_kubernetes_own_schemas(folder: str) -> None:
    check(whole(folder))


@pytest.mark.parametrize(
    ("folder", "kind", "definition"),
    [
        (GROUPED, "LeaderWorkerSet", "leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
        (WATCHED, "ServiceMonitor", "monitoring.coreos.com_servicemonitors.yaml"),
    ],
)
def test_custom_objects_fit_their_definitions(folder: str, kind: str, definition: str) -> None:
    """As their projects publish them; what those do not name is a slip, too."""
    path = Path(REFERENCE or "") / "crds" / definition
    if not path.is_file():
        pytest.skip(f"no {definition} in the folder crds of SPECSOT_REFERENCE")
    (manifest,) = (one for one in rendered(folder) if one["kind"] == kind)
    version = manifest["apiVersion"].partition("/")[2]
    (found,) = (one for one in read(path)[0]["spec"]["versions"] if one["name"] == version)
    schema = closed(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    assert [error.message for error in validator(schema).iter_errors(manifest)] == []
    manifest = manifest | {"spec": manifest["spec"] | {"slip": 1}}
    assert list(validator(schema).iter_errors(manifest)), "and it would be noticed"


def closed(schema: Any) -> Any:
    """A CRD's schema as one of JSON's, in which nothing may be that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key == "default" else closed(value) for key, value in schema.items()}
    if isinstance(schema.get("format"), str):
        del made["format"]
    if schema.get("x-kubernetes-int-or-string"):
        made = {**made, "type": ["integer", "string"]}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.parametrize("folder", [*OVERLAYS, GROUPED, WATCHED])
def test_what_kubectl_renders_fits_too(folder: str) -> None:
    check(rendered(folder))


def test_a_group_of_workers_has_the_pods_of_the_base_and_replaces_them() -> None:
    named = {(one["kind"], one["metadata"]["name"]): one for one in rendered(GROUPED)}
    group = named["LeaderWorkerSet", "specsot-worker"]["spec"]
    assert (
        group["leaderWorkerTemplate"]["workerTemplate"]
        == workloads(rendered("base"))["specsot-worker"]["spec"]["template"]
    )
    assert not {("StatefulSet", "specsot-worker"), ("Service", "specsot-worker")} & set(named)
    wanted = named["ConfigMap", "specsot-master"]["data"]
    assert str(group["leaderWorkerTemplate"]["size"]) == wanted["SPECSOT_WORKERS"]


def test_the_monitor_finds_a_service_of_all_pods_with_its_port() -> None:
    named = {(one["kind"], one["metadata"]["name"]): one for one in rendered(WATCHED)}
    monitor, service = named["ServiceMonitor", "specsot"]["spec"], named["Service", "specsot-metrics"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    for workload in workloads(rendered(WATCHED)).values():
        pod = workload["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= pod.items()
        ports = {one["containerPort"] for one in container(workload)["ports"]}
        assert service["spec"]["ports"][0]["port"] in ports


def test_a_release_has_the_notes_of_its_version_alone(tmp_path: Path) -> None:
    jobs = read(REPOSITORY / ".github" / "workflows" / "release.yaml")[0]["jobs"]
    order = [(name, job.get("needs")) for name, job in jobs.items()]
    assert order[:4] == [("build", None), ("try", "build"), ("images", "try"), ("publish", "images")]
    (cut,) = (step["run"] for step in jobs["publish"]["steps"] if "awk" in step.get("run", ""))
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changes\n\n## 0.10, today\n\n* New.\n\n## 0.1, once\n\n* Old.\n"
    )
    for version, notes in (("0.10", "## 0.10, today\n\n* New.\n\n"), ("0.1", "## 0.1, once\n\n* Old.\n")):
        given = {"GITHUB_REF_NAME": f"v{version}", "PATH": os.environ["PATH"]}
        subprocess.run(["bash", "-c", cut], cwd=tmp_path, env=given, check=True)
        assert (tmp_path / "notes.md").read_text() == notes


def test_the_check_would_notice() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    worker = workloads(whole("base"))["specsot-worker"]
    with pytest.raises(validate.ValidationError):
        check([worker | {"spec": worker["spec"] | {"replicas": "two"}}])


def test_pods_are_as_locked_as_the_containers_allow() -> None:
    for name, workload in workloads(whole("base")).items():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "else SPECSOT_PORT and the like would be set"
        own = container(workload)["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert not own["allowPrivilegeEscalation"]
        assert own["capabilities"]["drop"] == ["ALL"]


def test_the_ring_is_for_its_members_alone() -> None:
    manifests = rendered("base")
    labels = {
        name: one["spec"]["template"]["metadata"]["labels"] for name, one in workloads(manifests).items()
    }
    policies = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"}
    allowed = policies["specsot-ring"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    for name, own in labels.items():
        assert allowed.items() <= own.items(), name
        chosen = all(
            own[rule["key"]] in rule["values"]
            for rule in policies["specsot-ring"]["podSelector"]["matchExpressions"]
        )
        assert chosen == (name != "specsot-master")


def test_members_find_each_other_before_they_are_ready() -> None:
    services = {one["metadata"]["name"]: one["spec"] for one in whole("base") if one["kind"] == "Service"}
    for name in ("specsot-ring", "specsot-worker", "specsot-drafter"):
        assert services[name]["clusterIP"] == "None"
        assert services[name]["publishNotReadyAddresses"] is True
    for name in ("specsot-worker", "specsot-drafter"):
        assert workloads(whole("base"))[name]["spec"]["serviceName"] == name
    (settings,) = [one for one in whole("base") if one["metadata"]["name"] == "specsot-member"]
    assert settings["data"]["SPECSOT_MASTER"] == "specsot-ring:50050"


def test_workers_have_minutes_to_load_and_are_probed_by_our_own_command() -> None:
    for workload in workloads(whole("base")).values():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container(workload)[probe]["exec"]["command"][:2] == ["specsot", "health"]
    startup = container(workloads(whole("base"))["specsot-worker"])["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200


def test_as_many_workers_as_the_master_waits_for() -> None:
    (master,) = [
        one for one in whole("base") if one["metadata"]["name"] == "specsot-master" and "data" in one
    ]
    worker = workloads(whole("base"))["specsot-worker"]
    assert int(master["data"]["SPECSOT_WORKERS"]) == worker["spec"]["replicas"]
    (ranges,) = whole("overlays/pinned")
    assert sorted(ranges["data"]) == [str(number) for number in range(worker["spec"]["replicas"])]


def test_the_drafter_runs_next_to_the_last_stage() -> None:
    drafter = workloads(rendered("overlays/pinned"))["specsot-drafter"]
    (rule,) = drafter["spec"]["template"]["spec"]["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    last = max(whole("overlays/pinned")[0]["data"])
    wanted = rule["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert wanted == {"app.kubernetes.io/name": "specsot-worker", "apps.kubernetes.io/pod-index": last}
    command = container(workloads(rendered("overlays/pinned"))["specsot-worker"])["command"]
    assert command[:2] == ["sh", "-c"]


def test_the_gpu_overlay_asks_for_one_each() -> None:
    for name in ("specsot-worker", "specsot-drafter"):
        assert (
            container(workloads(rendered("overlays/gpu"))[name])["resources"]["limits"]["nvidia.com/gpu"]
            == "1"
        )
    assert "nvidia.com/gpu" not in str(workloads(rendered("overlays/gpu"))["specsot-master"])


def test_on_a_gpu_kernels_can_be_compiled_kept_and_loaded() -> None:
    """Triton calls a C compiler, which slim images lack, and loads what it made from a cache: in a home that
    nobody may write to, unless it is named.
    """
    image = (REPOSITORY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    cache = re.search(r"TRITON_CACHE_DIR=(\S+)", image)
    assert cache is not None
    assert cache[1].startswith("/tmp/")
    for name in ("worker", "drafter"):
        service = read(REPOSITORY / "compose.gpu.yaml")[0]["services"][name]
        assert service["tmpfs"] == ["/tmp:exec"], "Docker mounts them noexec"
        assert service["build"]["args"]["BASE"] == "${BASE:-python:3.11}"
        mounts = container(workloads(rendered("overlays/gpu"))[f"specsot-{name}"])["volumeMounts"]
        assert "/tmp" in [mount["mountPath"] for mount in mounts]


def settings() -> Iterator[tuple[str, Manifest]]:
    """Every environment that something shipped gives to a service, and whose."""
    for manifest in whole("base"):
        if manifest["kind"] == "ConfigMap":
            yield manifest["metadata"]["name"], manifest["data"]
    for path in (REPOSITORY / "docker-compose.yml", REPOSITORY / "compose.gpu.yaml"):
        for name, service in read(path)[0]["services"].items():
            if name in ("master", "worker", "drafter"):
                yield f"{path.name}: {name}", service.get("environment", {})


def test_every_variable_is_some_services_flag() -> None:
    """A name with a slip in it would be ignored in silence."""
    programs = (DrafterConfig, MasterConfig, WorkerConfig)
    known = {variable_of(entry.flag) for program in programs for entry in entries_of(program)}
    given = {name for _, data in settings() for name in data if name.startswith("SPECSOT_")}
    assert len(given) > 8
    assert given <= known


def test_compose_opens_ports_to_this_machine_alone() -> None:
    services = read(REPOSITORY / "docker-compose.yml")[0]["services"]
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert {name for name, one in services.items() if "profiles" in one} == {"prometheus", "grafana"}


def test_with_certificates_prometheus_looks_at_the_same() -> None:
    """Each service is asked for a certificate of its own role, and shown one of Prometheus' own."""
    plain, secure = (
        read(DEPLOY / "prometheus" / f"{name}.yaml")[0]["scrape_configs"]
        for name in ("prometheus", "prometheus.tls")
    )
    (everywhere,) = plain[0]["dns_sd_configs"]
    assert [job["tls_config"]["server_name"] for job in secure] == everywhere["names"]
    override = read(REPOSITORY / "compose.tls.yaml")[0]["services"]["prometheus"]
    assert "--config.file=/etc/prometheus/prometheus.tls.yaml" in override["command"]
    (tls_files,) = override["volumes"]
    folder = tls_files.split(":")[-2]
    for job in secure:
        (found,) = job["dns_sd_configs"]
        assert found == everywhere | {"names": [job["tls_config"]["server_name"]]}
        assert job["scheme"] == "https"
        assert job["relabel_configs"] == [{"target_label": "job", "replacement": plain[0]["job_name"]}]
        files = {job["tls_config"][f"{one}_file"] for one in ("ca", "cert", "key")}
        assert files == {f"{folder}/{name}" for name in ("ca.pem", "own.pem", "own.key")}


def test_prometheus_looks_where_services_tell() -> None:
    (scrape,) = read(DEPLOY / "prometheus" / "prometheus.yaml")[0]["scrape_configs"]
    services = read(REPOSITORY / "docker-compose.yml")[0]["services"]
    (found,) = scrape["dns_sd_configs"]
    for name in found["names"]:
        assert services[name]["environment"]["SPECSOT_METRICS"] == f"0.0.0.0:{found['port']}"
