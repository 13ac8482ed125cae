"""What it costs a router to say where the time of its requests goes.

    python -m benchmarks.stages --json FILE

One router, its shards in the same process, which answer at once: all that a call takes is the
router's own. Blocks of one-row calls whose stages are counted take turns with blocks in which
nothing counts them, beside pairs of blocks in which both do; and the whole of it, stamps and
counts, is run alone. Figures are medians over rounds of ratios of processor seconds a call, with
their intervals.

Responsible for the order of the blocks, the table and the file. A missed bar is printed and
written, and the program still exits 0. About two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import record, use_one_thread, write_json

if TYPE_CHECKING:
    from moe_serve.ports import SubCall, SubReply
    from moe_serve.router.checks import ForwardInput
    from moe_serve.router.dispatch import RouterCore
    from placement.routing import RankAddress, RoutingTable

LAYERS, EXPERTS, HIDDEN = 2, 64, 64
FAN_OUTS = (1, 4, 8)
"""Ranks, and pairs of the one row: each goes to another rank."""
ROUNDS, CALLS = 200, 60
BAR = 1.02


class NoStages:
    """Counts nothing."""

    def answered(self, _phase: int, _stamps: object, _ended_s: float) -> None:
        """A request was answered."""


class AtOnce:
    """`ports.ShardChannel` to a shard of this process that answers with zeros."""

    connected = True

    def __init__(self, address: RankAddress) -> None:
        self.address = address

    async def forward(self, call: SubCall) -> SubReply:
        """The answer: waited 10 us, computed 20 us, was there 5 us besides."""
        import numpy as np

        from moe_serve.ports import SubReply

        return SubReply(
            call_id=call.call_id,
            sub_id=call.sub_id,
            incarnation=1,
            term=1,
            epoch=1,
            row_status=np.zeros(len(call.row_id), np.uint8),
            partial=np.zeros(call.rows.shape, call.rows.dtype),
            backlog_s=0.0,
            backlog_seq=1,
            queue_s=1e-5,
            compute_s=2e-5,
            rest_s=5e-6,
        )

    async def fetch_table(self) -> RoutingTable | None:
        """None: there is no newer one."""
        return None

    async def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Round:
    """Processor seconds a call of two neighbours, and of a pair in which both count."""

    counted_s: float
    plain_s: float
    first_s: float
    second_s: float


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS, help="calls a block")
    options = parser.parse_args(arguments)

    use_one_thread()  # before anything below imports numpy
    environment = record("stages", options.seed)
    for line in environment.lines():
        print(line)
    results = asyncio.run(_measure(options.seed, options.rounds, options.calls))
    if options.json is not None:
        write_json(options.json, environment, results)
    return 0


async def _measure(seed: int, num_rounds: int, calls: int) -> dict[str, Any]:
    print(f"{'ranks':>5}  {'call us':>8}  {'counted / not':>22}  {'both':>22}  alone us")
    results: dict[str, Any] = {"bar": BAR}
    for num_ranks in FAN_OUTS:
        core, request = _router(num_ranks, seed)
        try:
            rounds = await _rounds(core, request, num_rounds, calls)
        finally:
            await core.stop()
        results[f"ranks_{num_ranks}"] = _told(num_ranks, rounds, _alone_s(num_ranks))
    return results


def _told(num_ranks: int, rounds: Sequence[Round], alone_s: float) -> dict[str, Any]:
    from benchmarks.dataplane_figures import Bar, figure, ratios

    cost = ratios([r.counted_s for r in rounds], [r.plain_s for r in rounds])
    same = ratios([r.first_s for r in rounds], [r.second_s for r in rounds])
    call = figure([r.counted_s for r in rounds])
    verdict = Bar("stages", BAR, cost).verdict
    print(
        f"{num_ranks:>5}  {call.median * 1e6:>8.1f}  {cost.text(4):>22}  {same.text(4):>22}  "
        f"{alone_s * 1e6:.2f}  <= {BAR}: {verdict}"
    )
    return {
        "call_s": asdict(call),
        "counted_over_plain": asdict(cost),
        "both_counted": asdict(same),
        "alone_s": alone_s,
        "verdict": verdict,
    }


async def _rounds(
    core: RouterCore, request: ForwardInput, num_rounds: int, calls: int
) -> list[Round]:
    """Four blocks a round; which neighbour is first changes from round to round."""
    from moe_serve.router.stages import Stages

    counting, none = Stages(), NoStages()

    async def block(stages: Any) -> float:
        core.stages = stages
        began_s = time.process_time()
        for _ in range(calls):
            await core.forward(request, 30.0)
        return (time.process_time() - began_s) / calls

    for stages in (counting, none):
        await block(stages)
    rounds = []
    for i in range(num_rounds):
        order = (counting, none) if i % 2 else (none, counting)
        pair = [await block(stages) for stages in order]
        counted_s, plain_s = pair if i % 2 else reversed(pair)
        same = [await block(counting) for _ in range(2)]
        first_s, second_s = same if i % 2 else reversed(same)
        rounds.append(Round(counted_s, plain_s, first_s, second_s))
    return rounds


def _router(num_ranks: int, seed: int) -> tuple[RouterCore, ForwardInput]:
    """A router with expert e on rank e % num_ranks, and a row for one expert of each rank."""
    import numpy as np

    from moe_serve.ports import DType
    from moe_serve.router.checks import ForwardInput
    from moe_serve.router.dispatch import RouterCore
    from moe_serve.router.settings import RouterSettings
    from placement.layout import ExpertLayout, SlotId
    from placement.routing import RankAddress, build_table
    from placement.topology import MoeSpec, Phase

    spec = MoeSpec(
        model="stages",
        weights_version="v1",
        num_layers=LAYERS,
        num_experts=EXPERTS,
        top_k=num_ranks,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        expert_bytes=1000,
        slot_bytes=1000,
    )
    keys = range(LAYERS * EXPERTS)
    rows = [[key for key in keys if key % num_ranks == rank] for rank in range(num_ranks)]
    layout = ExpertLayout.from_rows(rows, num_layers=LAYERS, num_experts=EXPERTS)
    table = build_table(
        layout,
        {SlotId(rank, slot): 1 for rank, row in enumerate(rows) for slot in range(len(row))},
        term=1,
        epoch=1,
        model=spec.model,
        weights_version=spec.weights_version,
        ranks=tuple(
            RankAddress(rank=r, node="n", address=f"inproc://{r}", incarnation=1)
            for r in range(num_ranks)
        ),
    )
    settings = RouterSettings(router="r0", router_number=0, incarnation=1, spec=spec)
    core = RouterCore(settings, lambda address, _on_disconnect: AtOnce(address))
    core.install_table(table)
    hidden = np.random.default_rng(seed).standard_normal((1, HIDDEN)).astype(np.float32)
    hidden.flags.writeable = False
    request = ForwardInput(
        layer=0,
        phase=Phase.DECODE,
        dtype=DType.FLOAT32,
        hidden=hidden,
        topk_ids=np.arange(num_ranks, dtype=np.int32)[None],
        gates=np.ones((1, num_ranks), np.float32),
        valid=np.ones((1, num_ranks), np.uint8),
        request_id="",
        attempt=0,
    )
    return core, request


def _alone_s(num_ranks: int, times: int = 20_000) -> float:
    """Processor seconds a request of every look at the clock, stamp and count, and nothing
    else."""
    from moe_serve.router.flight import Stamps
    from moe_serve.router.stages import Stages

    clock, stages, ranks = time.monotonic, Stages(), range(num_ranks)
    began_s = time.process_time()
    for _ in range(times):
        stamps = Stamps(clock())
        stamps.permit_s = clock()
        stamps.split_s = clock() - stamps.permit_s
        for rank in ranks:
            sent_s = clock()
            stamps.answers.extend((rank, 1, 0.0, sent_s, clock(), 1e-5, 2e-5, 5e-6))
        stages.answered(1, stamps, clock())
    return (time.process_time() - began_s) / times


if __name__ == "__main__":
    sys.exit(main())
