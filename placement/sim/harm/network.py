"""Harm to messages: slow, lost, doubled, shuffled, cut off.

Responsible for the weather of the network. Called by `Harm`.
"""

from __future__ import annotations

from functools import partial

from placement.sim.faults import FaultKind
from placement.sim.harm.targets import Does, Done, Targets

HELD_BACK_S = 1.0


class NetworkHarm:
    """See the module's text."""

    def __init__(self, who: Targets) -> None:
        self._who = who
        self._stage = who.stage
        self._fleet = who.fleet

    def does(self) -> Does:
        """What each kind does."""
        return {
            FaultKind.DELAY: self._delay,
            FaultKind.LOSS: self._loss,
            FaultKind.DUPLICATE: self._duplicate,
            FaultKind.REORDER: self._reorder,
            FaultKind.PARTITION: self._partition,
            FaultKind.BLACKOUT: self._blackout,
        }

    def _delay(self, rank: int) -> Done:
        place, slow = self._who.place(rank), self._stage.network.weather.slow
        slow[place] = int(self._stage.dice.between(10, 60))
        return place, lambda: _forget(slow, place)

    def _loss(self, rank: int) -> Done:
        place, loss = self._who.place(rank), self._stage.network.weather.loss
        loss[place] = self._stage.dice.between(0.1, 0.4)
        return place, lambda: _forget(loss, place)

    def _duplicate(self, rank: int) -> Done:
        place, twice = self._who.place(rank), self._stage.network.weather.twice
        twice[place] = self._stage.dice.between(0.3, 0.8)
        return place, lambda: _forget(twice, place)

    def _reorder(self, rank: int) -> Done:
        place, shuffled = self._who.place(rank), self._stage.network.weather.shuffled
        shuffled.add(place)
        return place, lambda: shuffled.discard(place)

    def _partition(self, rank: int) -> Done:
        dice, cut = self._stage.dice, self._stage.network.weather.cut
        shard = self._who.shard(rank)
        one = "controller" if shard is None else shard.place
        other = dice.pick(["controller", *self._fleet.router_names])
        if dice.chance(0.4) or one == other:
            one, other = dice.pick(self._fleet.router_names), "controller"
        ends = [(one, other), (other, one)]
        gone = ends if dice.chance(0.3) else [dice.pick(ends)]
        cut.update(gone)

        def mend() -> None:
            cut.difference_update(gone)
            self._reconnect()

        return f"{gone}", mend

    def _blackout(self, rank: int) -> Done:
        shard, dark = self._who.shard(rank), self._stage.network.weather.dark
        node = "" if shard is None else shard.node
        places = [s.place for s in self._stage.shards.values() if s.node == node]
        if self._stage.dice.chance(0.3):
            places.append(self._stage.dice.pick(self._fleet.router_names))
        dark.update(places)

        def mend() -> None:
            dark.difference_update(places)
            self._reconnect()

        return f"{places}", mend

    def _reconnect(self) -> None:
        """Connections that broke come back where both ends still live."""
        for router in self._stage.routers.values():
            for shard in self._stage.shards.values():
                if router.alive and shard.alive:
                    router.receive(partial(router.connected, shard.rank, shard.life))

    def hold_back(self, rank: int) -> None:
        """What the controller is about to send to the rank comes late, after what it sends then."""
        late, link = self._stage.network.weather.late, ("controller", f"rank{rank}")
        late[link] = HELD_BACK_S
        self._stage.clock.after(0.0, lambda: _forget_link(late, link))


def _forget(befallen: dict[str, float] | dict[str, int], place: str) -> None:
    befallen.pop(place, None)


def _forget_link(late: dict[tuple[str, str], float], link: tuple[str, str]) -> None:
    late.pop(link, None)
