"""What a service left on this machine that died without `down`: its Ray cluster's processes, its
temporary folder, its record.

Responsible for removing them before it is started again, so that nobody has to. Must never touch a
service that lives, nor what tells what it held (journal, manifests). Called by `service` and
`keep`.
"""

from __future__ import annotations

import shutil

from moe_serve.bootstrap.local_ray import stop_local_ray
from moe_serve.bootstrap.record import ServiceRecord, remove_record


def clear_dead(record: ServiceRecord) -> None:
    """Forget a service that is not running any more. What is still alive of the cluster that `up`
    started for it is ended by process id."""
    if record.ray_temp_dir:
        stop_local_ray(record.ray_pids, record.ray_temp_dir)
        shutil.rmtree(record.ray_temp_dir, ignore_errors=True)
    remove_record(record.service)
