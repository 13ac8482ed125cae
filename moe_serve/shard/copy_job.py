"""One copy of an expert into a reserved slot, on a thread of its own.

Responsible for getting canonical bytes from the named source into the slot's buffer and the
backend. Must never verify, list or free: it tells its outcome once. Called by the shard's commands,
which own the slot.

Sources, nearest first: a slot of this shard (copied in memory), a peer shard (pulled over the
wire), and where the command names no replica, the node's cache and then the checkpoint. A source on
another node is passed over where the node's own cache has the bytes: a name in it is a digest, so
they are the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.errors import DeadlineExceeded, MoeServeError, NotFound
from moe_serve.ports import RunningCopy
from moe_serve.shard.copy_reading import CopyReading
from moe_serve.shard.core import ShardCore
from moe_serve.shard.faults import Faults
from moe_serve.shard.served_model import ExpertSource
from moe_serve.shard.slot_pool import SlotPool
from moe_serve.weights.errors import WeightsError
from moe_serve.weights.host_cache import HostCache
from moe_serve.weights.reading import READ_CHUNK_BYTES
from moe_serve.wire.copy_client import CopyAborted, CopyClient, CopyPart
from placement.messages.effects import CopyExpert

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopySources:
    """Where bytes can come from: `experts` is the checkpoint, `peers` the client that pulls from
    other shards, `cache` that of this node. `node` is the node's name."""

    experts: ExpertSource
    peers: CopyClient
    cache: HostCache | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """How a copy ended. `code` is "" where it succeeded, else that of StepFailed. `loaded`: the
    backend holds the slot. `source` says where the bytes came from, as in `RunningCopy`."""

    code: str
    detail: str
    seconds: float
    loaded: bool
    source: str = ""


