"""Opens checkpoint files by name, and only below the checkpoint's root.

Responsible for: the root of a checkpoint, checking names, and opening files read-only.
Must never: open a file whose resolved path lies outside the root, follow a name with a separator,
or read more than the caller's limit.
Called by: `header`, `safetensors_index`, `checkpoint`.

The root is the checkpoint folder itself. A Hugging Face Hub snapshot is the one exception: its
files are links into a `blobs` folder beside `snapshots`, so there the root is the `models--*`
folder that holds both.

    models--org--name/            <- root
      blobs/3f9a...               <- the bytes
      snapshots/1a2b/             <- checkpoint folder
        model.safetensors -> ../../blobs/3f9a...
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moe_serve.weights.errors import MissingFile, TruncatedFile, UnsafePath, shown
from moe_serve.weights.reading import READ_CHUNK_BYTES

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_NAME_RULE = "1 to 128 characters out of A-Z a-z 0-9 . _ - and not '.' or '..'"


@dataclass(frozen=True)
class FileStamp:
    """What identifies the content of a file without reading it."""

    name: str
    size_bytes: int
    mtime_ns: int
    device: int
    inode: int


@dataclass(frozen=True)
class CheckpointRoot:
    """A checkpoint folder and the folder that resolved links must stay below. Both are absolute
    and free of links."""

    folder: str
    root: str


def check_name(name: str, what: str) -> str:
    """Return `name` if it is a plain name, else raise `UnsafePath`. `what` says whose name it is,
    for the message ("model name", "file name in model.safetensors.index.json")."""
    if name in {".", ".."} or _NAME.fullmatch(name) is None:
        raise UnsafePath(f"{what} {shown(name)} is refused: a name is {_NAME_RULE}")
    return name


def find_root(path: str | os.PathLike[str]) -> CheckpointRoot:
    """Resolve the folder an operator named and find its root.

    Raises `UnsafePath` for a path no system call accepts, `MissingFile` if there is no folder.
    """
    given = os.fspath(path)
    try:
        folder = os.path.realpath(given, strict=True)
        is_folder = os.path.isdir(folder)
    except (ValueError, OSError) as fault:
        if isinstance(fault, FileNotFoundError):
            raise MissingFile(_no_folder(given)) from None
        raise UnsafePath(
            f"checkpoint folder {shown(given)} cannot be resolved ({_reason(fault)}); "
            "name an existing local folder"
        ) from fault
    if not is_folder:
        raise MissingFile(
            f"checkpoint {shown(given)} is a file; name the folder that holds config.json and "
            "model.safetensors (or model.safetensors.index.json)"
        )
    snapshots, _ = os.path.split(folder)
    models, last = os.path.split(snapshots)
    is_snapshot = last == "snapshots" and os.path.basename(models).startswith("models--")
    return CheckpointRoot(folder=folder, root=models if is_snapshot else folder)


def default_model_name(root: CheckpointRoot) -> str:
    """Name of the model when the operator gave none: the folder's name, or the last part of a Hub
    snapshot's `models--org--name`. Raises `UnsafePath` if that is not a plain name."""
    name = os.path.basename(root.root)
    if root.root != root.folder:
        name = name.split("--")[-1]
    return check_name(name, "model name taken from the checkpoint folder (give one explicitly):")


def has_file(root: CheckpointRoot, name: str) -> bool:
    """True if the folder has an entry called `name` (a dangling link counts: opening it tells)."""
    return os.path.lexists(os.path.join(root.folder, check_name(name, "file name")))


@contextmanager
def open_file(root: CheckpointRoot, name: str) -> Iterator[tuple[int, FileStamp]]:
    """Open file `name` of the checkpoint read-only; yields its descriptor and stamp.

    The path is resolved first, and the resolved path is opened without following another link.
    Somebody who can replace folders inside the root between the two steps can still win; the
    manifest's digests, not this check, are what protects the content from such a writer.

    Raises `UnsafePath` (bad name, link out of the root, not a regular file), `MissingFile`.
    """
    check_name(name, "file name")
    resolved = _resolve_inside(root, name)
    # O_NONBLOCK: opening a FIFO must not hang before it is recognised as one.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(resolved, flags)
    except OSError as fault:
        raise MissingFile(
            f"file {name} in {shown(root.folder)} cannot be opened ({_reason(fault)}); "
            "check its permissions"
        ) from fault
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafePath(f"{name} in {shown(root.folder)} is not a regular file; replace it")
        yield (
            descriptor,
            FileStamp(name, found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino),
        )
    finally:
        os.close(descriptor)


def read_small_file(root: CheckpointRoot, name: str, bytes_max: int) -> tuple[bytes, FileStamp]:
    """Content and stamp of a small file. `UnsafePath` if it is larger than `bytes_max`."""
    with open_file(root, name) as (descriptor, stamp):
        if stamp.size_bytes > bytes_max:
            raise UnsafePath(
                f"file {name} in {shown(root.folder)} has {stamp.size_bytes} bytes, more than the "
                f"limit of {bytes_max}; it is not what its name says"
            )
        content = bytearray(stamp.size_bytes)
        read_exactly(descriptor, name, 0, memoryview(content))
        return bytes(content), stamp


def read_exactly(
    descriptor: int,
    name: str,
    offset: int,
    out: memoryview,
    came: Callable[[int], None] = lambda _num_bytes: None,
) -> None:
    """Fill `out` from byte `offset` of an open file, or raise `TruncatedFile`.

    Positional reads, not a memory map: a file that shrinks under a map kills the process. In
    chunks; `came` is told the bytes of each and may raise to end the reading.
    """
    done = 0
    while done < len(out):
        chunk = out[done : done + READ_CHUNK_BYTES]
        count = os.preadv(descriptor, [chunk], offset + done)
        if count == 0:
            raise TruncatedFile(
                f"file {name} ends at byte {offset + done}, but bytes up to {offset + len(out)} "
                "are needed; fetch the file again"
            )
        done += count
        came(count)


def _resolve_inside(root: CheckpointRoot, name: str) -> str:
    path = os.path.join(root.folder, name)
    try:
        resolved = os.path.realpath(path, strict=True)
    except FileNotFoundError:
        why = "is a link to a file that is not there" if os.path.islink(path) else "is missing"
        raise MissingFile(
            f"file {name} {why} in checkpoint folder {shown(root.folder)}; "
            "fetch the checkpoint again"
        ) from None
    except OSError as fault:
        raise UnsafePath(
            f"file {name} in {shown(root.folder)} cannot be resolved ({_reason(fault)}); "
            "replace the link by the file"
        ) from fault
    if os.path.commonpath([root.root, resolved]) != root.root:
        raise UnsafePath(
            f"file {name} is a link that leaves the checkpoint: it ends at {shown(resolved)}, "
            f"outside {shown(root.root)}; put the file itself into the folder"
        )
    return resolved


def _no_folder(given: str) -> str:
    hint = "; addresses are not fetched: download it first" if "://" in given else ""
    return f"checkpoint folder {shown(given)} does not exist{hint or '; check the path'}"


def _reason(fault: Exception) -> str:
    return fault.strerror or str(fault) if isinstance(fault, OSError) else str(fault)
