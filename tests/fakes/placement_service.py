"""A controller's admin port without a controller: made-up layout, changing traffic, moves.

Enough of PlacementService for a client that only looks: GetPlacement, WatchPlacement, GetLoad,
WatchLoad, WatchEvents. Figures agree with each other (imbalance is that of the shown rank pairs),
so a page that shows nonsense is at fault, not this file. By hand, with the page before it:

    python -m tests.fakes.placement_service --layers 58 --experts 256 --ranks 32
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc import placement_pb2_grpc
from placement import scoring
from tests.fakes.placement_commands import PlacementCommands

PHASES = 2
RULES = {
    "replicate": "hot expert",
    "migrate": "wrong neighbours",
    "evict": "replica stopped paying",
}
KINDS = {
    "replicate": pb.MOVE_KIND_REPLICATE,
    "migrate": pb.MOVE_KIND_MIGRATE,
    "evict": pb.MOVE_KIND_EVICT,
}


@dataclass
class Script:
    """Size and pace of the made-up service."""

    layers: int = 4
    experts: int = 32
    ranks: int = 4
    spare: int = 2
    """Slots a rank and layer above an even share."""
    window_s: float = 1.0
    pairs: int = 40_000
    """Pairs a window and layer."""
    domain_windows: int = 24
    """Windows until the traffic's domain changes."""
    model: str = "tiny-moe"
    simulated: bool = True
    seed: int = 1
    problems: list[str] = field(default_factory=list)
    up_s: float = 0.0
    """Seconds for which it has run already."""


