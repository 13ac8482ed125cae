"""Keeps manifests on disk, so that a checkpoint is read whole only once.

Responsible for: where a manifest is kept, whether a kept one is still right, writing it atomically.
Must never: give out a manifest that is damaged, of another format, or of files that have changed.
Called by: bootstrap, the shard and the CLI.

One file a (checkpoint folder, serving dtype):

    line 1   SHA-256 hex of everything after it
    rest     the manifest as JSON

It counts as right if line 1 agrees and the name, size and modification time of every file of the
checkpoint are those recorded. Weights rewritten with size and time forged are not noticed here, but
are when experts are read against the manifest.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from moe_serve.weights.build import Progress, build_manifest
from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.weights.dtypes import ServingDtype, serving_dtype
from moe_serve.weights.errors import MissingFile, shown
from moe_serve.weights.manifest import MANIFEST_FORMAT, Manifest

CACHE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest cache file read; the manifest of 14,848 experts has 15 MB."""


def load_or_build(
    checkpoint: Checkpoint,
    dtype: ServingDtype,
    cache_dir: str | os.PathLike[str],
    progress: Progress | None = None,
    num_threads: int = 1,
) -> Manifest:
    """The checkpoint's manifest for serving dtype `dtype`: from the cache if a right one is there,
    else computed (see `build_manifest`) and kept. `progress` is called only when computing.

    Raises the `WeightsError` of a faulty tensor; `MissingFile` if the cache cannot be written.
    """
    dtype = serving_dtype(dtype)
    path = cache_path(checkpoint, dtype, cache_dir)
    cached = load_cached(checkpoint, dtype, path)
    if cached is not None:
        return cached
    manifest = build_manifest(checkpoint, dtype, progress, num_threads)
    try:
        _write(path, manifest)
    except OSError as fault:
        raise MissingFile(
            f"manifest cache {shown(str(path))} cannot be written ({fault.strerror}); give a "
            "cache folder that is writable and has space"
        ) from fault
    return manifest


def cache_path(
    checkpoint: Checkpoint, dtype: ServingDtype, cache_dir: str | os.PathLike[str]
) -> Path:
    """File that holds, or would hold, the manifest of this checkpoint folder and dtype."""
    key = hashlib.sha256(os.fsencode(checkpoint.folder)).hexdigest()[:16]
    return Path(cache_dir) / f"manifest-{key}-{dtype}.json"


def load_cached(checkpoint: Checkpoint, dtype: ServingDtype, path: Path) -> Manifest | None:
    """The manifest in `path` if it is there, whole, and of the files as they are now; else None.

    None is not a fault that was swallowed: a cache may be lost or damaged at any time, and the
    answer to all of these is to compute the manifest again.
    """
    try:
        if path.stat().st_size > CACHE_BYTES_MAX:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    checksum, _, body = content.partition(b"\n")
    if checksum != hashlib.sha256(body).hexdigest().encode():
        return None
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, RecursionError):
        return None  # written by a version with another structure
    return manifest if _is_current(manifest, checkpoint, dtype) else None


def _is_current(manifest: Manifest, checkpoint: Checkpoint, dtype: ServingDtype) -> bool:
    spec = checkpoint.spec
    return (
        manifest.format == MANIFEST_FORMAT
        and manifest.serving_dtype == dtype
        and manifest.files == checkpoint.files
        and manifest.expert_bytes == spec.expert_bytes(dtype)
        and (manifest.num_layers, manifest.num_experts) == (spec.num_layers, spec.num_experts)
        and len(manifest.experts) == spec.num_layers * spec.num_experts
    )


def _write(path: Path, manifest: Manifest) -> None:
    body = msgspec.json.encode(manifest)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A temporary name of its own for each writer: several nodes may share the folder.
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
