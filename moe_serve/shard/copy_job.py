"""One copy of an expert into a reserved slot, on a thread of its own.

Responsible for getting canonical bytes from the named source into the slot's buffer and the
backend. Must never verify, list or free: it tells its outcome once. Called by the shard's commands,
which own the slot.

Source: a slot of this shard (copied in memory), a peer shard (pulled over the wire), or the
checkpoint on this node.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.errors import DeadlineExceeded, MoeServeError, NotFound
from moe_serve.shard.core import ShardCore
from moe_serve.shard.faults import FaultPoints
from moe_serve.shard.served_model import ExpertSource
from moe_serve.shard.slot_pool import SlotPool
from moe_serve.weights.errors import WeightsError
from moe_serve.wire.copy_client import CopyAborted, CopyClient, CopyPart
from placement.messages.effects import CopyExpert

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopySources:
    """Where bytes can come from: `experts` is the checkpoint, `peers` the client that pulls from
    other shards."""

    experts: ExpertSource
    peers: CopyClient


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """How a copy ended. `code` is "" where it succeeded, else that of StepFailed. `loaded`: the
    backend holds the slot."""

    code: str
    detail: str
    seconds: float
    loaded: bool


class CopyJob:
    """A copy that runs from `start` on and calls `on_end(outcome)` once, on its thread."""

    def __init__(
        self,
        core: ShardCore,
        pool: SlotPool,
        sources: CopySources,
        command: CopyExpert,
        *,
        faults: FaultPoints,
        on_end: Callable[[CopyOutcome], None],
    ) -> None:
        self._core = core
        self._pool = pool
        self._sources = sources
        self._command = command
        self._faults = faults
        self._on_end = on_end
        self._abort = threading.Event()
        self._loaded = False
        self._began_s = core.clock()
        name = f"moe-copy-{command.slot}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def abort(self) -> None:
        """Tell it to stop; it ends at its next chunk."""
        self._abort.set()

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        code, detail = "io", "the copy failed"
        try:
            self._copy()
            code, detail = "", ""
        except (CopyAborted, DeadlineExceeded) as error:
            code, detail = "timeout", error.message
        except WeightsError as error:
            code, detail = "digest", error.message
        except MoeServeError as error:
            code, detail = "source_lost", error.message
        except OSError as error:
            code, detail = "io", f"reading the checkpoint: {error.strerror}"
        except MemoryError:
            code, detail = "over_budget", "no memory for the backend's form of the expert"
        except Exception as error:
            _log.exception("rank %d: a copy failed", self._core.slots.rank)
            detail = f"the copy failed: {type(error).__name__}"
        finally:
            seconds = self._core.clock() - self._began_s
            self._on_end(CopyOutcome(code, detail, seconds, self._loaded))

    def _copy(self) -> None:
        command = self._command
        if self._faults.delay_copy_s and self._abort.wait(self._faults.delay_copy_s):
            raise CopyAborted("the copy was aborted")
        buffer = self._pool.buffer(command.slot)
        deadline_s = self._began_s + command.timeout_s
        self._read(buffer.data, deadline_s)
        if self._abort.is_set():
            raise CopyAborted("the copy was aborted")
        if self._core.clock() > deadline_s:
            raise DeadlineExceeded(f"the copy took longer than {command.timeout_s:g} s")
        if "corrupt" in self._faults.fail:
            buffer[0] ^= 1
        self._core.backend.load_slot(command.slot, buffer)
        self._loaded = True

    def _read(self, out: memoryview, deadline_s: float) -> None:
        """Fill `out` from the command's source. Raises MoeServeError, OSError."""
        command, source = self._command, self._command.source
        if source.rank < 0:
            self._sources.experts.read_into(command.layer, command.expert, out)
        elif source.rank == self._core.slots.rank:
            self._read_own_slot(out)
        elif source.address is None:
            raise NotFound(f"copy source rank {source.rank} has no address")
        else:
            part = CopyPart(
                source=source.address,
                slot=source.slot,
                tag=source.slot_tag,
                layer=command.layer,
                expert=command.expert,
            )
            left_s = max(0.001, deadline_s - self._core.clock())
            self._sources.peers.pull(part, out, timeout_s=left_s, abort=self._abort)

    def _read_own_slot(self, out: memoryview) -> None:
        """Copy between two slots of this shard; the one copied from is pinned meanwhile."""
        command, source = self._command, self._command.source
        if not self._core.pin_copy(source.slot, source.slot_tag, command.layer, command.expert):
            raise NotFound(
                f"slot {source.slot} of this rank does not hold layer {command.layer} "
                f"expert {command.expert} with tag {source.slot_tag}"
            )
        try:
            out[:] = self._pool.buffer(source.slot).data
        finally:
            self._core.unpin_copy(source.slot)
