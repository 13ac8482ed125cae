"""Three more logical nodes on the shared local cluster, and their loss.

Not `ray.cluster_utils.Cluster`: it starts nodes inside this process with neither token
authentication nor Ray Client left out, and ends a node politely, while here a node must vanish as a
machine does. `moe_serve.bootstrap.local_ray` starts them as `moe-serve up` would, each a process
group of its own, and every process is ended by its id. Each node has the label `moe.node`, which
the services of these tests take for its failure domain. The head is node "a".
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from moe_serve.bootstrap.local_ray import LocalNode, LocalRay, join_local_ray
from tests.service_cluster import wait_until

MORE_NODES = ("c", "d")
JOIN_WAIT_S = 240.0


class Nodes:
    """The logical nodes of one cluster, by their label: "a" (the head), "b", "c", "d"."""

    def __init__(self, cluster: LocalRay) -> None:
        self.cluster = cluster
        self._next = len(cluster.nodes)
        self._alive: dict[str, LocalNode] = {
            dict(node.labels)["moe.node"]: node for node in cluster.nodes
        }
        self._added: list[LocalNode] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Nodes that were not removed."""
        return tuple(sorted(self._alive))

    def add(self, *names: str) -> None:
        """Start nodes, one after another, and wait until Ray counts each. Ray gives a node 30 s to
        start and ends it otherwise, so on a busy machine it may take more than one."""
        for name in names:
            assert name not in self._alive, f"node {name} is there"
            self._start(name)
            wait_until(f"node {name} is alive", lambda name=name: self._joined(name), JOIN_WAIT_S)

    def _start(self, name: str) -> None:
        node = join_local_ray(self.cluster, self._next, {"moe.node": name})
        self._next += 1
        self._added.append(node)
        self._alive[name] = node

    def _joined(self, name: str) -> bool:
        if has_ended(self._alive[name].pid):
            self._start(name)
        return name in alive()

    def kill(self, name: str) -> None:
        """Everything on a node ends at once, as `kill -9` ends it: its raylet, the raylet's
        helpers, and all actors and workers that it started."""
        assert name in {dict(added.labels)["moe.node"] for added in self._added}, "not ours to end"
        node = self._alive.pop(name)
        pids = descendants(node.pid)
        # Stopped first: none of them sees another one die and does something about it.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        _reap(node.pid)
        wait_until(f"Ray knows that node {name} is gone", lambda: name not in alive(), JOIN_WAIT_S)

    def end(self) -> None:
        """End the nodes that were added here."""
        for node in self._added:
            for pid in descendants(node.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _reap(node.pid)


@contextlib.contextmanager
def more_nodes(cluster: LocalRay, names: tuple[str, ...] = MORE_NODES) -> Iterator[Nodes]:
    """The cluster with further nodes, for as long as the context lasts: head + 3. Only these may be
    removed: whoever shares the cluster counts on the others."""
    nodes = Nodes(cluster)
    try:
        nodes.add(*names)
        yield nodes
    finally:
        nodes.end()


def alive() -> set[str]:
    """Labels `moe.node` of the nodes that Ray counts as alive."""
    from moe_serve.bootstrap.fleet import alive_nodes

    return {node.labels.get("moe.node", "") for node in alive_nodes()}


def has_ended(pid: int) -> bool:
    """Whether a child of this process is over."""
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return done == pid


def descendants(leader: int) -> list[int]:
    """A process and all that it started, on however many levels, itself first. Nothing where it is
    no more: then its number may be another's."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(words[1]), []).append(int(folder.name))
    if not Path(f"/proc/{leader}").exists():
        return []
    found = [leader]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
