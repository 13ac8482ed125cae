"""Two machines' worth of network on one: two network namespaces joined by a cable of their own.

What runs in one cannot reach the other but by that cable, and neither reaches anything else; ports
and loopback are their own. Processes, files and memory stay shared. Needs root or unprivileged user
namespaces; everything is gone when the two holding processes are.
"""

from __future__ import annotations

import contextlib
import os
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
    namespace: str

    def pids(self) -> list[int]:
        """Processes in this network, its holder excepted."""
        found = []
        for folder in (f for f in Path("/proc").iterdir() if f.name.isdecimal()):
            with contextlib.suppress(OSError):
                here = os.readlink(folder / "ns/net") == self.namespace
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if here and words[0] != b"sleep":
                    found.append(int(folder.name))
        return found


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
    enter = ("-U", "--preserve-credentials") if way else ()
    first = _hold(stack, ("unshare", *way, "-n"))
    to_first = ("nsenter", "-t", str(first), *enter, "-n")
    # Made from inside the first one, so that both belong to one user namespace.
    second = _hold(stack, (*to_first, "unshare", "-n"))
    to_second = ("nsenter", "-t", str(second), *enter, "-n")
    cable = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
    _run(to_first, "ip", *cable)
    for inside, ip in zip((to_first, to_second), IPS, strict=True):
        _run(inside, "ip", "link", "set", "lo", "up")
        _run(inside, "ip", "addr", "add", f"{ip}/24", "dev", "eth0")
        _run(inside, "ip", "link", "set", "eth0", "up")
        # Programs find their own address by asking for the way to some far one.
        _run(inside, "ip", "route", "add", "default", "dev", "eth0")
    networks = tuple(
        Network(ip, inside, os.readlink(f"/proc/{pid}/ns/net"))
        for ip, inside, pid in zip(IPS, (to_first, to_second), (first, second), strict=True)
    )
    return networks[0], networks[1]


def _hold(stack: contextlib.ExitStack, command: Sequence[str]) -> int:
    """Keep a namespace open by a sleeping process; its id."""
    process = subprocess.Popen(
        [*command, "sleep", str(HOLD_S)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    stack.callback(process.stderr.close)
    stack.callback(process.wait)
    stack.callback(process.kill)
    # unshare and nsenter become the sleep; until then the namespace is not made.
    deadline_s = time.monotonic() + READY_WAIT_S
    while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
        if process.poll() is not None:
            raise OSError(process.stderr.read())
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{' '.join(command)} does not come up")
        time.sleep(0.01)
    return process.pid


def _run(inside: Sequence[str], *command: str) -> None:
    subprocess.run([*inside, *command], check=True, capture_output=True, text=True, timeout=20)
