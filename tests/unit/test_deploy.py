"""deploy/kuberay, checked offline: each file is what its kind may be, names meet, and nothing asks
for rights. The cluster itself has not been run."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ray.scripts.scripts import start

from moe_serve.bootstrap.service import DOWN_TIMEOUT_S, READY_TIMEOUT_S
from moe_serve.config import ServiceConfig, parse_config
from moe_serve.router.service import SERVICE_NAME
from moe_serve.rpc.options import server_credentials
from placement import __version__
from tests.architecture.test_readme import command_problem
from tests.fakes.kubernetes_files import (
    ROOT,
    Pod,
    Tree,
    files,
    object_faults,
    objects,
    of_kind,
    pods,
)

PODS = pods()
MEMORY = {"Mi": 1 << 20, "Gi": 1 << 30}
OWN_CLAIMS = frozenset({"moe-serve-model"})
"""Volumes that are there before: the model's."""
AUTHORITY = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 "
    "-subj /CN=moe-serve -keyout ca.key -out ca.pem"
)
"""As the page says it."""


def script(name: str) -> str:
    (config,) = of_kind("ConfigMap")
    text: str = config["data"][name]
    return text


def service_file() -> ServiceConfig:
    return parse_config(script("service.yaml").encode(), "service.yaml")


def size(text: str) -> int:
    return int(text[:-2]) * MEMORY[text[-2:]]


def env_of(container: Tree) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


# -- the files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", files())
def test_every_object_is_what_its_kind_may_be(name: str) -> None:
    found = objects(name)
    assert found
    assert [fault for item in found for fault in object_faults(item)] == []


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda c: c["spec"]["workerGroupSpecs"][0].update(maxReplica=3), "maxReplica: unknown"),
        (lambda c: c["spec"]["headGroupSpec"]["rayStartParams"].update(port=6379), "want str"),
        (lambda c: c["spec"].update(headGroupSpecs={}), "headGroupSpecs: unknown"),
        (lambda c: c.update(apiVersion="ray.io/v1alpha1"), "apiVersion"),
    ],
)
def test_a_misspelt_field_is_seen(spoil: Any, word: str) -> None:
    (cluster,) = copy.deepcopy(of_kind("RayCluster"))
    spoil(cluster)
    assert any(word in fault for fault in object_faults(cluster))


def test_the_option_of_fault_tolerance_fits_the_cluster() -> None:
    (patch,) = objects("gcs-fault-tolerance.yaml")
    (cluster,) = of_kind("RayCluster")
    assert patch["metadata"]["name"] == cluster["metadata"]["name"]
    assert not patch["spec"].keys() & cluster["spec"].keys(), "it adds, and changes nothing"
    assert object_faults({**cluster, "spec": {**cluster["spec"], **patch["spec"]}}) == []


