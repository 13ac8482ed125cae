"""Images into a PNG file, with zlib alone: a chart needs no plotting library on a server.

Responsible for the file. The same image gives the same bytes. Called by the commands replay and
heat.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from moe_serve.cli.charts.panel import Panel
from moe_serve.cli.charts.raster import PALETTE, Image, draw
from moe_serve.cli.whole_file import STANDARD_OUTPUT, write_stdout, write_whole

Palette = Sequence[tuple[int, int, int]]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
INDEXED = 3
"""Colour type: one byte a pixel, a number in the palette."""


def write_png(file: Path, panels: Sequence[Panel]) -> None:
    """Draw the panels below each other into a file. Raises as `write_image`."""
    write_image(file, draw(panels))


def write_image(file: Path, image: Image, palette: Palette = PALETTE) -> None:
    """An image into a file; an older one is replaced, by a whole one or not at all. `-` is standard
    output. Raises InvalidArgument where it cannot be written, or is no regular file."""
    data = encode_png(image, palette)
    if file == STANDARD_OUTPUT:
        write_stdout(data)
    else:
        write_whole(file, data, "--png")


def encode_png(image: Image, palette: Palette = PALETTE) -> bytes:
    """An image uint8 [height, width] of numbers in a palette of at most 256 colours as PNG."""
    height, width = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, INDEXED, 0, 0, 0)
    colours = b"".join(bytes(colour) for colour in palette)
    # Each row begins with the number of its filter: 0, none.
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    return SIGNATURE + b"".join(
        (
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", colours),
            _chunk(b"IDAT", zlib.compress(rows, 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
