"""`moe-serve completion`: what TAB offers, in bash itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_serve.bootstrap.record import ServiceRecord, write_record

TIMEOUT_S = 240
ASK = """
COMP_WORDS=({words}) COMP_CWORD={at}
_moe_serve_completion moe-serve
echo "${{COMPREPLY[*]}}"
"""
"""As bash does when TAB is pressed: the words, the place of the cursor, the function."""


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """An environment in which `moe-serve` is a program on PATH, whatever is installed."""
    shim = tmp_path / "bin" / "moe-serve"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moe_serve "$@"\n')
    shim.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MOE_SERVE_", "PYTEST_"))}
    return {
        **kept,
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


def _offered(asked: list[str], environment: dict[str, str]) -> list[str]:
    """What bash offers for the last word of each of these lines."""
    lines = [ASK.format(words=words, at=len(words.split()) - 1) for words in asked]
    begin = 'eval "$(moe-serve completion bash)"\ncomplete -p moe-serve >/dev/null || exit 9\n'
    done = subprocess.run(
        ["bash", "-c", begin + "".join(lines)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_bash_completes_commands_options_choices_and_services(
    program: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", program["XDG_STATE_HOME"])
    for name in ("tiny", "tall", "other"):
        write_record(
            ServiceRecord(
                service=name,
                ray_address="",
                namespace="moe_serve",
                admin_address="127.0.0.1:1",
                router_addresses=(),
                dashboard_url="",
                config_file="",
                network="loopback",
            )
        )
    asked = [
        "moe-serve he",
        "moe-serve top --ph",
        "moe-serve heat --mode re",
        "moe-serve status --service t",
    ]
    assert _offered(asked, program) == ["heat", "--phase", "replicas", "tall tiny"]
