"""Panels into a PNG file, with zlib alone: a chart needs no plotting library on a server.

Responsible for the file. The same panels give the same bytes. Called by the replay command.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from moe_serve.cli.charts.panel import Panel
from moe_serve.cli.charts.raster import PALETTE, Image, draw
from moe_serve.errors import InvalidArgument

SIGNATURE = b"\x89PNG\r\n\x1a\n"
INDEXED = 3
"""Colour type: one byte a pixel, a number in the palette."""


def write_png(file: Path, panels: Sequence[Panel]) -> None:
    """Draw the panels below each other into a file; an older one is replaced, by a whole one or not
    at all. Raises InvalidArgument where it cannot be written, or is no regular file."""
    data = encode_png(draw(panels))
    try:
        if file.exists() and not file.is_file():
            raise InvalidArgument(
                f"--png {file} cannot be written: it is no regular file; name one in a folder that "
                "exists"
            )
        fresh = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        try:
            fresh.write_bytes(data)
            fresh.replace(file)
        finally:
            fresh.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgument(
            f"--png {file} cannot be written: {reason}; name a file in a folder that exists"
        ) from error


def encode_png(image: Image) -> bytes:
    """An image [height, width] of numbers in PALETTE as PNG."""
    height, width = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, INDEXED, 0, 0, 0)
    palette = b"".join(bytes(colour) for colour in PALETTE)
    # Each row begins with the number of its filter: 0, none.
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    return SIGNATURE + b"".join(
        (
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", palette),
            _chunk(b"IDAT", zlib.compress(rows, 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
