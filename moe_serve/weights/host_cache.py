"""Canonical bytes of experts kept on a node, so that one whose replicas are lost need not be read
and converted from the checkpoint again.

Responsible for a bounded folder of files, each named by the SHA-256 of its content, and for never
giving out a byte that does not have that digest. Must never hold a lock while it waits, take the
last free bytes of a disk, or be needed: whatever is wrong with it, the checkpoint is read instead.
Called by the shard's copy job and by `assembly`.

All shards of a node share the folder. That is safe without a server: names are digests, so every
file of a name has the same content; a file appears whole, by a rename; one that is removed while it
is read stays readable; who adds or removes holds a lock on `lock`, and who does not get it at once
adds nothing. The bytes lie in the page cache: they are as near as memory while memory is not short,
and the system takes them back before anything fails for want of it.

Least recently used files go first, by modification time, which each use sets. A file younger than
`KEEP_LEAST_S` is not pushed out: when a service fills for the first time, each expert is read once,
and a cache that took them all in turn would only write.

Looking at every file at every addition would make a fill quadratic. So `lock` holds the sum of all
sizes, empty while somebody changes it: who finds a sum need not look, and who finds none counts
anew. Files that go without the lock (damaged ones) make the sum too great, never too small. The
order of use, once looked at, serves until it is used up: a file that was used since is passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import threading
from collections import Counter, deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from moe_serve.weights.errors import TruncatedFile, UnsafePath, shown
from moe_serve.weights.paths import read_exactly
from moe_serve.weights.reading import READ_CHUNK_BYTES, UNINTERRUPTED, Reading

KEEP_LEAST_S = 60.0
"""Age below which a file is not pushed out by another."""
FREE_LEAST_BYTES: Final = 1 << 30
"""Bytes that are left free on the disk; the journal may lie on the same."""
_NAME = re.compile(r"[0-9a-f]{64}")
_LOCK: Final = "lock"
_PART: Final = ".part"
_SUM_CHARS_MAX: Final = 18
"""Digits of a sum of bytes."""


class HostCache:
    """The cache in `folder` (made if it is missing), of at most `bytes_max` bytes.

    `counts` are totals since this object was made: hits, misses, damaged, added, evicted.

    Raises `UnsafePath` where the folder is not this user's alone, OSError where it cannot be made.
    """

    def __init__(self, folder: str, bytes_max: int) -> None:
        assert bytes_max >= 0, f"bytes_max {bytes_max}"
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not mine or stat.S_IMODE(found.st_mode) & 0o022:
            raise UnsafePath(
                f"cache folder {shown(folder)} may be written by others; give one that only this "
                "user can write"
            )
        self._folder = folder
        self._bytes_max = bytes_max
        self._seen_bytes = 0
        self._order: deque[tuple[float, int, str]] | None = None
        """Files by last use as they were looked at last, those since pushed out gone from it; None
        before the first look. Guarded by the lock file."""
        self._counts: Counter[str] = Counter()
        self._count_lock = threading.Lock()

    @property
    def bytes_max(self) -> int:
        """Most bytes of all its files."""
        return self._bytes_max

    @property
    def counts(self) -> dict[str, int]:
        """See the class."""
        with self._count_lock:
            return dict(self._counts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files now; looks at the disk."""
        return sum(size for _mtime, size, _name in self._files())

    @property
    def seen_bytes(self) -> int:
        """Bytes of all its files when this object added something last; looks at no disk."""
        return self._seen_bytes

    def holds(self, sha256: str) -> bool:
        """Whether there is a file of that digest."""
        return os.path.exists(self._path(sha256))

    def read_into(self, sha256: str, out: memoryview, reading: Reading = UNINTERRUPTED) -> bool:
        """Fill `out` with the bytes of that digest. False where they are not here, or were damaged
        (then the file is removed, so that it can be added anew); `out` holds undefined bytes in
        that case. Raises only what `reading` raises."""
        try:
            got = self._read(sha256, out, reading)
        except OSError:
            self._count("misses")
            return False
        except TruncatedFile:
            got = ""
        if got != sha256:
            self._count("damaged")
            with contextlib.suppress(OSError):
                os.unlink(self._path(sha256))
            return False
        self._count("hits")
        return True

    def add(self, sha256: str, content: memoryview) -> bool:
        """Keep bytes whose digest the caller has checked. False where they are here already, or
        there is no room, or another shard adds something now."""
        if len(content) > self._bytes_max or self.holds(sha256):
            return False
        try:
            with self._locked() as lock:
                kept = lock >= 0 and self._add_locked(lock, sha256, content)
        except OSError:
            # The disk is full or gone. What was written so far is removed by the next who adds.
            return False
        if kept:
            self._count("added")
        return kept

    def _read(self, sha256: str, out: memoryview, reading: Reading) -> str:
        """SHA-256 of what was read, "" where it is no file of that size."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = -1
        try:
            with reading.blocking():
                # Leaving may raise with the file open.
                descriptor = os.open(self._path(sha256), flags)
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_size != len(out):
                    return ""
                os.utime(descriptor)
            digest = hashlib.sha256()
            # A read that hangs must not end in memory of the caller, who may have given up.
            private = memoryview(bytearray(min(len(out), READ_CHUNK_BYTES)))
            for begin in range(0, len(out), READ_CHUNK_BYTES):
                chunk = private[: min(READ_CHUNK_BYTES, len(out) - begin)]
                with reading.blocking():
                    read_exactly(descriptor, sha256, begin, chunk)
                reading.advance(len(chunk))
                out[begin : begin + len(chunk)] = chunk
                digest.update(chunk)
            return digest.hexdigest()
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _write(self, sha256: str, content: memoryview) -> None:
        path = self._path(sha256)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path + _PART, flags, 0o600)
        try:
            done = 0
            while done < len(content):
                done += os.write(descriptor, content[done : done + READ_CHUNK_BYTES])
        except OSError:
            os.unlink(path + _PART)
            raise
        finally:
            os.close(descriptor)
        os.rename(path + _PART, path)

    def _add_locked(self, lock: int, sha256: str, content: memoryview) -> bool:
        held_bytes = self._sum(lock)
        room = self._room(held_bytes, len(content))
        if room is None:
            return False
        held_bytes, gone = room
        # From here to the new sum the old one is not true; whoever finds none looks at all files.
        os.ftruncate(lock, 0)
        for name in gone:
            # Whoever reads a damaged one removes it, without the lock.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, name))
            self._count("evicted")
        self._write(sha256, content)
        self._seen_bytes = held_bytes + len(content)
        os.pwrite(lock, str(self._seen_bytes).encode(), 0)
        return True

    def _room(self, held_bytes: int, num_bytes: int) -> tuple[int, list[str]] | None:
        """Under the lock: the least recently used files that have to go for `num_bytes` to fit, and
        the bytes of all files without them; None where there is no room. held_bytes: of all files,
        -1 = not known."""
        looked = held_bytes < 0 or self._order is None
        if looked:
            held_bytes = self._look()
        order = self._order
        assert order is not None, "files were looked at"
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize - FREE_LEAST_BYTES
        # Files are stamped by the wall clock; one that jumps only keeps or drops a file too much.
        newest_s = datetime.now(UTC).timestamp() - KEEP_LEAST_S
        gone: list[tuple[float, int, str]] = []
        missing = max(held_bytes + num_bytes - self._bytes_max, num_bytes - free)
        while missing > 0:
            if not order and not looked:
                return self._room(-1, num_bytes)
            if not order or order[0][0] > newest_s:
                order.extendleft(reversed(gone))
                return None
            one = order.popleft()
            if self._used_at_s(one[2]) == one[0]:
                gone.append(one)
                missing -= one[1]
        return held_bytes - sum(size for _, size, _ in gone), [name for _, _, name in gone]

    def _look(self) -> int:
        """Under the lock: look at every file. Returns the bytes of all."""
        self._remove_parts()
        self._order = deque(sorted(self._files()))
        return sum(size for _mtime, size, _name in self._order)

    def _used_at_s(self, name: str) -> float | None:
        try:
            return os.lstat(os.path.join(self._folder, name)).st_mtime
        except FileNotFoundError:
            return None

    @staticmethod
    def _sum(lock: int) -> int:
        """The sum in the lock file, -1 where there is none."""
        text = os.pread(lock, _SUM_CHARS_MAX + 1, 0)
        return int(text) if text.isdigit() and len(text) <= _SUM_CHARS_MAX else -1

    def _remove_parts(self) -> None:
        # Only who holds the lock writes, so these are of writers that died.
        for name in os.listdir(self._folder):
            if name.endswith(_PART):
                os.unlink(os.path.join(self._folder, name))

    def _files(self) -> list[tuple[float, int, str]]:
        """Modification time, size and name of each; one that goes meanwhile is left out."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        files.append((found.st_mtime, found.st_size, entry.name))
        return files

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The lock file where the lock was free, -1 elsewhere; it is held meanwhile."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(os.path.join(self._folder, _LOCK), flags, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield -1
            else:
                yield descriptor
        finally:
            os.close(descriptor)  # and the lock with it

    def _path(self, sha256: str) -> str:
        assert _NAME.fullmatch(sha256), "names are SHA-256 in hex"
        return os.path.join(self._folder, sha256)

    def _count(self, name: str) -> None:
        with self._count_lock:
            self._counts[name] += 1
