"""Charts as text and as PNG."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from moe_serve.cli.charts import Panel, Series, text_chart, write_png
from moe_serve.cli.charts.font import dots
from moe_serve.cli.charts.panel import binned, scale_of
from moe_serve.cli.charts.raster import FIRST_LINE, PALETTE, draw
from moe_serve.errors import InvalidArgument

FALLING = Panel(
    "balance",
    [Series("eplb", [1.0, 0.9, 0.8, None, 0.6]), Series("static", [0.5] * 5)],
    top=1.0,
)


@pytest.mark.parametrize(
    ("values", "ends", "ticks"),
    [
        ([0.82, 0.97], {"top": 1.0}, ["0.80", "0.85", "0.90", "0.95", "1.00"]),
        ([3.0, 24.0], {"bottom": 0.0}, ["0", "5", "10", "15", "20", "25"]),
        ([0.0, 0.0], {"bottom": 0.0}, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([1.0, 1.0], {"top": 1.0}, ["0.90", "0.92", "0.94", "0.96", "0.98", "1.00"]),
        ([], {}, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.999, 1.0], {"top": 1.0}, ["0.9990", "0.9992", "0.9994", "0.9996", "0.9998", "1.0000"]),
        ([100.0, 4100.0], {"bottom": 0.0}, ["0", "1000", "2000", "3000", "4000", "5000"]),
    ],
)
def test_axes_have_round_marks(
    values: list[float], ends: dict[str, float], ticks: list[str]
) -> None:
    scale = scale_of(Panel("", [Series("a", values)], **ends))
    assert [scale.shown(tick) for tick in scale.ticks] == ticks
    assert all(scale.low <= value <= scale.high for value in values)


def test_many_places_are_averaged() -> None:
    assert binned([1.0, 3.0, None, 5.0, None, None], 3) == [2.0, 5.0, None]
    assert binned([1.0, None], 3) == [1.0, None]


def test_a_chart_as_text() -> None:
    assert text_chart(FALLING, rows=6).splitlines() == [
        "balance",
        "1.0 |o",
        "0.9 | o",
        "0.8 |  o",
        "0.7 |",
        "0.6 |    o",
        "0.5 |*****",
        "    +-----",
        "     0   4",
        "     o eplb",
        "     * static",
    ]


def test_a_chart_of_nothing_as_text() -> None:
    assert text_chart(Panel("nothing", [])).splitlines()[0] == "nothing"


def _decoded(data: bytes) -> tuple[dict[bytes, bytes], np.ndarray]:
    """Chunks of a PNG, their sums checked, and its pixels."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (crc,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert crc == zlib.crc32(kind + body), kind
        chunks[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8)
    rows = rows.reshape(height, width + 1)
    assert not rows[:, 0].any()
    return chunks, rows[:, 1:]


def test_a_png_can_be_decoded(tmp_path: Path) -> None:
    file = tmp_path / "chart.png"
    write_png(file, [FALLING, FALLING])
    chunks, pixels = _decoded(file.read_bytes())
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    assert chunks[b"IHDR"][8:] == bytes([8, 3, 0, 0, 0])
    assert len(chunks[b"PLTE"]) == 3 * len(PALETTE)
    assert np.array_equal(pixels, draw([FALLING, FALLING]))
    assert pixels.shape == (600, 960)
    write_png(file, [FALLING, FALLING])
    assert _decoded(file.read_bytes())[1].tobytes() == pixels.tobytes()


def test_a_library_reads_the_same_pixels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow comes with matplotlib")
    file = tmp_path / "chart.png"
    write_png(file, [FALLING])
    with image.open(file) as read:
        colours = np.asarray(read.convert("RGB"))
    assert np.array_equal(colours, np.array(PALETTE, dtype=np.uint8)[draw([FALLING])])


def test_lines_lie_where_their_values_are() -> None:
    pixels = draw([FALLING])[70:]  # below the legend
    height = {colour: np.flatnonzero((pixels == colour).any(axis=1)) for colour in (FIRST_LINE, 4)}
    # The first falls from the top; the second is level at the bottom, two pixels thick.
    assert height[4].size == 2
    assert height[FIRST_LINE].min() < height[FIRST_LINE].max() < height[4].min()
    # A missing value is a gap: the third and the fifth place are not joined.
    columns = (pixels == FIRST_LINE).any(axis=0)
    third, fifth = 90 + 849 // 2, 90 + 849
    assert not columns[third + 4 : fifth - 4].any()
    assert columns[fifth]


def test_every_panel_stays_in_its_place() -> None:
    long = "x" * 300
    many = [Series(f"{number} {long[:40]}", [float(number)]) for number in range(20)]
    for panel in (Panel(long, many), Panel("", []), Panel("a", [Series("b", [None, None])])):
        pixels = draw([panel, FALLING])
        # Colours follow the names of both; what is drawn below does not depend on what is above.
        assert np.array_equal(pixels[300:] > 0, draw([FALLING]) > 0)
        assert pixels.max() < len(PALETTE)


def test_letters() -> None:
    rows = ["".join("#" if dot else "." for dot in row) for row in dots("t1")]
    assert rows == [
        "#####...#...",
        "..#....##...",
        "..#.....#...",
        "..#.....#...",
        "..#.....#...",
        "..#.....#...",
        "..#....###..",
    ]
    assert dots("?").any(axis=1).all()
    assert dots("").shape == (7, 0)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"--png .*chart\.png cannot be written: No such"):
        write_png(tmp_path / "absent" / "chart.png", [FALLING])


def test_what_is_no_regular_file_is_not_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path()):
        with pytest.raises(InvalidArgument, match="cannot be written: it is no regular file"):
            write_png(path, [FALLING])
    assert sorted(tmp_path.iterdir()) == [pipe]


def test_a_chart_that_was_not_written_whole_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chart.png"
    file.write_bytes(b"older")

    def cut(path: Path, data: bytes) -> int:
        with path.open("wb") as stream:
            stream.write(data[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", cut)
    with pytest.raises(KeyboardInterrupt):
        write_png(file, [FALLING])
    assert file.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [file]
