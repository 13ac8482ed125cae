"""What tests of secured servers need: a token file, a certificate, a controller nobody may ask."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NoReturn

from moe_serve.controller.settings import ControllerSettings, ExpectedRank
from moe_serve.errors import InvalidArgument
from moe_serve.rpc.auth import Role
from placement.config import RebalanceConfig
from placement.topology import DeviceProfile
from tests.fake_shards import marker_spec

TOKENS = {role: str(role)[0] * 20 for role in Role}


def token_file(folder: Path) -> Path:
    path = folder / "tokens"
    path.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    path.chmod(0o600)
    return path


class NobodyAtHome:
    """A controller that may not be asked: a refused call must not come this far."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.asked = 0

    def _asked(self) -> NoReturn:
        self.asked += 1
        raise InvalidArgument("the controller was asked")

    @property
    def life(self) -> Any:
        self._asked()

    @property
    def bell(self) -> Any:
        self._asked()

    def sight(self) -> Any:
        self._asked()


def controller_settings(folder: Path, **changes: Any) -> ControllerSettings:
    profile = DeviceProfile(name="p", flops_per_s=1e9, memory_bytes_per_s=1e9, copy_bytes_per_s=1e9)
    values: dict[str, Any] = {
        "service_id": "s",
        "spec": marker_spec(),
        "config": RebalanceConfig(),
        "ranks": (ExpectedRank(rank=0, profile="p", num_slots=14, budget_bytes=14_000),),
        "profiles": (profile,),
        "state_dir": folder,
    }
    return ControllerSettings(**values | changes)


def tls_files(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
    """A self-signed certificate of these names and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"),
            *("-addext", f"subjectAltName={names}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
