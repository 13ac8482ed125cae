"""An executor that is perfect and takes no time: emulated ranks that answer every effect at once.

Responsible for carrying out what the engine asks and for counting it. Decides nothing. Called by
the replay of traces.
"""

from __future__ import annotations

import msgspec

from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine, compute_target
from placement.messages import events as ev
from placement.messages.effects import (
    AbortAdd,
    AnyCommand,
    ComputeTarget,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
)
from placement.messages.records import DecisionRecord
from placement.routing import RankAddress
from placement.topology import MoeSpec, Topology


def ranks_joined(topology: Topology) -> tuple[ev.RankJoined, ...]:
    """What an engine hears first of an emulated fleet: every rank, empty, at time 0."""
    return tuple(
        ev.RankJoined(
            at_s=0.0,
            rank=rank.rank,
            node=rank.node,
            failure_domain=rank.failure_domain,
            profile=rank.profile,
            num_slots=rank.num_slots,
            address=RankAddress(rank=rank.rank, node=rank.node, address="", incarnation=1),
        )
        for rank in topology.ranks
    )


class PerfectExecutor:
    """Carries out every effect at once and without fault: each rank holds what it is asked to
    hold."""

    def __init__(self, spec: MoeSpec, topology: Topology, config: RebalanceConfig) -> None:
        self.engine = RebalanceEngine(spec, topology, config, term=1, first_epoch=1, start_s=0.0)
        self.records: list[DecisionRecord] = []
        self._config = config
        self._spec = spec
        self._next_tag = 1
        self.slot_writes = 0
        self.copy_bytes = 0
        for joined in ranks_joined(topology):
            self.take(joined)
        self.slot_writes = self.copy_bytes = 0
        self.fill_moves = dict(self.engine.state.moves_done)

    def totals(self) -> tuple[int, int, int]:
        """(slot writes, bytes copied, moves done) since the first fill."""
        done = sum(self.engine.state.moves_done.values()) - sum(self.fill_moves.values())
        return self.slot_writes, self.copy_bytes, done

    def take(self, event: ev.AnyEvent) -> None:
        """Step the engine, and on with every answer, until nothing is left to answer."""
        waiting: list[ev.AnyEvent] = [event]
        while waiting:
            effects = self.engine.step(waiting.pop(0))
            self.records.extend(effects.records)
            for command in effects.commands:
                answer = self._carry_out(command, event.at_s)
                if answer is not None:
                    waiting.append(answer)

    def _carry_out(self, command: AnyCommand, at_s: float) -> ev.AnyEvent | None:
        match command:
            case ComputeTarget():
                answer = compute_target(command, self._config)
                return msgspec.structs.replace(answer, at_s=at_s)
            case ReserveSlot():
                self._next_tag += 1
                return ev.SlotReserved(at_s=at_s, step_id=command.step_id, slot_tag=self._next_tag)
            case CopyExpert():
                self.slot_writes += 1
                self.copy_bytes += self._spec.expert_bytes
                return ev.ExpertCopied(
                    at_s=at_s,
                    step_id=command.step_id,
                    copy_bytes=self._spec.expert_bytes,
                    seconds=0.0,
                )
            case VerifyExpert():
                return ev.ExpertVerified(at_s=at_s, step_id=command.step_id)
            case ReleaseSlot():
                return ev.SlotReleased(at_s=at_s, step_id=command.step_id)
            case SetRankSlots():
                return ev.BudgetApplied(at_s=at_s, rank=command.rank, num_slots=command.num_slots)
            case _:
                # Nothing fails here, so no add is aborted; tables and wishes to be woken need no
                # answer.
                assert not isinstance(command, AbortAdd), f"step {command.step_id} was aborted"
                return None
