"""Ray: which cluster this shell points at, and whether its token authentication is on. Shows where
a token comes from, never the token. Imports no Ray."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from moe_serve.cli.checks.row import Check, Level, shown_path

TOPIC = "ray"


def ray_checks(environ: Mapping[str, str] | None = None, home: Path | None = None) -> list[Check]:
    """Address and authentication, from the environment and the user's token file."""
    environment = os.environ if environ is None else environ
    address = environment.get("RAY_ADDRESS", "")
    detail = f"RAY_ADDRESS={address}" if address else "not set: `up` starts a cluster of its own"
    return [
        Check(TOPIC, "address", Level.NOTE, detail),
        _auth(environment, Path.home() if home is None else home),
    ]


def _auth(environment: Mapping[str, str], home: Path) -> Check:
    mode = environment.get("RAY_AUTH_MODE", "")
    if mode == "disabled":
        step = "unset RAY_AUTH_MODE: without it anybody who reaches Ray's port runs code"
        return Check(TOPIC, "auth", Level.WARN, "RAY_AUTH_MODE=disabled", step)
    shown = f"mode {mode or 'default'}"
    if "RAY_AUTH_TOKEN" in environment:
        return Check(TOPIC, "auth", Level.OK, f"{shown}, token from RAY_AUTH_TOKEN")
    named = environment.get("RAY_AUTH_TOKEN_PATH", "")
    file = Path(named) if named else home / ".ray" / "auth_token"
    if not file.is_file():
        if named:
            step = "ray get-auth-token --generate, or unset RAY_AUTH_TOKEN_PATH"
            return Check(TOPIC, "auth", Level.FAIL, f"{shown}, {shown_path(file)} is missing", step)
        return Check(TOPIC, "auth", Level.OK, f"{shown}, no token yet: `up` makes one")
    open_to = stat.S_IMODE(file.stat().st_mode) & 0o077
    if open_to:
        detail = f"{shown}, {shown_path(file)} is open to others"
        return Check(TOPIC, "auth", Level.WARN, detail, f"chmod 600 {shown_path(file)}")
    return Check(TOPIC, "auth", Level.OK, f"{shown}, token in {shown_path(file)}")
