"""How a life begins: journal and cluster are read, a term is claimed, the engine is built.

Responsible for the choice between going on (a journal that is trusted), rebuilding from inventories
(none, or another controller's), and starting anew. Nothing is commanded here. Called by life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from moe_serve.controller.adoption import (
    Adopted,
    adopt,
    fence,
    find_late,
    refuse_other_weights,
)
from moe_serve.controller.befores import Before
from moe_serve.controller.clock import DriverClock, boot_id, boot_s
from moe_serve.controller.journal import Journal, move_aside, open_journal
from moe_serve.controller.journal_rows import JournalImage, Starts, StateSnapshot
from moe_serve.controller.settings import ControllerSettings
from moe_serve.controller.terms import claim_term, first_epoch
from moe_serve.errors import StartRefused
from moe_serve.ports import Fleet
from placement.engine import EngineSnapshot, RebalanceEngine
from placement.engine.state import RankState, RankStatus
from placement.load import LoadHistory

OTHER_PARTS: Final = (
    "parts of another model or fleet are running under this service id; end them with "
    "`moe-serve down` first"
)


@dataclass(slots=True)
class Beginning:
    """Everything a life begins with.

    owner: name of this machine. going_on: the journal's state goes on. journal_names: parts it
    names. starts: the newest, this one included. router_ports: where each router was last.
    problems: what a person should know of how it began.
    """

    owner: str
    journal: Journal
    clock: DriverClock
    engine: RebalanceEngine
    adopted: Adopted
    term: int
    going_on: bool
    journal_names: tuple[str, ...]
    starts: Starts
    restarts: int
    epochs_published: int
    admin_port: int
    router_ports: dict[str, int]
    problems: list[str]
    journal_torn: bool = False
    """The journal's last record was torn, and was dropped."""
    befores: tuple[Before, ...] = ()
    """Placements from before the newest plans, as far as the journal tells."""
    replicas_replaced: int = 0
    """Replicas that finished moves removed to make room, as far as the journal tells."""


async def begin(
    settings: ControllerSettings,
    fleet: Fleet,
    *,
    owner: str,
    term_seen: int = 0,
    counts_as_start: bool = True,
) -> Beginning:
    """Read everything, claim a term above `term_seen` too, build the engine.

    owner: name of this machine. counts_as_start: False where a fenced controller begins again
    without having died. Raises StartRefused, JournalFull, Unavailable, and StaleTerm where another
    controller began meanwhile; nothing is left open then.
    """
    journal, image = await open_journal(settings.state_dir, settings.service_id, settings.journal)
    problems: list[str] = []
    try:
        distrust = await _distrust(settings, fleet, image, owner)
        if distrust:
            problems.append(f"the journal was set aside: {distrust}")
            await journal.close()
            move_aside(settings.state_dir)
            old = image
            journal, image = await open_journal(
                settings.state_dir, settings.service_id, settings.journal
            )
            # Numbers that were used stay used, whatever becomes of the rest.
            image = replace(
                image,
                intended_term=old.intended_term,
                epoch=old.epoch,
                last_at_s=old.last_at_s,
                admin_port=old.admin_port,
                router_ports=old.router_ports,
            )
        elif image.dropped_tail:
            problems.append("the journal's last record was torn and was dropped")
        # Who ended the service on purpose and starts it again has no controller that keeps dying.
        starts = _starts(Starts() if image.closed else image.starts, counts_as_start)
        return await _with_journal(
            settings,
            fleet,
            journal,
            image,
            owner=owner,
            starts=starts,
            term_seen=term_seen,
            problems=problems,
        )
    except BaseException:
        await journal.close()
        raise


async def _distrust(
    settings: ControllerSettings, fleet: Fleet, image: JournalImage, owner: str
) -> str:
    """Why the journal's state must not be gone on with, "" where it may be."""
    if image.empty:
        return ""
    if image.owner not in ("", owner) and not settings.state_dir_shared:
        return f"it was written on {image.owner}, this is {owner}, and state_dir is not shared"
    claimed = await fleet.highest_term()
    if claimed > image.intended_term:
        return f"a newer controller (term {claimed}) ran elsewhere"
    if image.snapshot is not None and not image.closed:
        return _misfit(settings, image.snapshot.engine)
    return ""


def _misfit(settings: ControllerSettings, snapshot: EngineSnapshot) -> str:
    if snapshot.spec != settings.spec:
        return f"it is of model {snapshot.spec.model} {snapshot.spec.weights_version}"
    if (named := _named_by_file(snapshot.state.ranks)) != len(settings.ranks):
        return f"it is of {named} ranks, not {len(settings.ranks)}"
    known = {p.name for p in settings.profiles}
    if {r.profile for r in snapshot.state.ranks} - known:
        return "its ranks name device profiles that are not declared any more"
    return ""


