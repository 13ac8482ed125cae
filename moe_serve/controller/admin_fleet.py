"""Ranks that are added, removed or replaced, routers and the controller replaced: the requests.

Responsible for checking them and for turning them into events of the engine, or into calls of the
part that replaces routers. Decides nothing: whether the others can do without a rank is the
engine's to say. Called by `admin`.
"""

from __future__ import annotations

from typing import Protocol

from moe_serve.controller.admin_checks import (
    check_node,
    check_rank,
    check_text,
    raise_for,
    wrong,
)
from moe_serve.controller.life import Life
from moe_serve.controller.settings import ControllerSettings
from moe_serve.errors import FailedPrecondition
from moe_serve.rpc import placement_pb2 as pb
from placement.messages.events import RankAddAsked, RankRemoveAsked, RankReplaceAsked


class FleetSource(Protocol):
    """What of the controller is needed here; see `admin.Source`."""

    settings: ControllerSettings

    @property
    def life(self) -> Life:
        """The life of the present term."""
        ...

    def restart_soon(self) -> None:
        """See `admin.Source.restart_soon`."""
        ...


class FleetAdmin:
    """See the module's text. Every method raises MoeServeError."""

    def __init__(self, source: FleetSource) -> None:
        self._source = source

    async def add_rank(self, request: pb.AddRankRequest) -> pb.AddRankResponse:
        """One more rank of a group, or a removed one again: as it was."""
        groups = self._source.settings.groups
        check_text("node", request.node)
        check_text("key", request.key)
        back = self._known_rank(request.rank) if request.HasField("rank") else -1
        group, node = request.group, request.node
        if back >= 0:
            known = self._source.life.driver.engine.state.ranks[back]
            if group or node:
                raise wrong("group", f"rank {back} comes back as it was; give no group and no node")
            group, node = known.group, known.only_node
            if group >= len(groups):
                raise FailedPrecondition(
                    f"rank {back} was added from group {group}, and the service file has "
                    f"{len(groups)}; give the group back, or add a rank of another group"
                )
        kind = None if back >= 0 and group < 0 else self._kind(group, len(groups))
        if kind is None:  # the service file names the rank itself
            named = self._source.settings.ranks[back]
            profile, num_slots = named.profile, named.num_slots
        else:
            profile, num_slots = groups[kind].profile, groups[kind].num_slots
        if back < 0:
            await self._check_node(request)
        answer = await self._source.life.driver.ask(
            lambda n: RankAddAsked(
                at_s=0.0,
                request_id=n,
                rank=back,
                group=max(0, group),
                profile=profile,
                num_slots=num_slots,
                only_node=node,
                key=request.key,
            )
        )
        raise_for(answer)
        return pb.AddRankResponse(rank=answer.rank, message=answer.message)

    async def remove_rank(self, request: pb.RemoveRankRequest) -> pb.RemoveRankResponse:
        """A rank leaves. Answers when that has begun."""
        rank = self._known_rank(request.rank)
        answer = await self._source.life.driver.ask(
            lambda n: RankRemoveAsked(
                at_s=0.0,
                request_id=n,
                rank=rank,
                accept_lower_floor=request.accept_lower_floor,
            )
        )
        raise_for(answer)
        return pb.RemoveRankResponse(message=answer.message)

    async def replace_rank(self, request: pb.ReplaceRankRequest) -> pb.ReplaceRankResponse:
        """A rank's shard is replaced. Answers when that has begun."""
        rank = self._known_rank(request.rank)
        answer = await self._source.life.driver.ask(
            lambda n: RankReplaceAsked(
                at_s=0.0,
                request_id=n,
                rank=rank,
                incarnation=request.incarnation or -1,
                accept_lower_floor=request.accept_lower_floor,
            )
        )
        raise_for(answer)
        return pb.ReplaceRankResponse(message=answer.message)

    async def replace_router(self, request: pb.ReplaceRouterRequest) -> pb.ReplaceRouterResponse:
        """A router is replaced. Answers when the old one has ended its open calls."""
        check_text("router", request.router, needed=True)
        if request.router not in self._source.settings.routers:
            known = ", ".join(self._source.settings.routers)
            raise wrong("router", f"{request.router!r} is none of {known}")
        message = await self._source.life.replace_router(
            request.router, request.incarnation, accept_gap=request.accept_gap
        )
        return pb.ReplaceRouterResponse(message=message)

    async def restart_controller(
        self, request: pb.RestartControllerRequest
    ) -> pb.RestartControllerResponse:
        """End this controller; the cluster starts it again."""
        term = self._source.life.term
        if request.term > term:
            raise FailedPrecondition(f"this controller's term is {term}, not {request.term}")
        if request.term in (0, term):
            self._source.restart_soon()
        return pb.RestartControllerResponse(term=request.term or term)

    def _known_rank(self, rank: int) -> int:
        check_rank(rank, len(self._source.life.driver.engine.state.ranks))
        return rank

    async def _check_node(self, request: pb.AddRankRequest) -> None:
        """Raises InvalidArgument where the only node that a new rank may run on does not exist."""
        life = self._source.life
        known = request.key and any(
            rank.asked_key == request.key for rank in life.driver.engine.state.ranks
        )
        # Whoever asks again is told of the rank there is, though its node may have died since.
        if request.node and not known:
            check_node(request.node, await life.supervision.nodes())

    def _kind(self, group: int, count: int) -> int:
        if not count:
            raise FailedPrecondition("this service was started without groups; add none to it")
        if not 0 <= group < count:
            raise wrong(
                "group",
                f"{group} must lie in [0, {count}); groups are the entries of fleet.ranks in the "
                "service file, see `moe-serve status` for the ranks there are",
            )
        return group
