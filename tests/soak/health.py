"""What is wrong with a service now, and what its processes use.

Responsible for looking only. Called between faults, by the sampler, and at the end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from pathlib import Path

from moe_serve.errors import MoeServeError
from tests.service_cluster import Placement, Service, locations
from tests.soak import inside
from tests.soak.dice import RANKS, ROUTERS
from tests.soak.slopes import Life, Reading

FLOOR = 2
SAMPLE_S = 5.0
RESTING = frozenset({"steady", "paused", "moving", "planning"})


def ailments(placement: Placement) -> list[str]:
    """What keeps a service from being whole, in words: parts, problems, missing experts, experts in
    fewer than two failure domains."""
    found = [f"state {placement.state}"] if placement.state not in RESTING else []
    found += list(placement.problems)
    found += [f"no replica of expert {key}" for key in placement.missing]
    found += [f"rank {rank.rank} is {rank.state}" for rank in placement.ranks if rank.state != "up"]
    found += [f"{one.router} is {one.state}" for one in placement.routers if one.state != "up"]
    found += [f"rank {rank.rank} has no process" for rank in placement.ranks if not rank.pid]
    if (len(placement.ranks), len(placement.routers)) != (RANKS, ROUTERS):
        found.append(f"{len(placement.ranks)} ranks and {len(placement.routers)} routers")
    if low := below_floor(placement):
        found.append(f"{len(low)} experts below the floor: {low[:3]}")
    return found


def below_floor(placement: Placement) -> list[tuple[int, int]]:
    """(layer, expert) of those in fewer than two failure domains."""
    domain = {rank.rank: rank.failure_domain for rank in placement.ranks}
    held = locations(placement)
    return [
        (layer, expert)
        for layer in range(placement.num_layers)
        for expert in range(placement.num_experts)
        if len({domain[rank] for rank, _ in held.get((layer, expert), [])}) < FLOOR
    ]


def moves_of(placement: Placement) -> int:
    """Finished moves since the service began."""
    return sum(int(count) for count in placement.moves_done.values())


def stray_slots(placement: Placement) -> list[str]:
    """Slots that are used and not listed, and bytes that belong to none, in a service at rest."""
    found = []
    for rank in placement.ranks:
        used = Counter(slot.state for slot in rank.slots if slot.layer >= 0)
        listed = used.pop("LISTED", 0)
        if used or rank.reserved_bytes or rank.resident_bytes != listed * placement.slot_bytes:
            found.append(
                f"rank {rank.rank}: {listed} slots listed, {dict(used)} others, "
                f"{rank.resident_bytes} bytes resident of {listed * placement.slot_bytes}, "
                f"{rank.reserved_bytes} reserved"
            )
    return found


def stray_memory(service: Service, placement: Placement) -> list[str]:
    """What shards and routers hold, by their own word, beyond what the placement says."""
    found = []
    for name in part_actors(service):
        kind, place = name.split(":")[1:3]
        if kind == "shard":
            counts = inside.call_in(name, inside.shard_counts())
            rank = next(one for one in placement.ranks if one.rank == int(place))
            listed = sum(slot.state == "LISTED" for slot in rank.slots)
            wrong = {
                what: counts[what]
                for what, want in (
                    ("held_slots", listed),
                    ("resident", listed),
                    ("slot_bytes", listed * placement.slot_bytes),
                    ("copies", 0),
                    ("waiting", 0),
                )
                if counts[what] != want
            }
            if wrong:
                found.append(f"{name}: {wrong}, {listed} slots are listed")
        else:
            counts = inside.call_in(name, inside.router_counts())
            busy = {what: count for what, count in counts.items() if count}
            if busy:
                found.append(f"{name}: nobody calls, yet {busy}")
    return found


def part_actors(service: Service) -> list[str]:
    """Actor names of the shards and routers that live, by Ray's word."""
    from moe_serve.bootstrap.fleet import actor_names, controller_name

    names = actor_names(service.config.service)
    return [name for name in names if name != controller_name(service.config.service)]


