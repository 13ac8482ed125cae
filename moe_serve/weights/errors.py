"""Typed refusals of the weights package.

Responsible for: one class for each way a checkpoint can be wrong, so callers can tell them apart.
Must never: hold tensor data, or text from a checkpoint that was not shortened by `shown`.
Called by: every module of `moe_serve.weights`; caught by the shard, bootstrap and the CLI.

Each message names the file or tensor, what was expected, and the next step. Each class keeps the
message as its only argument, so it survives pickling between actors.
"""

from __future__ import annotations

from moe_serve.errors import MoeServeError

SHOWN_CHARS_MAX = 200
"""Longest piece of foreign text (a tensor or file name) quoted in a message, in characters."""


class WeightsError(MoeServeError):
    """Base of all refusals here: the request may be right, the checkpoint is not."""

    code = "FAILED_PRECONDITION"


class MissingFile(WeightsError):
    """A file or folder that the checkpoint needs is not there or cannot be read."""


class UnsafePath(WeightsError):
    """A name or link that would leave the checkpoint's root, or is not a plain file name."""

    code = "INVALID_ARGUMENT"


class UnsupportedCheckpoint(WeightsError):
    """A model family, format, dtype or activation that is known not to be served."""


class BadConfig(WeightsError):
    """`config.json` or the index file is malformed, lacks a field or contradicts itself."""


class BadHeader(WeightsError):
    """A safetensors header that is malformed, too large, or does not describe its bytes."""


class TruncatedFile(WeightsError):
    """A file holds fewer bytes than its header declares."""


class ChangedFile(WeightsError):
    """A file is not the one that was indexed (size, mtime or inode differ)."""


class MissingTensor(WeightsError):
    """A tensor that the configuration implies is in no file."""


class RenamedTensor(MissingTensor):
    """A needed tensor is missing while an unneeded one with nearly its name is present."""


class UnexpectedTensor(WeightsError):
    """An expert tensor that the configuration does not account for (extra expert, bias ...)."""


class ShapeMismatch(WeightsError):
    """A tensor or buffer whose shape, dtype or byte length is not the expected one."""


class NonFiniteTensor(WeightsError):
    """A tensor with a NaN or an infinity, stored or made by conversion to the serving dtype."""


class DigestMismatch(WeightsError):
    """Bytes whose SHA-256 is not the one in the manifest."""


class UnknownExpert(WeightsError):
    """A (layer, expert) outside the checkpoint's range."""

    code = "NOT_FOUND"


def shown_value(value: object) -> str:
    """Quote a foreign value of any type; of lists and objects the kind only, as their text may be
    nested deeper, or be longer, than can be written."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return shown(str(value))


def shown(text: str) -> str:
    """Quote foreign `text` for a message: escaped, and cut to `SHOWN_CHARS_MAX` characters."""
    if len(text) <= SHOWN_CHARS_MAX:
        return repr(text)
    return f"{text[:SHOWN_CHARS_MAX]!r}... ({len(text)} characters)"