def test_names_are_given_once_a_kind() -> None:
    kinds = ("RayCluster", "Job", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget")
    for kind in kinds:
        names = [item["metadata"]["name"] for item in of_kind(kind)]
        assert len(names) == len(set(names)) > 0, kind


# -- rights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
def test_no_pod_asks_for_rights(pod: Pod) -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    (user,) = re.findall(r"^USER (\d+):\d+$", dockerfile, re.MULTILINE)
    context = pod.spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert [context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [int(user)] * 3
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.spec["automountServiceAccountToken"] is False
    for container in pod.containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"]["cpu"]


def test_one_image_everywhere_of_this_version_and_the_ray_that_is_tested() -> None:
    images = {container["image"] for pod in PODS for container in pod.containers}
    assert len(images) == 1
    assert images.pop().rpartition(":")[2] == __version__
    (cluster,) = of_kind("RayCluster")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={cluster['spec']['rayVersion']}\n" in pinned


def test_ray_asks_for_its_token_and_the_job_has_it() -> None:
    (cluster,) = of_kind("RayCluster")
    auth = cluster["spec"]["authOptions"]
    assert auth["mode"] == "token"
    (control,) = [pod for pod in PODS if pod.name == "control"]
    env = env_of(control.main)
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN"]["secretKeyRef"]["name"] == auth["secretName"]
    assert env["RAY_HEAD"].startswith(f"{cluster['metadata']['name']}-head-svc:")


def test_only_the_container_that_signs_sees_the_authoritys_key() -> None:
    for pod in PODS:
        with_key = [
            container["name"]
            for container in pod.containers
            if any(mount["name"] == "authority-key" for mount in container["volumeMounts"])
        ]
        assert with_key == ([] if pod.name == "head" else ["certificate"])


def test_the_image_says_by_a_command_of_ours_whether_it_is_well() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", dockerfile, re.MULTILINE)
    assert command_problem(json.loads(check), cluster=False) == ""
    (period_s,) = re.findall(r"--start-period=(\d+)s", dockerfile)
    assert int(period_s) >= READY_TIMEOUT_S


# -- volumes, names --------------------------------------------------------------------------------


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
def test_volumes_are_there_and_mounted(pod: Pod) -> None:
    named = [volume["name"] for volume in pod.spec["volumes"]]
    mounted = {mount["name"] for c in pod.containers for mount in c["volumeMounts"]}
    assert len(named) == len(set(named))
    assert set(named) == mounted
    for container in pod.containers:
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(paths) == len(set(paths))
    (config,), claims = of_kind("ConfigMap"), of_kind("PersistentVolumeClaim")
    known = {claim["metadata"]["name"] for claim in claims} | OWN_CLAIMS
    page = (ROOT / "docs" / "how-to" / "kuberay.md").read_text(encoding="utf-8")
    for volume in pod.spec["volumes"]:
        kinds = set(volume) - {"name"}
        assert len(kinds) == 1
        if "configMap" in volume:
            assert volume["configMap"]["name"] == config["metadata"]["name"]
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in known
        if "secret" in volume:
            assert f"create secret generic {volume['secret']['secretName']} " in page
            assert volume["secret"]["defaultMode"] == 0o400
    writable = {"tmp": "/tmp", "shm": "/dev/shm", "state": "/state"}
    found = {m["name"]: m["mountPath"] for m in pod.main["volumeMounts"] if not m.get("readOnly")}
    assert found == writable


def test_scripts_that_pods_run_are_in_the_config_map() -> None:
    run = {
        word.rpartition("/")[2]
        for pod in PODS
        for container in pod.containers
        for word in container["command"]
        if word.startswith("/etc/moe-serve/")
    }
    assert run == {"certificate.sh", "up.sh"}
    assert all(script(name) for name in run)


def test_services_policies_and_budgets_mean_pods_that_exist() -> None:
    routers = [pod for pod in PODS if pod.name == "routers"]
    (service,) = of_kind("Service")
    wanted = {"matchLabels": service["spec"]["selector"]}
    assert [pod for pod in PODS if pod.matches(wanted)] == routers
    ports = {one["name"]: one["containerPort"] for one in routers[0].main["ports"]}
    for port in service["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    served = {port["port"] for port in service["spec"]["ports"]}
    config = service_file()
    assert served == {config.ports.grpc + number for number in range(config.fleet.routers)}
    policies = {item["metadata"]["name"]: item["spec"] for item in of_kind("NetworkPolicy")}
    assert all(pod.matches(policies["moe-serve"]["podSelector"]) for pod in PODS)
    (among,) = policies["moe-serve"]["ingress"]
    assert all(pod.matches(among["from"][0]["podSelector"]) for pod in PODS)
    (outside,) = policies["moe-serve-routers"]["ingress"]
    assert [p for p in PODS if p.matches(policies["moe-serve-routers"]["podSelector"])] == routers
    assert {port["port"] for port in outside["ports"]} == served
    (scraped,) = policies["moe-serve-metrics"]["ingress"]
    asked = [p.name for p in PODS if p.matches(policies["moe-serve-metrics"]["podSelector"])]
    assert asked == ["control"]
    assert [port["port"] for port in scraped["ports"]] == [config.ports.metrics]
    for rule in (outside, scraped):
        assert not any(pod.matches(rule["from"][0]["podSelector"]) for pod in PODS)


def test_budgets_let_one_pod_of_experts_go_and_no_other() -> None:
    left = {pod.name: 0 for pod in PODS}
    for budget in of_kind("PodDisruptionBudget"):
        taken = [pod for pod in PODS if pod.matches(budget["spec"]["selector"])]
        assert taken
        free = sum(pod.count for pod in taken) - budget["spec"]["minAvailable"]
        for pod in taken:
            left[pod.name] += free
    assert left == {"head": 0, "routers": 0, "experts": 1, "control": 0}


# -- probes and endings ----------------------------------------------------------------------------


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.name)
def test_every_probe_speaks_grpc_health_to_a_port_of_its_container(pod: Pod) -> None:
    ports = {port["containerPort"] for port in pod.main["ports"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = pod.main[name]
        if "grpc" in probe:
            assert probe["grpc"]["port"] in ports
            continue
        text = probe["exec"]["command"][-1]
        assert "python -m moe_serve.rpc.health_probe" in text
        (port,) = re.findall(r'"\$POD_IP:(\d+)"', text)
        assert int(port) in ports
        assert f"--tls-ca {service_file().security.tls_ca_file}" in text
        assert "POD_IP" in env_of(pod.main)
        assert set(re.findall(r"--service (\S+)", text)) <= {SERVICE_NAME}
    alive = {pod.main[name]["grpc"]["port"] for name in ("startupProbe", "livenessProbe")}
    asked = pod.ray_ports.get("node-manager-port", "6380")
    assert alive == {6379 if pod.name == "head" else int(asked)}


def test_a_pod_has_time_to_drain_before_it_is_ended() -> None:
    for pod in PODS:
        grace_s = pod.spec["terminationGracePeriodSeconds"]
        if pod.name in ("routers", "experts"):
            drain_s = float(env_of(pod.main)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
            assert grace_s >= drain_s + 30
        elif pod.name == "control":
            assert grace_s >= 2 * DOWN_TIMEOUT_S


def test_rays_first_process_gets_the_signal() -> None:
    (cluster,) = of_kind("RayCluster")
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    for pod in PODS:
        if pod.name == "control":
            # A shell, which hands it on: the test below.
            assert "trap " in script("up.sh")
        else:
            assert 'eval "exec $KUBERAY_GEN_RAY_START_CMD"' in pod.main["args"][0]


# -- the service -----------------------------------------------------------------------------------


def test_the_service_file_is_one_and_fits_the_pods() -> None:
    config = service_file()
    assert config.network == "cluster"
    assert config.security.complete
    assert not config.security.accept_insecure
    by_label = {pod.ray_labels.get("moe.role", ""): pod for pod in PODS}
    routers = by_label[config.fleet.router_node_labels["moe.role"]]
    assert (routers.name, routers.count) == ("routers", 1)
    (group,) = config.fleet.ranks
    experts = by_label[group.node_labels["moe.role"]]
    assert experts.name == "experts"
    each = group.count // experts.count
    assert each * experts.count == group.count
    assert group.budget is not None
    limits, wanted = experts.main["resources"]["limits"], experts.main["resources"]["requests"]
    assert each * group.budget * 1.25 <= size(limits["memory"])
    assert each * group.num_cpus <= float(wanted["cpu"])
    (control,) = [pod for pod in PODS if pod.name == "control"]
    ports = {port["name"]: port["containerPort"] for port in control.main["ports"]}
    told = config.ports
    assert (ports["admin"], ports["page"]) == (told.admin, told.dashboard)
    assert ports["metrics"] == told.metrics


def test_every_path_of_the_service_file_is_on_every_node_of_the_service() -> None:
    config = service_file()
    security = config.security
    paths = [security.token_file, security.tls_cert_file, security.tls_key_file, config.state_dir]
    paths += [security.tls_ca_file, Path(config.model.checkpoint)]
    for pod in PODS:
        if pod.name == "head":
            continue
        mounts = [Path(mount["mountPath"]) for mount in pod.main["volumeMounts"]]
        for path in paths:
            assert path is not None
            assert any(path.is_relative_to(mount) for mount in mounts), (pod.name, path)


def test_every_command_of_the_scripts_exists() -> None:
    text = script("up.sh").replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    (ray,) = [line for line in lines if line[:2] == ["ray", "start"]]
    flags = start.make_context("ray start", ray[2:]).params
    assert (flags["num_cpus"], flags["node_manager_port"]) == (0, 6380)
    assert flags["block"] is False
    (up,) = [line for line in lines if line[:2] == ["moe-serve", "up"]]
    assert up[-1] == "&"
    assert command_problem(up[:-1], cluster=True) == ""


KEEPER = """#!/bin/sh
trap 'sleep 0.2; echo down >> "$LOG"; exit 0' TERM
echo up >> "$LOG"
[ -z "$CODE" ] || exit "$CODE"
while :; do sleep 0.05; done
"""
"""Ends as `up --keep` does: with 0 both when the service was taken down and after SIGTERM."""


def start_script(folder: Path, *, code: str = "", ray: str = "") -> subprocess.Popen[bytes]:
    for name, text in (
        ("moe-serve", KEEPER),
        ("ray", f'#!/bin/sh\necho ray >> "$LOG"\n{ray}\n'),
        ("moe-kernels", '#!/bin/sh\necho kernels >> "$LOG"\n'),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "log").touch()
    text = script("up.sh")
    assert "ulimit -n 65536\n" in text, "not everybody here may have as many"
    return subprocess.Popen(
        ["/bin/sh", "-c", text.replace("ulimit -n 65536\n", "")],
        env={
            "PATH": f"{folder}:/usr/bin:/bin",
            "LOG": str(folder / "log"),
            "CODE": code,
            "RAY_HEAD": "h:1",
            "POD_IP": "127.0.0.1",
        },
    )


def said(folder: Path) -> list[str]:
    return (folder / "log").read_text(encoding="utf-8").split()


def until_said(folder: Path, word: str) -> None:
    ends_s = time.monotonic() + 30.0
    while word not in said(folder):
        assert time.monotonic() < ends_s, said(folder)
        time.sleep(0.01)


@pytest.mark.parametrize("times", [1, 2])
def test_a_keeper_that_is_told_to_end_fails_its_pod_once_the_service_is_down(
    tmp_path: Path, times: int
) -> None:
    with start_script(tmp_path) as shell:
        until_said(tmp_path, "up")
        for _ in range(times):
            shell.send_signal(signal.SIGTERM)
        assert shell.wait(30.0) == 143, "0 would complete the Job, and the service stays down"
    assert said(tmp_path) == ["kernels", "ray", "up", "down"]


def test_a_pod_that_is_told_to_end_before_its_service_starts_fails_too(tmp_path: Path) -> None:
    with start_script(tmp_path, ray="sleep 1") as shell:
        until_said(tmp_path, "ray")
        shell.send_signal(signal.SIGTERM)
        assert shell.wait(30.0) == 143
    assert said(tmp_path) == ["kernels", "ray"]


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_keeper_that_ends_by_itself_says_how_to_its_job(tmp_path: Path, code: str) -> None:
    with start_script(tmp_path, code=code) as shell:
        assert shell.wait(30.0) == int(code)


def test_every_node_waits_as_long_for_the_head() -> None:
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    waits = {pod.name: env_of(pod.main)[name] for pod in PODS if pod.name != "head"}
    assert set(waits.values()) == {"600"}


def test_kernels_of_the_image_are_where_its_user_may_write() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert "RUN NUMBA_CACHE_DIR=/opt/kernels " in text
    assert "COPY --from=build /opt/kernels /opt/kernels" in text
    assert "NUMBA_CACHE_DIR=/state/kernels" in text
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
    assert json.loads(entry)[2] == 'moe-kernels && exec moe-serve "$@"'
    for pod in PODS:
        starts = script("up.sh") if pod.name == "control" else pod.main["args"][0]
        assert "moe-kernels" in starts, f"{pod.name} would compile them at its start"
        assert any(mount["mountPath"] == "/state" for mount in pod.main["volumeMounts"])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_certificate_names_the_pod_and_only_its_user_reads_the_key(tmp_path: Path) -> None:
    authority, out = tmp_path / "authority", tmp_path / "tls"
    for folder in (authority, out):
        folder.mkdir()
    subprocess.run(
        AUTHORITY.split(),
        cwd=authority,
        check=True,
        capture_output=True,
    )
    (tmp_path / "certificate.sh").write_text(script("certificate.sh"), encoding="utf-8")
    environment = {
        "PATH": "/usr/bin:/bin",
        "POD_IP": "10.1.2.3",
        "AUTHORITY_DIR": str(authority),
        "TLS_DIR": str(out),
    }
    for _ in range(2):  # a pod whose container starts again has the files already
        command = ["/bin/sh", str(tmp_path / "certificate.sh")]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    assert sorted(path.name for path in out.iterdir()) == ["ca.pem", "server.key", "server.pem"]
    assert stat.S_IMODE((out / "server.key").stat().st_mode) == 0o600
    assert server_credentials(out / "server.pem", out / "server.key")
    for address, good in (("10.1.2.3", True), ("10.1.2.4", False)):
        verify = ["openssl", "verify", "-CAfile", str(out / "ca.pem"), "-verify_ip", address]
        done = subprocess.run([*verify, str(out / "server.pem")], check=False, capture_output=True)
        assert (done.returncode == 0) is good, done.stderr
    page = (ROOT / "docs" / "how-to" / "kuberay.md").read_text(encoding="utf-8")
    assert AUTHORITY in " ".join(page.replace("\\\n", " ").split())
    names = {path.name for path in map(Path, _security_paths())}
    assert names - {"tokens"} == {"ca.pem", "server.key", "server.pem"}


def _security_paths() -> list[str]:
    found = service_file().security.model_dump()
    return [str(path) for name, path in found.items() if name.endswith("_file")]
