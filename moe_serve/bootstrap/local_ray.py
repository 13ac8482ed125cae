"""Start and end a Ray cluster of our own on this machine, by process id.

Responsible for clusters that `up` and `demo` start where no address is given: one process group a
node, its own temporary folder, token authentication on. Never runs `ray stop`, which would end
every Ray on the machine.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_serve.bootstrap.signals import uninterrupted
from moe_serve.errors import StartRefused

START_TIMEOUT_S = 90.0
"""A Ray head takes 3 s on an idle machine and 30 s on a busy one."""
STOP_TIMEOUT_S = 5.0
"""From SIGTERM to SIGKILL. Ray itself would wait 30 s for work to end, of which there is none: our
actors are ended before."""
OBJECT_STORE_BYTES = 100 << 20
"""Token batches never touch the object store, so it is small."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """One Ray node we started. `pid` leads a process group of its own."""

    pid: int
    labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A cluster we started."""

    address: str
    temp_dir: str
    nodes: tuple[LocalNode, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        """Leaders of the process groups, head first."""
        return tuple(node.pid for node in self.nodes)


def ensure_auth(folder: Path) -> None:
    """Turn Ray's token authentication on for this process and its children, with a token file of
    our own (0600).

    A token the operator already configured (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token)
    is used as it is.
    """
    # Ray reads the mode once, when it is imported: import it after this.
    assert "ray" not in sys.modules or "RAY_AUTH_MODE" in os.environ, "ray was imported too early"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    if "RAY_AUTH_TOKEN_PATH" in os.environ or (Path.home() / ".ray" / "auth_token").exists():
        return
    file = folder / "ray_auth_token"
    if not file.exists():
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)


def start_local_ray(
    temp_dir: Path,
    *,
    labels: Sequence[Mapping[str, str]] = ({},),
    num_cpus: int = 4,
    num_gpus: int = 0,
) -> LocalRay:
    """Start a head and one more node for each further entry of `labels`. Raises StartRefused with
    Ray's own words.

    Leaves nothing running where it fails.
    """
    temp_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    current = temp_dir / "ray_current_cluster"
    current.unlink(missing_ok=True)
    nodes: list[LocalNode] = []
    try:
        head = _spawn(
            ["--head", "--port=0", f"--temp-dir={temp_dir}", "--include-dashboard=false"],
            temp_dir,
            0,
            labels[0],
            num_cpus,
            num_gpus,
        )
        nodes.append(head)
        address = _wait_for_address(current, head, temp_dir)
        for number, extra in enumerate(labels[1:], start=1):
            nodes.append(
                _spawn([f"--address={address}"], temp_dir, number, extra, num_cpus, num_gpus)
            )
    except BaseException:
        stop_local_ray([node.pid for node in nodes], str(temp_dir))
        raise
    return LocalRay(address, str(temp_dir), tuple(nodes))


def join_local_ray(
    cluster: LocalRay, number: int, labels: Mapping[str, str], *, num_cpus: int = 4
) -> LocalNode:
    """Start one more node of a cluster, with a number that none of its nodes had. Returns before it
    is alive; whoever ends the cluster must be told its pid."""
    return _spawn(
        [f"--address={cluster.address}"], Path(cluster.temp_dir), number, labels, num_cpus, 0
    )


def _spawn(
    place: Sequence[str],
    temp_dir: Path,
    number: int,
    labels: Mapping[str, str],
    num_cpus: int,
    num_gpus: int,
) -> LocalNode:
    command = [
        sys.executable,
        "-m",
        "moe_serve.ray_private",
        *place,
        f"--num-cpus={num_cpus}",
        f"--num-gpus={num_gpus}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        "--block",
    ]
    if labels:
        command.append("--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()))
    with (temp_dir / f"node-{number}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - every argument is ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "RAY_TMPDIR": str(temp_dir)},
        )
    # The node outlives this object and often this program; it is looked after by its id from here
    # on, so Popen must neither warn that it runs nor reap it.
    process.returncode = 0
    return LocalNode(process.pid, tuple(sorted(labels.items())))


def _wait_for_address(current: Path, head: LocalNode, temp_dir: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if current.exists() and (address := current.read_text().strip()):
            return address
        if not _alive(head.pid):
            break
        time.sleep(0.1)
    log = (temp_dir / "node-0.log").read_text(errors="replace").strip().splitlines()
    raise StartRefused(
        f"Ray did not start: {log[-1] if log else 'no output'} (log: {temp_dir}/node-0.log)"
    )


def _alive(pid: int) -> bool:
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # not our child: started by an earlier command
        done = 0
    if done == pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return _state(pid) != "Z"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "?"


def stop_local_ray(pids: Sequence[int], temp_dir: str) -> None:
    """End the process groups led by `pids`, last started first: SIGTERM, then SIGKILL after
    STOP_TIMEOUT_S, then whatever they left behind. A pid that is no Ray node of this temporary
    folder any more is left alone. An impatient second Ctrl-C changes nothing."""
    with uninterrupted():
        _stop(pids, temp_dir)


def _stop(pids: Sequence[int], temp_dir: str) -> None:
    pids = [pid for pid in pids if _is_ours(pid, temp_dir)]
    for pid in reversed(pids):
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
        time.sleep(0.1)
    for pid in pids:
        # The group may outlive its leader: raylet and gcs_server are in it.
        _signal_group(pid, signal.SIGKILL)
    # Each actor leads a group of its own, and would notice only later that its raylet is gone.
    end_family(temp_dir)


def end_family(temp_dir: str) -> None:
    """End every process of the cluster of this temporary folder at once, whoever started it and
    whatever they start meanwhile. For one whose leaders nobody knows any more."""
    deadline, sessions = time.monotonic() + STOP_TIMEOUT_S, set[int]()
    while (found := _family(temp_dir, sessions)) and time.monotonic() < deadline:
        for pid in found:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.05)


def local_ray_alive(pids: Sequence[int], temp_dir: str) -> bool:
    """Whether a node of this temporary folder is alive among `pids`."""
    return any(_is_ours(pid, temp_dir) and _alive(pid) for pid in pids)


def _family(temp_dir: str, sessions: set[int]) -> list[int]:
    """Every process that our Ray nodes of this folder started, on however many levels.

    Some give themselves a title (Ray's agents), which is written over what tells whose they are:
    these are known by their session, which a node of ours leads, or led. `sessions`: those found so
    far, for when nothing else is left of one.
    """
    ids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    ours = {pid for pid in ids if _is_ours(pid, temp_dir)}
    led = {_session(pid) for pid in ours} - {os.getsid(0), 0}
    sessions |= {leader for leader in led if leader in ours or leader not in ids}
    named_anew = {pid for pid in ids if _session(pid) in sessions and _state(pid) not in "Z?"}
    return sorted(ours | named_anew)


def _session(pid: int) -> int:
    """Session of a process, 0 for one that has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _is_ours(pid: int, temp_dir: str) -> bool:
    """Whether the process is one of ours: a record may outlive its process and the id be taken."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"RAY_TMPDIR={temp_dir}".encode() in environment


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
