"""A Ray cluster of our own for the data path benchmark.

Responsible for starting and ending it. Must never import Ray at the top: its authentication mode is
read at import. Called by `benchmarks.dataplane`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_serve.bootstrap.local_ray import ensure_auth, start_local_ray, stop_local_ray


@contextmanager
def local_ray() -> Iterator[Path]:
    """A cluster on this machine, ended afterwards; gives a folder to work in."""
    with tempfile.TemporaryDirectory(prefix="moe-dp-") as name:
        folder = Path(name)
        ensure_auth(folder)
        cluster = start_local_ray(folder / "ray", num_cpus=1)
        try:
            import ray

            ray.init(address=cluster.address, namespace="dataplane", log_to_driver=False)
            try:
                yield folder
            finally:
                ray.shutdown()
        finally:
            stop_local_ray(cluster.pids, cluster.temp_dir)
