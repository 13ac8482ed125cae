"""Harm to shards and routers: they end, stand still, are slow, lose bytes or run out of memory.

Responsible for processes and for what is wrong inside them. Called by `Harm`.
"""

from __future__ import annotations

from functools import partial

from placement.sim.faults import FaultKind
from placement.sim.harm.targets import Does, Done, Targets


class PartsHarm:
    """See the module's text."""

    def __init__(self, who: Targets) -> None:
        self._who = who
        self._stage = who.stage
        self._fleet = who.fleet

    def does(self) -> Does:
        """What each kind does."""
        return {
            FaultKind.SHARD_CRASH: self._shard_crash,
            FaultKind.SHARD_PAUSE: self._shard_pause,
            FaultKind.SHARD_SLOW: self._shard_slow,
            FaultKind.NODE_LOSS: self._node_loss,
            FaultKind.COPY_SLOW: partial(self._copies, "copy_factor", 20.0, 1.0),
            FaultKind.COPY_STUCK: partial(self._copies, "copies_stuck", True, False),
            FaultKind.COPY_CORRUPT: partial(self._copies, "copies_corrupt", True, False),
            FaultKind.OUT_OF_MEMORY: self._out_of_memory,
            FaultKind.ROUTER_CRASH: self._router_crash,
            FaultKind.ROUTER_PAUSE: self._router_pause,
            FaultKind.ROUTER_LEAVES: self._router_leaves,
        }

    def crash_rank(self, rank: int) -> None:
        """The rank's shard ends without a word, if it lives."""
        self._fleet.kill(self._stage.shards[rank], "fault")

    def _shard_crash(self, rank: int) -> Done:
        shard = self._who.shard(rank)
        if shard is None:
            return "nobody", None
        if self._stage.dice.chance(0.3):
            # Told to end: it takes no more work, and is gone a moment later.
            shard.slots.drain()
            shard.after(0.1, lambda: self._fleet.kill(shard, "fault"))
        else:
            self._fleet.kill(shard, "fault")
        return shard.who, None

    def _shard_pause(self, rank: int) -> Done:
        return self._who.pause(self._who.shard(rank))

    def _shard_slow(self, rank: int) -> Done:
        shard = self._who.shard(rank)
        if shard is None:
            return "nobody", None
        compute = shard.compute
        compute.factor = self._stage.dice.between(5.0, 15.0)

        def mend() -> None:
            compute.factor = 1.0

        return shard.who, mend

    def _node_loss(self, rank: int) -> Done:
        shard = self._who.shard(rank)
        node = "" if shard is None else shard.node
        for other in list(self._stage.shards.values()):
            if other.node == node:
                self._fleet.kill(other, "fault")
        router = self._who.router()
        if router is not None and self._stage.dice.chance(0.3):
            self._fleet.kill(router, "fault")
        return node, None

    def _copies(self, name: str, bad: object, good: object, rank: int) -> Done:
        del rank  # wherever the next copy comes from
        troubles = [s.trouble for s in self._stage.shards.values() if s.alive]
        for trouble in troubles:
            setattr(trouble, name, bad)

        def mend() -> None:
            for trouble in troubles:
                setattr(trouble, name, good)

        return "every copy", mend

    def _out_of_memory(self, rank: int) -> Done:
        shard = self._who.shard(rank)
        if shard is None:
            return "nobody", None
        trouble = shard.trouble
        trouble.no_memory = True

        def mend() -> None:
            trouble.no_memory = False

        return shard.who, mend

    def _router_crash(self, _rank: int) -> Done:
        router = self._who.router()
        if router is None:
            return "nobody", None
        self._fleet.kill(router, "fault")
        return router.who, None

    def _router_pause(self, _rank: int) -> Done:
        return self._who.pause(self._who.router())

    def _router_leaves(self, _rank: int) -> Done:
        router = self._who.router()
        if router is None:
            return "nobody", None
        router.close()
        router.after(0.6, lambda: self._fleet.kill(router, "left"))
        return router.who, None
