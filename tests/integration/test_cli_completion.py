"""`moe-serve completion`: what TAB offers, in the shells themselves."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_serve.bootstrap.record import ServiceRecord, write_record

TIMEOUT_S = 240
OFFERED = {
    "moe-serve he": ["heat"],
    "moe-serve top --ph": ["--phase"],
    "moe-serve heat --mode re": ["replicas"],
    "moe-serve status --service t": ["tall", "tiny"],
}
"""Words that are offered where TAB is pressed after each of these lines."""
BASH = """
COMP_WORDS=({words}) COMP_CWORD={at}
_moe_serve_completion moe-serve
echo "${{COMPREPLY[*]}}"
"""
"""As bash does when TAB is pressed: the words, the place of the cursor, the function."""
FISH = """
complete --do-complete '{line}' | string replace --regex '\\t.*' '' | string join ' '
"""
"""What fish would list, without the descriptions."""
ZSH_READY = b"ready> "
ZSH = """
PS1='ready> '
autoload -Uz compinit && compinit -D -u
source <(moe-serve completion zsh)
setopt menu_complete
show() { print -r -- "<$BUFFER>"; BUFFER=''; }
zle -N show
bindkey '^]' show
"""
"""zsh completes at its prompt only: each TAB puts the next word in, Ctrl-] shows the line."""
SHOW = "\x1d"
SHOWN = re.compile(rb"<([^<>]*)>\r\n")


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """An environment in which `moe-serve` is a program on PATH, whatever is installed, and in which
    shells find nothing of their user."""
    shim = tmp_path / "bin" / "moe-serve"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moe_serve "$@"\n')
    shim.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MOE_SERVE_", "PYTEST_"))}
    return {
        **kept,
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "ZDOTDIR": str(tmp_path),
        **{
            f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("STATE", "CONFIG", "DATA")
        },
    }


def _bash(asked: Mapping[str, int], environment: dict[str, str]) -> list[list[str]]:
    lines = [BASH.format(words=line, at=len(line.split()) - 1) for line in asked]
    begin = 'eval "$(moe-serve completion bash)"\ncomplete -p moe-serve >/dev/null || exit 9\n'
    return _said(["bash", "-c", begin + "".join(lines)], environment)


def _fish(asked: Mapping[str, int], environment: dict[str, str]) -> list[list[str]]:
    lines = [FISH.format(line=line) for line in asked]
    begin = "moe-serve completion fish | source\n"
    return _said(["fish", "--no-config", "-c", begin + "".join(lines)], environment)


def _said(command: list[str], environment: dict[str, str]) -> list[list[str]]:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def _zsh(asked: Mapping[str, int], environment: dict[str, str]) -> list[list[str]]:
    Path(environment["ZDOTDIR"], ".zshrc").write_text(ZSH)
    found = []
    with _at_prompt(environment) as (type_in, until):
        until(re.compile(re.escape(ZSH_READY)))
        for line, words in asked.items():
            here = []
            for tabs in range(1, words + 1):
                type_in(line + "\t" * tabs + SHOW)
                here.append(until(SHOWN)[1].decode().split()[-1])
            found.append(here)
    return found


Prompt = tuple[Callable[[str], None], Callable[[re.Pattern[bytes]], re.Match[bytes]]]


@contextmanager
def _at_prompt(environment: dict[str, str]) -> Iterator[Prompt]:
    """zsh on a terminal: what types into it, and what reads until a pattern is there."""
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-i"],
        env={**environment, "TERM": "dumb"},
        cwd=environment["ZDOTDIR"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    ends_s = time.monotonic() + TIMEOUT_S
    read = b""

    def until(pattern: re.Pattern[bytes]) -> re.Match[bytes]:
        nonlocal read
        while (found := pattern.search(read)) is None:
            assert time.monotonic() < ends_s, read
            if select.select([ours], [], [], 1.0)[0]:
                read += os.read(ours, 4096)
        read = read[found.end() :]
        return found

    try:
        yield lambda text: os.write(ours, text.encode()), until
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


@pytest.mark.parametrize(("shell", "offered"), [("bash", _bash), ("zsh", _zsh), ("fish", _fish)])
def test_a_shell_completes_commands_options_choices_and_services(
    program: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    shell: str,
    offered: Callable[[Mapping[str, int], dict[str, str]], list[list[str]]],
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine (Debian: apt-get install {shell})")
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
    asked = {line: len(words) for line, words in OFFERED.items()}
    assert offered(asked, program) == list(OFFERED.values())
