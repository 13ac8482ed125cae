"""Everything a shard must be told to start.

Responsible for the fields. Must never hold a default that opens a port to other machines. Made by
bootstrap, handed to the actor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_serve.shard.compute.build import BackendName
from moe_serve.shard.faults import FaultPoints
from moe_serve.shard.work_queue import QueueLimits
from moe_serve.telemetry.traces import TraceSettings
from moe_serve.weights.dtypes import ServingDtype
from moe_serve.wire.security import CurveKeys
from moe_serve.wire.sockets import WireOptions
from placement.topology import DeviceProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """Settings of one shard incarnation. Sizes in bytes, durations in seconds.

    Raises ValueError naming the field that is out of range.
    """

    rank: int
    """Position in the EP group."""
    incarnation: int
    """Life of the rank's shard; greater than any before it."""
    node: str
    """Ray node the shard runs on."""
    failure_domain: str
    """What fails together with it."""
    profile: DeviceProfile
    """Declared or measured figures of the device; the emulated backend computes by them."""
    backend: BackendName = "numpy"
    """Compute backend."""
    device: str = "cpu"
    """Device of the torch backend."""
    group: int = -1
    """Group of the service file the shard was made from where the rank was added; else -1."""
    only_node: str = ""
    """The only node that rank may run on, "" = any."""
    dtype: ServingDtype = "float32"
    """Format of resident weights."""
    num_slots: int
    """Slots, staging slots included."""
    budget_bytes: int
    """Bytes that slots may cost, derived forms included."""
    slab_slots: int = 8
    """Slots a slab has places for."""
    checkpoint: str
    """Folder of the checkpoint on this node."""
    manifest_dir: str
    """Folder of the manifest cache on this node; the manifest is computed there if it is
    missing."""
    model_name: str
    """Name of the model, as front ends say it."""
    weights_version: str
    """Name of this set of weights."""
    host: str = "127.0.0.1"
    """IP address the wire binds. Another than loopback needs `client_keys`."""
    client_keys: CurveKeys | None = None
    """The service's client keys: they turn CURVE on, are the only ones admitted, and authenticate
    copies from peers. The shard makes its own server keys."""
    wire: WireOptions = field(default_factory=WireOptions)
    """Limits and heartbeats of the wire."""
    queue: QueueLimits = field(default_factory=QueueLimits)
    """Bounds of queue and batch."""
    copy_bytes_per_s: float = 0.0
    """Limit of copies into the shard, and another one as high for copies out of it; 0 = none."""
    host_cache_dir: str = ""
    """Folder of the cache of canonical experts on this node, shared by its shards."""
    host_cache_bytes: int = 0
    """Bytes of that cache; 0 = none."""
    ledger_rows_max: int = 0
    """Executed contributions kept for a check from outside; 0 = none."""
    service: str = ""
    """Name of the service, for its spans."""
    traces: TraceSettings = field(default_factory=TraceSettings)
    """Where spans go."""
    faults: FaultPoints = field(default_factory=FaultPoints)
    """Faults that a test orders."""
    history_dir: str = ""
    """Folder of the history, for tests: facts are noted there (`telemetry.fact_log`); "" = none
    are."""

    def __post_init__(self) -> None:
        for name, least in (
            ("rank", 0),
            ("incarnation", 0),
            ("num_slots", 0),
            ("budget_bytes", 0),
            ("slab_slots", 1),
            ("copy_bytes_per_s", 0),
            ("host_cache_bytes", 0),
            ("ledger_rows_max", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least} (got {getattr(self, name)})")