class FakePlacementService(PlacementCommands, placement_pb2_grpc.PlacementServiceServicer):
    """State and servicer in one. Everything runs in the loop that calls it."""

    def __init__(self, script: Script | None = None) -> None:
        super().__init__()
        self.script = s = script or Script()
        self.rng = np.random.default_rng(s.seed)
        self.state = "steady"
        self.term, self.epoch, self.window = 1, 1, 0
        self.began_s = time.monotonic() - s.up_s
        self.records: list[pb.DecisionRecord] = []
        self.moves: list[pb.Move] = []
        self.done = {"replicate": 0, "migrate": 0, "evict": 0}
        self.replaced = 0
        self.plans = 0
        self.load: pb.GetLoadResponse | None = None
        self.load_closed_s = 0.0
        self.earlier_s = 0.0
        """Its seconds in earlier lives."""
        self.ahead_s = 0.0
        """By which its clock is ahead of that of others; decisions are dated by it."""
        self.rank_pairs: NDArray[np.int64] = np.zeros((s.ranks, s.layers), np.int64)
        self.demand: NDArray[np.int64] = np.zeros((PHASES, s.layers, s.experts), np.int64)
        self._tags = 0
        self.slots: list[list[dict[str, Any]]] = [[] for _ in range(s.ranks)]
        self.calls: list[str] = []
        self.refuse: grpc.StatusCode | None = None
        self.news = asyncio.Event()
        self._fill()

    # ---- layout

    def _fill(self) -> None:
        s = self.script
        share = -(-s.experts // s.ranks)
        width = s.layers * (share + s.spare)
        for rank in range(s.ranks):
            mine = [(n, e) for n in range(s.layers) for e in range(s.experts) if e // share == rank]
            for layer, expert in mine:
                self.slots[rank].append(self._filled(layer, expert, "LISTED"))
            while len(self.slots[rank]) < width:
                self.slots[rank].append({"layer": -1, "expert": -1, "tag": 0, "state": ""})

    def _filled(self, layer: int, expert: int, state: str) -> dict[str, Any]:
        self._tags += 1
        return {"layer": layer, "expert": expert, "tag": self._tags, "state": state}

    def holders(self, layer: int, expert: int) -> list[int]:
        """Ranks with a listed replica."""
        return [
            r for r, slots in enumerate(self.slots) if self._slot_of(r, layer, expert, slots) >= 0
        ]

    def _slot_of(
        self, rank: int, layer: int, expert: int, slots: list[dict[str, Any]] | None = None
    ) -> int:
        for index, slot in enumerate(slots if slots is not None else self.slots[rank]):
            if (slot["layer"], slot["expert"], slot["state"]) == (layer, expert, "LISTED"):
                return index
        return -1

    # ---- traffic

    def _shape_of_domain(self, domain: int) -> NDArray[np.float64]:
        s = self.script
        rng = np.random.default_rng([s.seed, domain])
        heat = 1.0 / np.arange(1, s.experts + 1) ** 0.9
        rows = np.stack([rng.permutation(heat) for _ in range(s.layers)])
        rows *= rng.gamma(4.0, 0.25, size=rows.shape)
        # A few experts that a domain never touches.
        rows[:, rng.permutation(s.experts)[: max(1, s.experts // 16)]] = 0.0
        return np.asarray(rows / rows.sum(axis=1, keepdims=True))

    def close_window(self) -> None:
        """Close a window of new traffic and tell the watchers."""
        s = self.script
        shape = self._shape_of_domain(self.window // s.domain_windows)
        self.window += 1
        busy = 0.75 + 0.25 * np.sin(self.window / 7.0)
        for phase, part in enumerate((0.7, 0.3)):
            self.demand[phase] = self.rng.poisson(shape * s.pairs * part * busy)
        self._spread()
        self.tell()

    def _spread(self) -> None:
        s = self.script
        total = self.demand.sum(axis=0)
        self.rank_pairs[:] = 0
        where: dict[tuple[int, int], list[int]] = {}
        for rank, slots in enumerate(self.slots):
            for slot in slots:
                if slot["state"] == "LISTED":
                    where.setdefault((slot["layer"], slot["expert"]), []).append(rank)
        for (layer, expert), ranks in where.items():
            for rank in ranks:
                self.rank_pairs[rank, layer] += total[layer, expert] // len(ranks)
        at_s = time.monotonic() - self.began_s
        even = scoring.balancedness(self.rank_pairs)
        by_layer = 1.0 / scoring.layer_balancedness(self.rank_pairs) - 1.0
        busy = np.outer(self.rank_pairs.sum(axis=1), [0.7, 0.3]) * 1e-6
        self.load_closed_s = time.monotonic()
        self.load = pb.GetLoadResponse(
            window=self.window,
            start_s=at_s - s.window_s,
            end_s=at_s,
            demand=self.demand.astype("<i8").tobytes(),
            executed=self.demand.astype("<i8").tobytes(),
            rank_pairs=self.rank_pairs.astype("<i8").tobytes(),
            rank_busy=busy.astype("<f8").tobytes(),
            num_phases=PHASES,
            num_layers=s.layers,
            num_experts=s.experts,
            num_ranks=s.ranks,
            balancedness=even,
            imbalance=1.0 / even - 1.0,
            layer_imbalance=by_layer.tolist(),
        )

    # ---- moves

    def record(self, rule: str, outcome: str, detail: str = "", **more: Any) -> None:
        """Leave a decision record."""
        numbers = more.pop("numbers", {})
        at_s = time.monotonic() - self.began_s
        self.records.append(
            pb.DecisionRecord(
                at_s=at_s,
                seq=len(self.records) + 1,
                rule=rule,
                outcome=outcome,
                detail=detail,
                wall_time_s=datetime.now(UTC).timestamp() + self.ahead_s,
                numbers=numbers,
                **{"move_id": -1, **more},
            )
        )

    def begin_plan(self, wanted: int = 3) -> list[pb.Move]:
        """Start a plan of up to `wanted` moves against the worst layers. [] where nothing fits."""
        self.plans += 1
        plan_id, moves = f"{self.epoch}-{self.plans:04x}", []
        order = np.argsort(-self.rank_pairs.max(axis=0), kind="stable")
        for layer in [int(n) for n in order[:wanted]]:
            move = self._begin_move(plan_id, len(moves), layer)
            if move is not None:
                moves.append(move)
        if moves:
            self.moves += moves
            del self.moves[:-60]
            self.state = "moving"
            self.record(
                "regret_reached",
                "started",
                f"auto plan of {len(moves)} moves",
                plan_id=plan_id,
                numbers={"moves": float(len(moves)), "regret_s": 0.8, "cost_s": 0.5},
                copy_bytes=sum(m.copy_bytes for m in moves),
            )
        return moves

    def _begin_move(self, plan_id: str, move_id: int, layer: int) -> pb.Move | None:
        hot = int(np.argmax(self.rank_pairs[:, layer]))
        cool = int(np.argmin(self.rank_pairs[:, layer]))
        free = next((i for i, s in enumerate(self.slots[cool]) if not s["state"]), -1)
        here = sorted(
            {
                s["expert"]
                for s in self.slots[hot]
                if s["layer"] == layer and s["state"] == "LISTED"
            },
            key=lambda e: -int(self.demand[:, layer, e].sum()),
        )
        twice = [e for e in here if len(self.holders(layer, e)) > 1]
        kind = ("replicate", "migrate", "replicate", "evict")[(self.plans + move_id) % 4]
        if kind == "evict" and twice:
            expert, source, target = twice[-1], hot, hot
            self.slots[hot][self._slot_of(hot, layer, expert)]["state"] = "UNLISTED"
        else:
            kind = "replicate" if kind == "evict" else kind
            fits = [e for e in here if cool not in self.holders(layer, e)]
            if free < 0 or not fits:
                return None
            expert = fits[0] if kind == "replicate" else fits[len(fits) // 2]
            source, target = hot, cool
            self.slots[cool][free] = self._filled(layer, expert, "COPYING")
        share = self.demand[:, layer, expert].sum() / max(1, self.demand[:, layer].sum())
        return pb.Move(
            move_id=move_id,
            plan_id=plan_id,
            kind=KINDS[kind],
            layer=layer,
            expert=expert,
            source_rank=source,
            target_rank=target,
            copy_bytes=0 if kind == "evict" else 42 << 20,
            cross_node=source // 2 != target // 2,
            reason=(
                f"{RULES[kind]}: {share * self.script.experts:.1f}x fair share, "
                f"rank {hot} carries most of layer {layer}"
            ),
            gain_s_per_s=float(share) * 0.1,
            state=pb.MOVE_STATE_RUNNING,
            started_at_s=time.monotonic() - self.began_s,
        )

    def finish_plan(self) -> None:
        """End every running move: the table changes, the epoch grows."""
        ended = [m for m in self.moves if m.state == pb.MOVE_STATE_RUNNING]
        for move in ended:
            kind = next(k for k, n in KINDS.items() if n == move.kind)
            if kind in {"migrate", "evict"}:
                self._drop(move.source_rank, move.layer, move.expert)
            for slot in self.slots[move.target_rank]:
                if (slot["layer"], slot["expert"], slot["state"]) == (
                    move.layer,
                    move.expert,
                    "COPYING",
                ):
                    slot["state"] = "LISTED"
            move.state = pb.MOVE_STATE_DONE
            move.ended_at_s = time.monotonic() - self.began_s
            self.done[kind] += 1
        if ended:
            self.epoch += 1
            self.record("plan_done", "done", "every step is done", plan_id=ended[0].plan_id)
        self.state = "steady"

    def _drop(self, rank: int, layer: int, expert: int) -> None:
        for index, slot in enumerate(self.slots[rank]):
            if (slot["layer"], slot["expert"]) == (layer, expert) and slot["state"] != "COPYING":
                self.slots[rank][index] = {"layer": -1, "expert": -1, "tag": 0, "state": ""}
                return

    # ---- servicer

    def placement(self) -> pb.GetPlacementResponse:
        """Who is where, now."""
        s = self.script
        return pb.GetPlacementResponse(
            model=s.model,
            service_id="fake",
            num_layers=s.layers,
            num_experts=s.experts,
            top_k=4,
            slot_bytes=42 << 20,
            term=self.term,
            epoch=self.epoch,
            epochs_published=self.epoch,
            state=self.state,
            problems=s.problems,
            policy="incremental",
            network="loopback",
            simulated=s.simulated,
            uptime_s=time.monotonic() - self.began_s - self.earlier_s,
            moves=self.moves,
            moves_done=self.done,
            replicas_replaced=self.replaced,
            ranks=[self._rank(rank) for rank in range(s.ranks)],
            routers=[self._router()],
        )

    def _router(self) -> pb.Router:
        served = float(self.window)
        return pb.Router(
            router="router-0",
            state="up",
            incarnation=1,
            applied_epoch=self.epoch,
            counters={"requests": 100 * served, "tokens": 8_000 * served},
            quantiles={"dispatch_p50_s": 0.004, "dispatch_p99_s": 0.011},
        )

    def _rank(self, rank: int) -> pb.Rank:
        slots = self.slots[rank]
        return pb.Rank(
            rank=rank,
            node=f"node-{rank // 2}",
            failure_domain=f"node-{rank // 2}",
            state="draining" if rank in self.drained else "up",
            num_slots=len(slots),
            budget_bytes=len(slots) * 42 << 20,
            resident_bytes=sum(bool(s["state"]) for s in slots) * 42 << 20,
            backlog_s=0.002 * rank,
            profile="declared-h200",
            memory=pb.RankMemory(
                slab_bytes=len(slots) * 42 << 20,
                free_bytes=sum(not s["state"] for s in slots) * 42 << 20,
                largest_free_run_bytes=42 << 20,
                loaded_bytes=sum(bool(s["state"]) for s in slots) * 42 << 20,
                process_bytes=900 << 20,
                host_cache_bytes=3 << 30,
            ),
            copies=[
                pb.RunningCopy(
                    step_id=100 * rank + index,
                    slot=index,
                    layer=slot["layer"],
                    expert=slot["expert"],
                    source=f"rank {(rank + 1) % self.script.ranks}",
                    done_bytes=21 << 20,
                    total_bytes=42 << 20,
                    seconds=0.5,
                )
                for index, slot in enumerate(slots)
                if slot["state"] == "COPYING"
            ],
            slots=[pb.Slot(index=index, **slot) for index, slot in enumerate(slots)],
        )

    def tell(self) -> None:
        """Wake the watchers: something is new."""
        told, self.news = self.news, asyncio.Event()
        told.set()

    async def _guard(self, name: str, context: Any) -> None:
        self.calls.append(name)
        if self.refuse is not None:
            await context.abort(self.refuse, "made up")
        await self._let_in(name, context)

    async def GetPlacement(self, request: Any, context: Any) -> pb.GetPlacementResponse:
        await self._guard("GetPlacement", context)
        return self.placement()

    async def WatchPlacement(
        self, request: Any, context: Any
    ) -> AsyncIterator[pb.WatchPlacementResponse]:
        await self._guard("WatchPlacement", context)
        while True:
            news = self.news
            yield pb.WatchPlacementResponse(placement=self.placement())
            await news.wait()

    def _aged(self) -> pb.GetLoadResponse:
        assert self.load is not None
        self.load.age_s = time.monotonic() - self.load_closed_s
        return self.load

    async def GetLoad(self, request: Any, context: Any) -> pb.GetLoadResponse:
        await self._guard("GetLoad", context)
        if self.load is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no window has closed")
        return self._aged()

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[pb.WatchLoadResponse]:
        await self._guard("WatchLoad", context)
        sent = 0
        while True:
            news = self.news
            if self.load is not None and self.load.window > sent:
                sent = self.load.window
                yield pb.WatchLoadResponse(load=self._aged())
            await news.wait()

    async def WatchEvents(
        self, request: Any, context: Any
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        await self._guard("WatchEvents", context)
        sent = request.after_seq
        while True:
            news = self.news
            fresh = self.records[sent:]
            sent += len(fresh)
            for record in fresh:
                yield pb.WatchEventsResponse(record=record)
            if request.no_follow:
                return
            await news.wait()


async def serve(service: FakePlacementService, port: int = 0) -> tuple[grpc.aio.Server, str]:
    """A loopback server of the service and its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    placement_pb2_grpc.add_PlacementServiceServicer_to_server(service, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, f"127.0.0.1:{bound}"


async def play(service: FakePlacementService) -> None:
    """Close windows for ever; plan every few windows, finish a plan two windows later."""
    while True:
        service.close_window()
        step = service.window % 6
        if step == 3:
            service.begin_plan()
        elif step == 5:
            service.finish_plan()
        else:
            service.record("in_balance" if step < 3 else "regret_below_cost", "kept")
        service.tell()
        await asyncio.sleep(service.script.window_s)


async def _main(script: Script, port: int) -> None:
    from moe_serve.dashboard.server import DashboardServer
    from moe_serve.dashboard.settings import DashboardSettings

    service = FakePlacementService(script)
    server, address = await serve(service)
    page = DashboardServer(DashboardSettings(admin_address=address, port=port))
    print(await page.start(), flush=True)
    try:
        await play(service)
    finally:
        await page.stop()
        await server.stop(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "experts", "ranks", "spare", "pairs"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Script, name))
    parser.add_argument("--window-s", type=float, default=1.0)
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--port", type=int, default=0)
    chosen = vars(parser.parse_args())
    chosen_port = chosen.pop("port")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(Script(**chosen), chosen_port))