def stray_parts(service: Service) -> list[str]:
    """Parts that live without belonging to the fleet, or are missing."""
    wanted = {("shard", str(rank)): 1 for rank in range(RANKS)}
    wanted |= {("router", f"router-{number}"): 1 for number in range(ROUTERS)}
    found = Counter(tuple(name.split(":")[1:3]) for name in part_actors(service))
    if dict(found) == wanted:
        return []
    return [f"parts that live: {dict(found)}"]


class Sampler:
    """Reads every process of the service now and then, from a thread of its own."""

    def __init__(self, service: Service) -> None:
        # Its own admin client: the other one is used by another thread.
        self._service = Service(service.config, service.deployed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.lives: dict[tuple[str, int], Life] = {}
        self.skipped = 0
        """Looks at which the controller did not answer."""
        self.moves = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60.0)
        self._service.close()

    def _run(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            try:
                placement = self._service.placement()
            except MoeServeError:
                self._service.close()
                self.skipped += 1
                continue
            self._look(placement)

    def _look(self, placement: Placement) -> None:
        # A fresh controller has counted no move yet.
        self.moves = max(self.moves, moves_of(placement))
        for rank in placement.ranks:
            self._read(f"rank {rank.rank}", rank.pid, None, float(rank.resident_bytes))
        tasks = self._tasks()
        for router in placement.routers:
            self._read(router.router, router.pid, tasks.get(router.router))
        self._read("controller", self._service.controller_pid(), tasks.get("controller"))

    def _tasks(self) -> dict[str, dict[str, int]]:
        """Tasks of the loops that answer now, by the coroutine they run."""
        from ray.exceptions import RayError

        from moe_serve.bootstrap.fleet import controller_name

        found = {}
        controller = controller_name(self._service.config.service)
        routers = [name for name in part_actors(self._service) if ":router:" in name]
        for name in (controller, *routers):
            place = "controller" if name == controller else name.split(":")[2]
            # One that is paused or gone does not answer: the next look will tell.
            with contextlib.suppress(RayError, ValueError):
                found[place] = inside.call_in(name, inside.task_names(), 2.0)
        return found

    def _read(
        self, part: str, pid: int, tasks: dict[str, int] | None, slot_bytes: float = -1.0
    ) -> None:
        usage = usage_of(pid)
        if usage is None:
            return
        rss_bytes, fds, threads = usage
        kinds = {"fds": fds} | ({"tasks": tasks} if tasks is not None else {})
        counts = {name: float(sum(kind.values())) for name, kind in kinds.items()}
        life = self.lives.setdefault((part, pid), Life(part, pid))
        life.readings.append(
            Reading(
                at_s=time.monotonic(),
                moves=self.moves,
                rss_bytes=rss_bytes,
                counts={**counts, "threads": float(threads)},
                slot_bytes=slot_bytes,
                kinds=kinds,
            )
        )


def usage_of(pid: int) -> tuple[int, dict[str, int], int] | None:
    """(resident bytes, open descriptors by kind, threads) of a process, None where it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text().splitlines()
            if ":" in line
        )
        tcp = _tcp_sockets(folder)
        kinds: Counter[str] = Counter()
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                kinds[_kind_of(os.readlink(link), tcp)] += 1
        return int(status["VmRSS"].split()[0]) * 1024, dict(kinds), int(status["Threads"])
    except (OSError, KeyError):
        return None


def _kind_of(target: str, tcp: dict[str, str]) -> str:
    """What an open descriptor is: of a socket whether it is TCP, of a file its name."""
    kind, _, inode = target.partition(":[")
    if kind == "socket":
        return tcp.get(inode.rstrip("]"), "unix socket")
    return target if target.startswith("anon_inode") else kind.rpartition("/")[2]


def _tcp_sockets(folder: Path) -> dict[str, str]:
    """Inode -> "listening" or "tcp" of the machine's TCP sockets."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in (folder / "net" / name).read_text().splitlines()[1:]:
            words = line.split()
            found[words[9]] = "listening" if words[3] == "0A" else "tcp"
    return found
