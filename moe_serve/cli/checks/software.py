"""Versions: Python, and the distributions the service is made of. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable

from moe_serve import __version__
from moe_serve.cli.checks.row import Check, Level

TOPIC = "versions"
PYTHON_MIN = (3, 11)
NEEDED = ("ray", "grpcio", "protobuf", "pyzmq", "numpy", "numba", "msgspec", "torch", "safetensors")
OPTIONAL = ("transformers",)
RAY_FROM, RAY_BELOW = (2, 60), (2, 62)
"""Private calls of Ray were read in these versions."""

VersionOf = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """Version of a distribution, None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_checks(version_of: VersionOf = installed) -> list[Check]:
    """One row for Python and platform, and one for each distribution."""
    python = Level.OK if sys.version_info >= PYTHON_MIN else Level.FAIL
    rows = [
        Check(TOPIC, "moe-serve", Level.OK, __version__),
        Check(
            TOPIC,
            "python",
            python,
            f"{platform.python_version()} ({platform.python_implementation()})",
            "" if python is Level.OK else "Python 3.11 or newer is needed",
        ),
        Check(TOPIC, "platform", Level.OK, platform.platform()),
    ]
    for name in NEEDED:
        version = version_of(name)
        if version is None:
            rows.append(Check(TOPIC, name, Level.FAIL, "absent", f"pip install {name}"))
        elif name == "ray":
            rows.append(_ray(version))
        else:
            rows.append(Check(TOPIC, name, Level.OK, version))
    for name in OPTIONAL:
        version = version_of(name)
        rows.append(Check(TOPIC, name, Level.NOTE, version or "absent (only front ends need it)"))
    return rows


def _ray(version: str) -> Check:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if RAY_FROM <= numbers < RAY_BELOW:
        return Check(TOPIC, "ray", Level.OK, version)
    step = "versions from 2.60 to below 2.62 were tested; install one of them"
    return Check(TOPIC, "ray", Level.FAIL, version, step)
