"""A service on this machine as the keeper's hands see it: record, admin port, Ray.

Responsible for carrying out what `keep` decides. Must never decide when. Called by the CLI's
`up --keep`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_serve.bootstrap.keep import Keeper
from moe_serve.bootstrap.leftovers import clear_dead
from moe_serve.bootstrap.local_ray import ensure_auth
from moe_serve.bootstrap.ray_auth import join_auth
from moe_serve.bootstrap.record import ServiceRecord, kept, read_record, service_dir
from moe_serve.bootstrap.refusals import answers, head_alive
from moe_serve.bootstrap.service import command_connected, down
from moe_serve.bootstrap.signals import uninterrupted
from moe_serve.errors import NotFound, StartRefused, first_line

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KeptService:
    """`Hands` of one service. `up` starts it; `config_file`: its path as the record names it."""

    service: str
    config_file: str
    up: Callable[[], ServiceRecord]
    progress: Progress

    def start(self) -> ServiceRecord:
        """See `Hands`. One of another service file is not taken over: `up` refuses it. Also what a
        Ray that dies meanwhile, or a disk without room, does to a start is one that is refused."""
        try:
            return self._started()
        except _and_rays(OSError) as error:
            raise StartRefused(f"the start was cut short: {first_line(error)}") from error

    def _started(self) -> ServiceRecord:
        running = self.record()
        if running is None or not (head_alive(running) or answers(running.admin_address)):
            return self.up()
        if running.config_file != self.config_file:
            raise StartRefused(
                f"service {self.service!r} is running already, from {running.config_file or '?'}; "
                f"`moe-serve down {self.service}` ends it"
            )
        self.progress(f"service {self.service} is running already; it is looked after from now on")
        return running

    def record(self) -> ServiceRecord | None:
        """See `Hands`."""
        try:
            found = read_record(self.service)
        except NotFound:
            return None
        return None if found.ending else found

    def answers(self, record: ServiceRecord) -> bool:
        """See `Hands`."""
        return answers(record.admin_address)

    def cluster_gone(self, record: ServiceRecord) -> bool:
        """See `Hands`."""
        return bool(record.ray_pids) and not head_alive(record)

    def controller_gone(self, record: ServiceRecord) -> bool:
        """See `Hands`. Where Ray does not answer nothing could be started either, and routers and
        shards may well serve on."""
        try:
            with self._joined(record):
                from moe_serve.bootstrap.fleet import actor_names, controller_name

                return controller_name(self.service) not in actor_names(self.service)
        except _and_rays(StartRefused, ConnectionError) as error:
            self.progress(f"neither {self.service} nor its Ray answers: {first_line(error)}")
            return False

    def clear(self, record: ServiceRecord) -> None:
        """See `Hands`."""
        if not record.ray_pids:
            self._end_orphans(record)
        clear_dead(record)

    def wait(self, seconds: float) -> None:
        """See `Hands`."""
        time.sleep(seconds)

    def now_s(self) -> float:
        """See `Hands`."""
        return time.monotonic()

    def _end_orphans(self, record: ServiceRecord) -> None:
        """Parts on a cluster of others that have no controller any more. Its journal is not closed:
        the next controller goes on from it."""
        try:
            with self._joined(record):
                from moe_serve.bootstrap.fleet import actor_names, kill_actor

                for name in actor_names(self.service):
                    kill_actor(name)
        except _and_rays(StartRefused, ConnectionError) as error:
            # The next start says so too, and is tried again.
            self.progress(f"parts that have no controller are not ended yet: {first_line(error)}")

    @contextlib.contextmanager
    def _joined(self, record: ServiceRecord) -> Iterator[None]:
        if record.ray_pids:
            folder = Path(record.state_dir) if record.state_dir else None
            ensure_auth(service_dir(self.service, folder))
        else:
            join_auth(os.environ, Path.home())
        with command_connected(record.ray_address):
            yield


def _and_rays(*errors: type[Exception]) -> tuple[type[Exception], ...]:
    """These and Ray's errors. Ray is imported only once its authentication is set up, and before
    that it has raised nothing."""
    module = sys.modules.get("ray.exceptions")
    return errors if module is None else (*errors, module.RayError)


def keep(
    service: str,
    config_file: str,
    up: Callable[[], ServiceRecord],
    *,
    on_up: Callable[[ServiceRecord], None],
    progress: Progress,
) -> None:
    """Keep a service up until it is taken down, or this program is told to end: then the service
    ends with it.

    Args:
        service: its name.
        config_file: path of the service file.
        up: starts it.
        on_up: called with the record after each start.
        progress: called with a line of text at each step.

    Raises StartRefused where the first start is refused, or another program keeps it already;
    KeyboardInterrupt where it is told to end before the service was up once.
    """
    path = str(Path(config_file).resolve())
    with kept(service):
        keeper = Keeper(service, KeptService(service, path, up, progress), progress)
        try:
            keeper.run(on_up)
        except KeyboardInterrupt:
            if not keeper.starts:
                raise  # `up` has ended what it had begun
            with uninterrupted(), contextlib.suppress(NotFound):
                down(service, progress=progress)
