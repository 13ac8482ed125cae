"""What a start that ends early must not leave: whether it fails, is interrupted or is killed.

Responsible for the two ways there are: a Ray cluster of our own ends with the start, and on a
cluster of others the record says where parts may be. Must never end what started well. Called by
`service`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_serve.bootstrap.local_ray import LocalRay, start_local_ray, stop_local_ray
from moe_serve.bootstrap.record import ServiceRecord, remove_record, write_record
from moe_serve.bootstrap.watchdog import watched
from moe_serve.errors import StartRefused


@contextlib.contextmanager
def findable(record: ServiceRecord, before: ServiceRecord | None) -> Iterator[None]:
    """On a cluster of others, parts outlive this program. While they are being started the record
    says where, so that `down` finds them should this program be killed; where the start fails the
    record is as it was `before`."""
    write_record(record)
    try:
        yield
    except BaseException:
        if before is None:
            remove_record(record.service)
        else:
            write_record(before)
        raise


@contextlib.contextmanager
def own_cluster(progress: Callable[[str], None]) -> Iterator[LocalRay]:
    """A Ray cluster on this machine that goes on where the work inside succeeds, and is ended where
    it fails or this program dies meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="moe-"))
    with watched(folder, folder):
        progress("starting a local Ray cluster")
        try:
            local = start_local_ray(folder)
        except (KeyboardInterrupt, SystemExit):
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            yield local
        except BaseException as error:
            stop_local_ray(local.pids, local.temp_dir)
            if isinstance(error, KeyboardInterrupt | SystemExit | StartRefused):
                shutil.rmtree(folder, ignore_errors=True)  # else the logs are evidence
            raise