async def _with_journal(
    settings: ControllerSettings,
    fleet: Fleet,
    journal: Journal,
    image: JournalImage,
    *,
    owner: str,
    starts: Starts,
    term_seen: int,
    problems: list[str],
) -> Beginning:
    snapshot = None if image.closed else image.snapshot
    names = image.parts if snapshot is not None else () if image.closed else None
    adopted = await adopt(
        fleet, settings.service_id, names, patience_s=settings.config.rank_silence_s
    )
    if problems and adopted.found_any and snapshot is None and not _fits(settings, adopted):
        raise StartRefused(OTHER_PARTS)
    term = await claim_term(fleet, journal, (image.intended_term, adopted.highest_term, term_seen))
    await fence(adopted, term, patience_s=settings.config.rank_silence_s)
    clock = DriverClock(image.last_at_s)
    epoch = first_epoch(
        image.epoch, (p.info for p in adopted.shards), (p.info for p in adopted.routers)
    )
    await find_late(adopted, fleet, settings.service_id, term)
    problems += refuse_other_weights(adopted, settings.spec.weights_version)
    restarts = _restarts(settings, starts)
    paused = restarts > settings.restarts_max
    if paused:
        problems.append(
            f"the controller restarted {restarts} times in {settings.restarts_within_s:g} s and "
            "started paused; look at its log, then resume"
        )
    if snapshot is not None:
        engine = RebalanceEngine.restore(
            _refreshed(settings, snapshot),
            image.transitions,
            term=term,
            first_epoch=epoch,
            start_s=clock.now_s(),
            paused=True if paused else None,
        )
    else:
        if adopted.found_any and not image.closed:
            paused = True
            problems.append(
                "there was no journal: rebuilt from what the parts hold, started paused; resume "
                "when the placement looks right"
            )
        engine = RebalanceEngine(
            settings.spec,
            settings.topology(),
            settings.config,
            term=term,
            first_epoch=epoch,
            start_s=clock.now_s(),
            paused=paused,
            earlier=_earlier(settings, image, adopted, problems),
        )
    return Beginning(
        owner=owner,
        journal=journal,
        clock=clock,
        engine=engine,
        adopted=adopted,
        term=term,
        going_on=snapshot is not None,
        journal_names=names or (),
        starts=starts,
        restarts=restarts,
        epochs_published=image.epochs_published,
        admin_port=image.admin_port,
        router_ports=image.router_ports,
        problems=problems,
        journal_torn=image.dropped_tail,
        befores=() if snapshot is None else snapshot.befores,
        replicas_replaced=0 if snapshot is None else snapshot.replicas_replaced,
    )


def _named_by_file(ranks: Sequence[RankState]) -> int:
    """Ranks that the service file named, and no operator added."""
    return sum(rank.group < 0 for rank in ranks)


def _earlier(
    settings: ControllerSettings, image: JournalImage, adopted: Adopted, problems: list[str]
) -> Sequence[RankState]:
    """Ranks of before, for a beginning anew: those that were added or removed stay so. After `down`
    by the journal, without one by what living shards say."""
    if not image.closed or image.snapshot is None:
        return _told_by_shards(settings, adopted)
    ranks = image.snapshot.engine.state.ranks
    known = {p.name for p in settings.profiles}
    changed = [r for r in ranks if r.group >= 0 or r.status is RankStatus.REMOVED]
    fits = _named_by_file(ranks) == len(settings.ranks) and all(
        r.group < len(settings.groups) and r.profile in known for r in changed
    )
    if changed and not fits:
        problems.append(
            f"{len(changed)} ranks had been added or removed; that is forgotten, for the service "
            "file names other ranks or groups now"
        )
    return ranks if fits else ()


def _told_by_shards(settings: ControllerSettings, adopted: Adopted) -> Sequence[RankState]:
    """Added ranks by the shards that live; a number between them whose shard does not is left
    free."""
    first = len(settings.ranks)
    infos = {part.info.rank: part.info for part in adopted.shards if part.info.rank >= first}
    told = []
    for rank in range(first, 1 + max(infos, default=first - 1)):
        info = infos.get(rank)
        told.append(
            RankState(
                rank=rank,
                node="" if info is None else info.node,
                failure_domain="" if info is None else info.failure_domain,
                profile=settings.profiles[0].name if info is None else info.profile,
                num_slots=0 if info is None else info.num_slots,
                budget_bytes=0 if info is None else info.budget_bytes,
                status=RankStatus.REMOVED if info is None else RankStatus.EXPECTED,
                group=0 if info is None else max(0, info.group),
                only_node="" if info is None else info.only_node,
            )
        )
    return told


def _starts(earlier: Starts, counts_as_start: bool) -> Starts:
    boot = boot_id()
    kept = earlier.at_s if earlier.boot == boot else ()
    return Starts(boot, (*kept, boot_s()) if counts_as_start else kept)


def _restarts(settings: ControllerSettings, starts: Starts) -> int:
    since_s = boot_s() - settings.restarts_within_s
    return max(0, sum(s >= since_s for s in starts.at_s) - 1)


def _fits(settings: ControllerSettings, adopted: Adopted) -> bool:
    spec = settings.spec
    return all(
        (part.info.rank < len(settings.ranks) or part.info.group >= 0)
        and part.info.slot_bytes == spec.slot_bytes
        and part.info.weights_version in ("", spec.weights_version)
        and all(
            s.layer < spec.num_layers and s.expert < spec.num_experts for s in part.info.resident
        )
        for part in adopted.shards
    )


def _refreshed(settings: ControllerSettings, snapshot: StateSnapshot) -> EngineSnapshot:
    """The engine's snapshot under the settings of today."""
    engine, config = snapshot.engine, settings.config
    same_windows = (engine.config.sub_windows, engine.config.windows_kept) == (
        config.sub_windows,
        config.windows_kept,
    )
    state = engine.state
    if not same_windows:
        # Windows of another form cannot be compared; the forecast starts from what it has learnt.
        state = msgspec.structs.replace(state, history=LoadHistory(kept=config.windows_kept))
    return msgspec.structs.replace(
        engine,
        config=config,
        profiles=settings.profiles,
        cross_node_bytes_per_s=settings.cross_node_bytes_per_s,
        state=state,
    )
