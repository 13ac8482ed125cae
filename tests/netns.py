"""Two machines' worth of network on one: two network namespaces joined by a cable of their own.

What runs in one cannot reach the other but by that cable, and neither reaches anything else; ports,
loopback and the list of processes are their own. Files and memory stay shared. Needs root or
unprivileged user namespaces. Whatever runs inside is gone when the two holding processes are.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOLD_S = 1800
"""A holder ends by itself after this, should nobody be left to end it."""
READY_WAIT_S = 20.0
IPS = ("10.77.0.1", "10.77.0.2")
# As root a plain namespace will do; anybody else owns one inside a user namespace.
WAYS = ((), ("-U", "-r"))


class NoNetworks(RuntimeError):
    """This machine lets us make no network namespace."""


@dataclass(frozen=True)
class Network:
    """One side. `inside` is what a command line begins with to run there."""

    ip: str
    inside: tuple[str, ...]


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Two networks that reach each other at IPS. Raises NoNetworks."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        raise NoNetworks(f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)")
    reasons = []
    for way in WAYS:
        with contextlib.ExitStack() as stack:
            try:
                pair = _pair(stack, way)
            except (OSError, subprocess.CalledProcessError, TimeoutError) as error:
                said = getattr(error, "stderr", None) or str(error)
                reasons.append(f"unshare {' '.join((*way, '-n'))}: {said.strip()}")
                continue
            yield pair
            return
    raise NoNetworks("; ".join(reasons))


def _pair(stack: contextlib.ExitStack, way: Sequence[str]) -> tuple[Network, Network]:
    owner = ("-U", "--preserve-credentials") if way else ()
    first = _hold(stack, (), way)
    # Made from inside the first one, so that both belong to one user namespace.
    second = _hold(stack, ("nsenter", "-t", str(first), *owner) if way else (), ())
    enter = [("nsenter", "-t", str(pid), *owner, "-n", "-p", "-m") for pid in (first, second)]
    cable = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
    # Not in its list of processes, where the other one has no number.
    _run(("nsenter", "-t", str(first), *owner, "-n"), "ip", *cable)
    for inside, ip in zip(enter, IPS, strict=True):
        _run(inside, "ip", "link", "set", "lo", "up")
        _run(inside, "ip", "addr", "add", f"{ip}/24", "dev", "eth0")
        _run(inside, "ip", "link", "set", "eth0", "up")
        # Programs find their own address by asking for the way to some far one.
        _run(inside, "ip", "route", "add", "default", "dev", "eth0")
    return Network(IPS[0], enter[0]), Network(IPS[1], enter[1])


def _hold(stack: contextlib.ExitStack, within: Sequence[str], way: Sequence[str]) -> int:
    """Keep namespaces open by a sleeping process, their first one; its id. Its end is the end of
    all others in them."""
    command = [*within, "unshare", *way, "-n", "-p", "-f", "--mount-proc", "--kill-child"]
    process = subprocess.Popen(
        [*command, "sleep", str(HOLD_S)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    stack.callback(process.stderr.close)
    stack.callback(process.wait)
    stack.callback(process.kill)
    deadline_s = time.monotonic() + READY_WAIT_S
    while not (sleeping := _sleeping(process.pid)):
        if process.poll() is not None:
            raise OSError(process.stderr.read())
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{' '.join(command)} does not come up")
        time.sleep(0.01)
    return sleeping


def _sleeping(parent: int) -> int:
    """The child that has become the sleep, 0 before: until then the namespaces are not made."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "sleep":
                return int(child)
    return 0


def _run(inside: Sequence[str], *command: str) -> None:
    subprocess.run([*inside, *command], check=True, capture_output=True, text=True, timeout=20)