class CopyJob:
    """A copy that runs from `start` on and calls `on_end(outcome)` once: on its thread, or on that
    of whoever gave it up."""

    def __init__(
        self,
        core: ShardCore,
        pool: SlotPool,
        sources: CopySources,
        command: CopyExpert,
        *,
        faults: Faults,
        on_end: Callable[[CopyOutcome], None],
    ) -> None:
        self._core = core
        self._pool = pool
        self._sources = sources
        self._command = command
        self._faults = faults
        self._on_end = on_end
        self._loaded = False
        self._source = "" if command.source.rank < 0 else f"rank {command.source.rank}"
        self._began_s = core.clock()
        self._reading = CopyReading(
            core.model.expert.canonical_bytes,
            self._began_s + command.timeout_s,
            core.clock,
            faults,
        )
        self._over = False
        self._over_lock = threading.Lock()
        name = f"moe-copy-{command.slot}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin. Where the system has no thread for it, it has failed on return."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._end("io", f"the copy was not begun: {error}")

    def abort(self) -> None:
        """Tell it to stop; it ends at its next chunk."""
        self._reading.abort.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def give_up(self) -> bool:
        """End it though its thread hangs in a read. False where the thread may still write into the
        slot: then nothing has changed. The thread ends whenever the system answers it."""
        if not self._reading.give_up():
            return False
        self._end("timeout", f"a read from the {self._source or 'checkpoint'} hangs")
        return True

    @property
    def alive(self) -> bool:
        """Whether its thread runs, or hangs."""
        return self._thread.is_alive()

    def progress(self) -> RunningCopy:
        """How far it is."""
        command = self._command
        return RunningCopy(
            step_id=command.step_id,
            slot=command.slot,
            layer=command.layer,
            expert=command.expert,
            source=self._source,
            done_bytes=self._reading.done_bytes,
            total_bytes=self._reading.total_bytes,
            seconds=self._core.clock() - self._began_s,
        )

    def _run(self) -> None:
        code, detail = "io", "the copy failed"
        try:
            with self._reading.writing():
                self._copy()
            code, detail = "", ""
        except (CopyAborted, DeadlineExceeded) as error:
            code, detail = "timeout", error.message
        except WeightsError as error:
            code, detail = "digest", error.message
        except MoeServeError as error:
            code, detail = "source_lost", error.message
        except MemoryError as error:
            code, detail = "over_budget", f"no memory for the expert: {error}"
        except OSError as error:
            code, detail = "io", f"reading the checkpoint: {error.strerror}"
        except Exception as error:
            _log.exception("rank %d: a copy failed", self._core.slots.rank)
            detail = f"the copy failed: {type(error).__name__}"
        finally:
            self._end(code, detail)

    def _end(self, code: str, detail: str) -> None:
        with self._over_lock:
            first, self._over = not self._over, True
        if first:
            seconds = self._core.clock() - self._began_s
            self._on_end(CopyOutcome(code, detail, seconds, self._loaded, self._source))

    def _copy(self) -> None:
        delay_s = self._faults.points.delay_copy_s
        if delay_s:
            self._reading.abort.wait(delay_s)
        # A copy that is to stand still may have to do so before its first byte.
        self._reading.advance(0)
        buffer = self._pool.buffer(self._command.slot)
        self._read(buffer.data)
        self._reading.check()
        if self._faults.fails("corrupt"):
            buffer[0] ^= 1
        self._core.backend.load_slot(self._command.slot, buffer)
        self._loaded = True

    def _read(self, out: memoryview) -> None:
        """Fill `out` from the command's source. Raises MoeServeError, OSError."""
        source = self._command.source
        if source.rank == self._core.slots.rank:
            self._read_own_slot(out)
        elif source.rank < 0:
            self._read_local(out)
        elif source.address is None:
            raise NotFound(f"copy source rank {source.rank} has no address")
        elif source.address.node == self._sources.node or not self._read_cache(out):
            part = CopyPart(
                source=source.address,
                slot=source.slot,
                tag=source.slot_tag,
                layer=self._command.layer,
                expert=self._command.expert,
            )
            self._sources.peers.pull(
                part,
                out,
                timeout_s=self._reading.left_s(),
                abort=self._reading.abort,
                advance=self._reading.advance,
            )

    def _read_cache(self, out: memoryview) -> bool:
        """Whether the node's cache had the bytes."""
        command, cache = self._command, self._sources.cache
        if cache is None:
            return False
        sha256 = self._sources.experts.canonical_sha256(command.layer, command.expert)
        with self._reading.blocking():
            held = cache.holds(sha256)
        if not held:
            return False
        before, self._source = self._source, "host cache"
        if cache.read_into(sha256, out, self._reading):
            return True
        self._source, self._reading.done_bytes = before, 0
        return False

    def _read_local(self, out: memoryview) -> None:
        """From the node's cache, else from the checkpoint, and then it is kept."""
        if self._read_cache(out):
            return
        command, sources = self._command, self._sources
        self._source = "checkpoint"
        sources.experts.read_into(command.layer, command.expert, out, self._reading)
        if sources.cache is not None:
            sha256 = sources.experts.canonical_sha256(command.layer, command.expert)
            with self._reading.blocking():
                sources.cache.add(sha256, out)

    def _read_own_slot(self, out: memoryview) -> None:
        """Copy between two slots of this shard; the one copied from is pinned meanwhile."""
        command, source = self._command, self._command.source
        if not self._core.pin_copy(source.slot, source.slot_tag, command.layer, command.expert):
            raise NotFound(
                f"slot {source.slot} of this rank does not hold layer {command.layer} "
                f"expert {command.expert} with tag {source.slot_tag}"
            )
        try:
            held = self._pool.buffer(source.slot).data
            for begin in range(0, len(out), READ_CHUNK_BYTES):
                chunk = held[begin : begin + READ_CHUNK_BYTES]
                out[begin : begin + len(chunk)] = chunk
                self._reading.advance(len(chunk))
        finally:
            self._core.unpin_copy(source.slot)
