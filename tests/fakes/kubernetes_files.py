"""The files under deploy/kuberay as plain data, and the shape of what they may say.

The shape lists what we use of each kind, by hand: a key or a type that is not listed is a fault, so
a misspelt field does not stay unseen. It is no copy of Kubernetes' or KubeRay's own schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kuberay"

Tree = dict[str, Any]
TEXTS = {"*": str}
QUANTITY = str
LABELS = TEXTS
META = {"name": str, "labels": LABELS, "annotations": TEXTS}
SELECTOR = {
    "matchLabels": LABELS,
    "matchExpressions": [{"key": str, "operator": str, "values": [str]}],
}
PROBE = {
    "grpc": {"port": int},
    "exec": {"command": [str]},
    "periodSeconds": int,
    "timeoutSeconds": int,
    "failureThreshold": int,
}
KEY_OF = {"name": str, "key": str}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [
        {
            "name": str,
            "value": str,
            "valueFrom": {"fieldRef": {"fieldPath": str}, "secretKeyRef": KEY_OF},
        }
    ],
    "ports": [{"name": str, "containerPort": int}],
    "startupProbe": PROBE,
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "securityContext": {
        "allowPrivilegeEscalation": bool,
        "readOnlyRootFilesystem": bool,
        "capabilities": {"drop": [str]},
    },
    "resources": {
        "requests": {"cpu": QUANTITY, "memory": QUANTITY},
        "limits": {"memory": QUANTITY},
    },
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}
TEMPLATE = {
    "metadata": META,
    "spec": {
        "automountServiceAccountToken": bool,
        "terminationGracePeriodSeconds": int,
        "restartPolicy": str,
        "securityContext": {
            "runAsNonRoot": bool,
            "runAsUser": int,
            "runAsGroup": int,
            "fsGroup": int,
            "seccompProfile": {"type": str},
        },
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": int,
                        "podAffinityTerm": {"topologyKey": str, "labelSelector": SELECTOR},
                    }
                ]
            }
        },
        "initContainers": [CONTAINER],
        "containers": [CONTAINER],
        "volumes": [
            {
                "name": str,
                "emptyDir": {"medium": str, "sizeLimit": QUANTITY},
                "configMap": {"name": str},
                "secret": {"secretName": str, "defaultMode": int},
                "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
            }
        ],
    },
}
GROUP = {"labels": LABELS, "rayStartParams": TEXTS, "template": TEMPLATE}
SPECS: dict[str, Any] = {
    "RayCluster": {
        "rayVersion": str,
        "authOptions": {"mode": str, "secretName": str},
        "gcsFaultToleranceOptions": {
            "redisAddress": str,
            "redisPassword": {"valueFrom": {"secretKeyRef": KEY_OF}},
        },
        "headGroupSpec": GROUP,
        "workerGroupSpecs": [
            {**GROUP, "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}
        ],
    },
    "Job": {"backoffLimit": int, "podReplacementPolicy": str, "template": TEMPLATE},
    "Service": {"selector": LABELS, "ports": [{"name": str, "port": int, "targetPort": str}]},
    "NetworkPolicy": {
        "podSelector": SELECTOR,
        "policyTypes": [str],
        "ingress": [
            {"from": [{"podSelector": SELECTOR}], "ports": [{"protocol": str, "port": int}]}
        ],
    },
    "PodDisruptionBudget": {"minAvailable": int, "selector": SELECTOR},
    "PersistentVolumeClaim": {
        "accessModes": [str],
        "resources": {"requests": {"storage": QUANTITY}},
    },
}
VERSIONS = {
    "RayCluster": "ray.io/v1",
    "Job": "batch/v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}


def faults(value: Any, shape: Any, path: str = "") -> Iterator[str]:
    """What of a value its shape does not know, each with its path."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path}: want a mapping, got {value!r}"
            return
        for key, inner in value.items():
            known = shape.get(key, shape.get("*"))
            if known is None:
                yield f"{path}.{key}: unknown"
            else:
                yield from faults(inner, known, f"{path}.{key}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{path}: want a list, got {value!r}"
            return
        for number, inner in enumerate(value):
            yield from faults(inner, shape[0], f"{path}[{number}]")
    elif type(value) is not shape:
        yield f"{path}: want {shape.__name__}, got {value!r}"


def object_faults(item: Tree) -> list[str]:
    """What of one object is not known."""
    kind = item["kind"]
    shape = {"apiVersion": str, "kind": str, "metadata": META}
    more = {"data": TEXTS} if kind == "ConfigMap" else {"spec": SPECS[kind]}
    found = list(faults(item, {**shape, **more}, kind))
    return found + ([] if item["apiVersion"] == VERSIONS[kind] else [f"{kind}: its apiVersion"])


@cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def objects(name: str) -> list[Tree]:
    """The objects of one file, each read anew."""
    return [item for item in yaml.safe_load_all(_read(name)) if item is not None]


def files() -> list[str]:
    """Names of the files."""
    return sorted(path.name for path in FOLDER.glob("*.yaml"))


def of_kind(kind: str) -> list[Tree]:
    """Objects of a kind, of all files but the patch."""
    names = [name for name in files() if name != "gcs-fault-tolerance.yaml"]
    return [item for name in names for item in objects(name) if item["kind"] == kind]


@dataclass(frozen=True)
class Pod:
    """A pod template, how many there are of it, and what Ray calls its nodes."""

    name: str
    count: int
    template: Tree
    ray_labels: dict[str, str]
    ray_ports: dict[str, str]

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def spec(self) -> Tree:
        spec: Tree = self.template["spec"]
        return spec

    @property
    def main(self) -> Tree:
        (container,) = self.spec["containers"]
        found: Tree = container
        return found

    @property
    def containers(self) -> list[Tree]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def matches(self, selector: Tree) -> bool:
        """Whether a selector (matchLabels, matchExpressions with In) takes it."""
        wanted = selector.get("matchLabels", {}).items()
        terms = selector.get("matchExpressions", [])
        assert all(term["operator"] == "In" for term in terms)
        return wanted <= self.labels.items() and all(
            self.labels.get(term["key"]) in term["values"] for term in terms
        )


def pods() -> list[Pod]:
    """Every pod that the files make."""
    (cluster,), (job,) = of_kind("RayCluster"), of_kind("Job")
    head = cluster["spec"]["headGroupSpec"]
    found = [Pod("head", 1, head["template"], head["labels"], head["rayStartParams"])]
    found += [
        Pod(g["groupName"], g["replicas"], g["template"], g["labels"], g["rayStartParams"])
        for g in cluster["spec"]["workerGroupSpecs"]
    ]
    return [*found, Pod("control", 1, job["spec"]["template"], {}, {})]
