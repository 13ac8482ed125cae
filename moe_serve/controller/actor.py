"""The Ray face of the controller: calls in, plain data out, no rule of its own.

`ControllerActor` becomes an async actor by `ray.remote(ControllerActor).options(...)` in bootstrap
(named, detached, max_restarts=-1). Ray's restart runs the constructor again with the same settings
and fleet, and the constructor starts the service by itself: nobody is there to call `start`.

Responsible for this translation only. Must never hold state beside the service.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import ray

from moe_serve.controller.service import ControllerService
from moe_serve.controller.settings import ControllerSettings
from moe_serve.errors import MoeServeError, StartRefused
from moe_serve.ports import Fleet
from moe_serve.telemetry import make_logger
from moe_serve.telemetry.sink import RaySink, actor_lines, this_node

START_PAUSE_S = 5.0
"""Wait before a start that failed for something that may pass is tried again."""
REFUSED_PAUSE_S = 30.0
"""The same where a person must act first."""


class ControllerActor:
    """The controller in an actor process.

    settings: composed by bootstrap; an empty `host` becomes the Ray node's address. fleet: how
    parts are created; it is pickled into the actor, so it must hold no handle of another loop.
    """

    # Ray awaits the constructor of an async actor on the actor's own loop.
    async def __init__(self, settings: ControllerSettings, fleet: Fleet) -> None:  # type: ignore[misc]
        if not settings.host:
            settings = replace(settings, host=_node_address())
        settings = replace(settings, node=this_node())
        actor_lines(part="controller", service=settings.service_id)
        self._log = make_logger(part="controller", node=settings.node, service=settings.service_id)
        self._service = ControllerService(settings, fleet, on_fatal=_end_process, sink=RaySink())
        self._fault = ""
        self._refused = False
        self._starting = asyncio.get_running_loop().create_task(self._start_until_up())

    async def start(self) -> dict[str, Any]:
        """Wait for the first try to start, and `describe`. `fault` says why it did not start, ""
        otherwise. Errors cross as text: an exception class of ours would have to be unpickled."""
        await self._try_start()
        return await self.describe()

    async def admin_address(self) -> str:
        """host:port of PlacementService, "" before it is bound."""
        return self._service.admin_address

    async def describe(self) -> dict[str, Any]:
        """What bootstrap needs to know, plain values only.

        admin_address, metrics_address ("" without one), term, epoch, ready (every expert listed,
        every router uses a table), state, problems (sentences), parts (name, kind, place,
        incarnation, pid of each), router_addresses, restarts (in the last 10 minutes), refused (why
        a part refused to start twice in a row, "" otherwise: more waiting will hardly help), fault
        (why the controller did not start).
        """
        return {"fault": self._fault, **self._service.describe()}

    async def down(self, grace_s: float = 5.0) -> list[str]:
        """End every part of the service by the journal's list and close the journal. Returns the
        names ended. The controller's own actor is killed by the caller."""
        self._starting.cancel()
        return await self._service.down(grace_s)

    async def _try_start(self) -> bool:
        """Whether the service is up."""
        try:
            await self._service.start()
        except StartRefused as error:
            self._note(error.message, refused=True)
            return False
        except MoeServeError as error:
            self._note(error.message, refused=False)
            return False
        except Exception as error:
            # A folder without rights, a damaged disk, Ray's head away, a bug: told, and tried
            # again, since nobody else would start the service of a restarted actor.
            self._note(f"{type(error).__name__}: {error}", refused=False)
            return False
        self._note("", refused=False)
        return True

    def _note(self, fault: str, *, refused: bool) -> None:
        """A start succeeded or failed. After a restart nobody asks `describe`: what is new is
        logged."""
        if fault and fault != self._fault:
            if refused:
                self._log.error("controller refuses to start", reason=fault)
            else:
                self._log.warning("controller did not start", reason=fault)
        self._fault, self._refused = fault, refused

    async def _start_until_up(self) -> None:
        """Try until it succeeds. A fault that will not pass by itself ends when a person acts, and
        then nobody has to start the controller."""
        while not await self._try_start():
            await self._service.show_fault(self._fault)
            await asyncio.sleep(REFUSED_PAUSE_S if self._refused else START_PAUSE_S)


def _end_process(_error: BaseException) -> None:
    """Let Ray restart the actor: the journal is closed and says everything."""
    os._exit(1)


def _node_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
