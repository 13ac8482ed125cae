"""Each fault of the schedule, done to a running service and undone again.

Responsible for doing. What a fault may excuse says `dice`, what came of it is judged by `verdict`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moe_serve.errors import FailedPrecondition, MoeServeError, ResourceExhausted
from moe_serve.shard.faults import FaultPoints
from tests.chaos.cluster import Nodes
from tests.chaos.faults import Faults
from tests.service_cluster import Placement, part_pids, wait_until
from tests.soak import bursts, inside
from tests.soak.dice import COPY_FAULTS, NODE_RANKS, Act, Kind
from tests.soak.health import ailments, below_floor
from tests.soak.load import Load

HEAL_MAX_S = 120.0
"""A service that has not healed by then is broken."""
ADMIN_MAX_S = 60.0
DRAIN_MAX_S = 60.0
EVICT_BAR_S = 5.0
FLOOR_BAR_S = 60.0
BUDGET_SHARES = (0.9, 0.75, 0.6, 0.3)

POINTS: dict[Kind, tuple[FaultPoints, ...]] = {
    Kind.CORRUPT_COPY: (FaultPoints(fail=frozenset({"corrupt"})),),
    Kind.SLOW_COPY: (FaultPoints(delay_copy_s=2.0),),
    Kind.HUNG_COPY: (FaultPoints(stop_copy_at=0.5), FaultPoints(stop_copy_at=0.0)),
    Kind.FAILED_STEP: tuple(
        FaultPoints(fail=frozenset({name})) for name in ("reserve", "copy", "verify", "release")
    ),
    Kind.NO_MEMORY_TO_RESERVE: (FaultPoints(fail=frozenset({"oom-reserve"})),),
    Kind.NO_MEMORY_TO_COPY: (FaultPoints(fail=frozenset({"oom-copy"})),),
    Kind.NO_MEMORY_TO_VERIFY: (FaultPoints(fail=frozenset({"oom-verify"})),),
    Kind.NO_MEMORY_TO_COMPUTE: (FaultPoints(fail=frozenset({"oom-compute"})),),
    Kind.SLOW_COMPUTE: (FaultPoints(delay_compute_s=0.2), FaultPoints(delay_compute_s=1.0)),
    Kind.HUNG_COMPUTE: (FaultPoints(hang_compute_s=30.0),),
}
CUTS = ({}, {"back": False}, {"there": False}, None)
"""Of variants: both ways, only to the shard, only from it, connections refused."""


@dataclass
class Deed:
    """What was done, and what came of it. Times: monotonic seconds; healed_s: after the end."""

    act: Act
    began_s: float
    ended_s: float = 0.0
    healed_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def over_s(self) -> float:
        """When the service was whole again."""
        return self.ended_s + self.healed_s


class Hands:
    """Does acts to a service under load."""

    def __init__(self, faults: Faults, nodes: Nodes, load: Load) -> None:
        self._faults = faults
        self._service = faults.service
        self._nodes = nodes
        self._load = load

    def do(self, act: Act) -> Deed:
        """Do it, wait while it lasts, undo it, wait until the service has healed. What could not be
        done is a violation, and the soak goes on."""
        from ray.exceptions import RayError

        deed = Deed(act, time.monotonic())
        gone = _anyhow
        try:
            gone = self._done(act, deed)
        except (AssertionError, KeyError, MoeServeError, RayError) as error:
            deed.violations.append(f"not done: {type(error).__name__}: {error}")
        deed.ended_s = time.monotonic()
        self._heal(deed, gone)
        return deed

    def _done(self, act: Act, deed: Deed) -> Callable[[Placement], bool]:
        """Do and undo it. Returns what must hold before healing can be judged."""
        gone = _anyhow
        match act.kind:
            case Kind.KILL_SHARD | Kind.KILL_ROUTER:
                gone = _replaced(act.target, self._faults.kill_part(act.target))
            case Kind.KILL_NODE:
                self._kill_node(act, deed)
            case Kind.KILL_CONTROLLER:
                self._kill_controller()
            case Kind.PAUSE_SHARD | Kind.PAUSE_ROUTER | Kind.PAUSE_CONTROLLER:
                with self._faults.paused(act.target):
                    time.sleep(act.seconds)
            case Kind.CUT:
                self._cut(act)
            case Kind.LOSE_REQUESTS | Kind.LOSE_REPLIES:
                self._lose(act)
            case Kind.BUDGET:
                self._budget(act, deed)
            case Kind.DRAIN:
                with self._drained(act.rank, deed):
                    time.sleep(act.seconds)
            case Kind.BAD_INPUT | Kind.CANCELS | Kind.SHORT_DEADLINES:
                self._burst(act, deed)
            case kind if kind in COPY_FAULTS:
                self._copy_fault(act, deed)
            case _:
                with self._ordered(act):
                    time.sleep(act.seconds)
        return gone

    # ------------------------------------------------------------------------------- processes
    def _kill_controller(self) -> None:
        term = self._ask(self._service.placement).term
        pid = self._faults.kill_controller()
        self._faults.await_controller(term, pid)

    def _kill_node(self, act: Act, deed: Deed) -> None:
        pids = self._faults.pids()
        for rank in NODE_RANKS[act.node]:
            self._faults.deeds.kill(pids[f"rank {rank}"])
        began_s = time.monotonic()
        self._nodes.kill(act.node)
        lost = set(NODE_RANKS[act.node])

        def floor_is_back(placement: Placement) -> bool:
            states = {rank.rank: rank.state for rank in placement.ranks}
            return all(states[rank] != "up" for rank in lost) and not below_floor(placement)

        try:
            self._service.wait("the floor is back without the node", floor_is_back, HEAL_MAX_S)
            took_s = time.monotonic() - began_s
            deed.notes.append(f"floor back after {took_s:.1f} s (bar {FLOOR_BAR_S:.0f} s)")
        except AssertionError as late:
            deed.violations.append(str(late))
        self._nodes.add(act.node)

    # ------------------------------------------------------------------------------- hooks
    @contextlib.contextmanager
    def _ordered(self, act: Act) -> Iterator[None]:
        from ray.exceptions import RayError

        choices, part = POINTS[act.kind], f"rank {act.rank}"
        # It may just have been given up for an earlier fault that looked healed.
        wait_until(f"{part} lives", lambda: part in self._faults.actor_names())
        self._faults.order_shard(part, choices[act.variant % len(choices)])
        try:
            yield
        finally:
            # A shard that was given up and replaced meanwhile holds no order any more.
            with contextlib.suppress(RayError, ValueError, AssertionError):
                self._faults.order_shard(part)

    def _copy_fault(self, act: Act, deed: Deed) -> None:
        """Ordered before there are copies, and over before they must have succeeded."""
        with contextlib.ExitStack() as ordered:
            ordered.enter_context(self._ordered(act))
            with self._drained(act.other, deed, wait=True):
                time.sleep(act.seconds)
                ordered.close()

    def _cut(self, act: Act) -> None:
        part, ways = f"rank {act.rank}", CUTS[act.variant]
        if ways is None:
            address = self._faults.shard_address(part)
            assert self._faults.proxy is not None, "the soak deploys with a proxy"
            self._faults.proxy.refuse(address)
        else:
            address = self._faults.cut(part, **ways)
        try:
            time.sleep(act.seconds)
        finally:
            self._faults.heal(address)

    def _lose(self, act: Act) -> None:
        name = self._faults.actor_names()[f"router-{act.router}"]
        replies = act.kind is Kind.LOSE_REPLIES
        inside.call_in(name, inside.lose_messages(act.rank, act.seconds, replies=replies))
        time.sleep(act.seconds)

    # ------------------------------------------------------------------------------- operators
    def _ask(self, question: Callable[[], Any], timeout_s: float = ADMIN_MAX_S) -> Any:
        """Ask the controller until it answers."""
        found: list[Any] = []

        def answered() -> bool:
            try:
                found[:] = [question()]
            except (FailedPrecondition, ResourceExhausted):
                raise
            except MoeServeError:
                self._service.close()
                return False
            return True

        wait_until("the controller answers", answered, timeout_s)
        return found[0]

    @contextlib.contextmanager
    def _drained(self, rank: int, deed: Deed, *, wait: bool = False) -> Iterator[None]:
        """The rank is emptied meanwhile. wait: when this ends, and not before it begins."""
        try:
            self._ask(lambda: self._service.admin.drain(rank))
        except (FailedPrecondition, ResourceExhausted) as refused:
            deed.notes.append(f"drain refused: {refused.message}")
            yield
            return
        began_s = time.monotonic()

        def empty(placement: Placement) -> bool:
            return all(slot.layer < 0 for slot in placement.ranks[rank].slots)

        try:
            if wait:
                yield
            self._service.wait(f"rank {rank} is empty", empty, DRAIN_MAX_S)
            deed.notes.append(f"drained after {time.monotonic() - began_s:.1f} s")
            if not wait:
                yield
        except AssertionError as late:
            deed.violations.append(str(late))
        finally:
            self._ask(lambda: self._service.admin.undrain(rank))

    def _budget(self, act: Act, deed: Deed) -> None:
        placement = self._ask(self._service.placement)
        before = placement.ranks[act.rank].budget_bytes
        slots = placement.ranks[act.rank].num_slots
        lower = int(slots * BUDGET_SHARES[act.variant]) * placement.slot_bytes

        def fits(found: Placement) -> bool:
            rank = found.ranks[act.rank]
            return rank.resident_bytes + rank.reserved_bytes <= lower

        began_s = time.monotonic()
        try:
            self._ask(lambda: self._service.admin.set_budget(act.rank, lower))
            self._service.wait(f"rank {act.rank} fits its budget", fits)
            took_s = time.monotonic() - began_s
            deed.notes.append(f"budget kept after {took_s:.1f} s (bar {EVICT_BAR_S:.0f} s)")
        except (FailedPrecondition, ResourceExhausted) as refused:
            deed.notes.append(f"budget refused: {refused.message}")
        except AssertionError as late:
            deed.violations.append(str(late))
        time.sleep(act.seconds)
        self._ask(lambda: self._service.admin.set_budget(act.rank, before))

    def _burst(self, act: Act, deed: Deed) -> None:
        kind = {
            Kind.BAD_INPUT: bursts.bad_input,
            Kind.CANCELS: bursts.cancels,
            Kind.SHORT_DEADLINES: bursts.short_deadlines,
        }[act.kind]
        address = self._service.routers[act.router]
        burst = self._load.run(kind(self._load, address, act.seed))
        deed.notes.append(f"{dict(sorted(burst.outcomes.items()))}")
        deed.violations += burst.wrong

    # ------------------------------------------------------------------------------- healing
    def _heal(self, deed: Deed, gone: Callable[[Placement], bool]) -> None:
        last: list[str] = []

        def healed(placement: Placement) -> bool:
            last[:] = ailments(placement)
            return gone(placement) and not last

        try:
            self._service.wait(f"healed from {deed.act}", healed, HEAL_MAX_S)
        except AssertionError as sick:
            deed.violations.append(f"{sick}: {last}")
        deed.healed_s = time.monotonic() - deed.ended_s


def _replaced(part: str, pid: int) -> Callable[[Placement], bool]:
    """Holds once the part is another process than the one that was ended."""
    return lambda placement: part_pids(placement).get(part, 0) not in (0, pid)


def _anyhow(_placement: Placement) -> bool:
    return True
