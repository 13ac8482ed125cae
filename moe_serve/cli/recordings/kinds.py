"""Which kind of recording a path is: by what it holds, not by its name.

Responsible for choosing the reader. Called by the replay command.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from moe_serve.cli.recordings.arrays import read_arrays
from moe_serve.cli.recordings.dumps import read_dumps
from moe_serve.cli.recordings.stats_lines import read_lines
from moe_serve.cli.recordings.trace import CountTrace, TokenTrace, check_file, reading
from moe_serve.controller.journal_store import INPUTS_FILE
from moe_serve.errors import InvalidArgument

SQLITE_MAGIC = b"SQLite format 3\0"
ZIP_MAGIC = b"PK"
PICKLE_MAGIC = b"\x80"
DUMP_SUFFIX = ".pt"


def is_journal(source: Path) -> bool:
    """Whether a path is a journal (a folder of state, or its inputs file) rather than a trace.

    Raises InvalidArgument where it is neither.
    """
    with reading(source):
        if source.is_dir() and not (source / INPUTS_FILE).exists() and _dumps_in(source):
            return False
    file = source / INPUTS_FILE if source.is_dir() else source
    with reading(file):
        check_file(file)
    magic = _begins(file)
    if magic == SQLITE_MAGIC:
        return True
    if magic.startswith(ZIP_MAGIC) or magic.lstrip().startswith(b"{"):
        return False
    if magic.startswith(PICKLE_MAGIC):
        raise InvalidArgument(
            f"{file} is a pickle, which is never loaded; save tensors with a torch of today, or "
            "arrays with numpy.savez"
        )
    raise InvalidArgument(
        f"{file} is neither a journal (the folder that holds {INPUTS_FILE}, or that file) nor a "
        "trace (.npz with topk_ids or counts, .pt of SGLang's recorder or a folder of them, .jsonl "
        "of vLLM)"
    )


def read_trace(source: Path) -> TokenTrace | CountTrace:
    """A trace of any kind. Raises InvalidArgument and ResourceExhausted, which name the file, the
    field, the limit and the next step."""
    with reading(source):
        if source.is_dir():
            return read_dumps(_dumps_in(source))
        check_file(source)
        if not _begins(source).startswith(ZIP_MAGIC):
            return read_lines(source)
        with zipfile.ZipFile(source) as archive:
            torch_made = any(name.endswith("/data.pkl") for name in archive.namelist())
        return read_dumps([source]) if torch_made else read_arrays(source)


def _dumps_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix == DUMP_SUFFIX)


def _begins(file: Path) -> bytes:
    try:
        with file.open("rb") as handle:
            return handle.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise InvalidArgument(
            f"{file} cannot be read: {error.strerror}; check the path and its rights"
        ) from error
