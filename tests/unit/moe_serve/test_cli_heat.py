"""`moe-serve heat`: in colours, in digits, pooled, as PNG and as CSV."""

import json
import struct
import sys
import zlib
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.cli.charts.heat import Field, field_lines, legend, pooled
from moe_serve.cli.charts.ramp import NUM_STEPS, RAMP, steps_of
from moe_serve.cli.commands.heat import has_colours
from moe_serve.cli.options import Reach
from moe_serve.cli.whole_file import check_binary_stdout
from moe_serve.errors import InvalidArgument
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin, make_placement, make_window

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
DEMAND = np.array([[[6, 2], [0, 0]], [[1, 1], [0, 4]]])


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("MOE_SERVE_ADDRESS", "127.0.0.1:4000")
    monkeypatch.delenv("MOE_SERVE_SERVICE", raising=False)


def _large() -> FakeAdmin:
    """3 layers of 300 experts, the expert after the layer's number the hottest."""
    demand = np.ones((2, 3, 300))
    demand[0, range(3), range(1, 4)] = 1000
    placement = make_placement()
    placement.num_layers, placement.num_experts = 3, 300
    return FakeAdmin(placements=[placement], window=make_window(demand))


def _run(admin: FakeAdmin, *args: object) -> Result:
    return CliRunner().invoke(
        app, ["heat", *map(str, args)], obj=Reach(connect=admin), catch_exceptions=False
    )


def _small() -> FakeAdmin:
    return FakeAdmin(window=make_window(DEMAND))


@pytest.mark.parametrize("mode", ["load", "share", "replicas"])
def test_a_pipe_gets_digits(mode: str, rewrite: bool) -> None:
    result = _run(_small(), "--mode", mode)
    assert (result.exit_code, result.stderr) == (0, "")
    file = GOLDEN / f"heat_{mode}.txt"
    if rewrite:
        file.write_text(result.stdout, encoding="utf-8")
    assert result.stdout == file.read_text(encoding="utf-8")


def test_what_does_not_fit_is_pooled_by_the_greatest_and_said() -> None:
    lines = _run(_large()).stdout.splitlines()
    assert "a cell is the greatest of 1 layers x 2 experts" in lines[-1]
    rows = [line for line in lines if line[:2] in ("0 ", "1 ", "2 ")][:3]
    assert [row.split()[1][:3].index("9") for row in rows] == [0, 1, 1]
    assert all(len(line) <= 200 for line in lines)


def test_one_layer_is_wrapped_and_every_expert_shown() -> None:
    lines = _run(_large(), "--layer", 2, "--mode", "share").stdout.splitlines()
    assert lines[1] == "layer 2: load / fair share, all phases"
    assert lines[3].split() == ["0", "0", "0", "0", "9", *["0"] * 28]
    assert lines[12].split() == ["288", *["0"] * 12]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_phase_is_that_which_was_asked_for(phase: str) -> None:
    shown = json.loads(_run(_small(), "--phase", phase, "-o", "json").stdout)
    assert shown["pairs"] == DEMAND[["prefill", "decode"].index(phase)].tolist()
    assert f"{phase} phase" in _run(_small(), "--phase", phase).stdout


def test_programs_get_lists_by_layer() -> None:
    shown = yaml.safe_load(_run(_small(), "--layer", 1, "-o", "yaml").stdout)
    assert (shown["layers"], shown["pairs"], shown["share"]) == ([1], [[0, 4]], [[0.0, 1.0]])
    assert shown["replicas"] == [[1, 1]]


def test_csv_has_a_line_an_expert(tmp_path: Path) -> None:
    expected = [
        b"layer,expert,pairs,share,rank_in_layer,replicas,ranks",
        b"0,0,7,0.70000000,1,1,0",
        b"0,1,3,0.30000000,2,1,1",
        b"1,0,0,0.00000000,2,1,0",
        b"1,1,4,1.00000000,1,1,1",
        b"",
    ]
    file = tmp_path / "heat.csv"
    result = _run(_small(), "--csv", file)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.replace("\n", "") == f"heat written to {file}"
    assert file.read_bytes().split(b"\r\n") == expected
    assert _run(_small(), "--csv", "-").stdout_bytes.split(b"\r\n") == expected
    one = _run(_small(), "--csv", "-", "--layer", 1).stdout_bytes
    assert one.split(b"\r\n") == [expected[0], *expected[3:]]


def _pixels(file: Path) -> tuple[np.ndarray, bytes]:
    """Numbers of the palette [height, width], and the palette."""
    data = file.read_bytes()
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunks[data[at + 4 : at + 8]] = data[at + 8 : at + 8 + size]
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    raw = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    return raw[:, 1:], chunks[b"PLTE"]


def test_a_png_has_a_cell_an_expert_in_the_colours_of_the_ramp(tmp_path: Path) -> None:
    file = tmp_path / "heat.png"
    result = _run(_large(), "--png", file, "--mode", "share")
    assert (result.exit_code, result.stdout) == (0, "")
    pixels, palette = _pixels(file)
    hottest = NUM_STEPS + 1
    assert tuple(palette[3 * hottest : 3 * hottest + 3]) == RAMP[-1]
    cell = 1200 // 300
    rows, columns = np.nonzero(pixels[56 : 56 + 3 * cell] == hottest)
    assert len(rows) == 3 * cell * cell
    assert sorted(set(rows // cell)) == [0, 1, 2]
    # One cell further right in each layer.
    starts = [columns[rows // cell == layer].min() for layer in range(3)]
    assert np.diff(starts).tolist() == [cell, cell]


def test_a_png_to_standard_output_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "heat.png"
    _run(_small(), "--png", file)
    result = _run(_small(), "--png", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout_bytes == file.read_bytes()
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.setattr(sys, "stdout", _Terminal())
    with pytest.raises(InvalidArgument, match=r"--png - writes bytes, and .* is a terminal"):
        check_binary_stdout("--png")


@pytest.mark.parametrize("option", ["--png", "--csv"])
def test_a_file_that_cannot_be_written_names_the_option(tmp_path: Path, option: str) -> None:
    result = _run(_small(), option, tmp_path / "none" / "f")
    assert result.exit_code == 2
    assert f"{option} " in result.stderr
    assert "name a file in a folder that exists" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--layer", 2), "--layer 2: the model has 2 layers, from 0 to 1"),
        (("--layer", -1), ""),
        (("--mode", "fire"), ""),
        (("--phase", "x"), ""),
        (("--csv", "-", "-o", "json"), "--csv - and -o json both want standard output"),
        (("--png", "-", "-o", "yaml"), "--png - and -o yaml both want standard output"),
        (("--png", "-", "--csv", "-"), "--png - and --csv - both want standard output"),
    ],
)
def test_wrong_arguments_are_exit_2(args: tuple[object, ...], words: str) -> None:
    result = _run(_small(), *args)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_model_without_layers_has_no_numbers_of_them() -> None:
    result = _run(FakeAdmin(placements=[pb.GetPlacementResponse()]), "--layer", 0)
    assert (result.exit_code, result.stderr) == (2, "error: --layer 0: the model has 0 layers\n")


def test_a_window_that_does_not_fit_its_shape_is_the_services_fault() -> None:
    admin = _small()
    assert admin.window is not None
    admin.window.demand = b"abc"
    result = _run(admin)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "demand of window 12 has 3 bytes" in result.stderr


def test_replicas_need_no_window_and_load_does() -> None:
    assert _run(FakeAdmin(window=None), "--mode", "replicas").exit_code == 0
    result = _run(FakeAdmin(window=None))
    assert (result.exit_code, result.stdout) == (3, "")


# -- drawing -------------------------------------------------------------------------------------


class _Terminal(StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "colours"),
    [
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, True),
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_are_for_terminals_that_have_them(
    environment: dict[str, str], colours: bool
) -> None:
    assert has_colours(Console(file=_Terminal(), _environ=environment)) is colours
    assert not has_colours(Console(file=StringIO(), _environ=environment))


def test_a_terminal_of_another_encoding_gets_digits() -> None:
    class Latin(_Terminal):
        encoding = "latin-1"  # type: ignore[assignment]

    environment = {"TERM": "xterm-256color"}
    assert not has_colours(Console(file=Latin(), _environ=environment))


@pytest.mark.parametrize(
    ("system", "level", "code"),
    [("truecolor", 1.0, "38;2;254;232;56"), ("256", 0.613, "38;5;"), (None, 0.1, "0 ▀")],
)
def test_two_rows_are_one_line_of_half_blocks(system: str | None, level: float, code: str) -> None:
    """Another level each time: rich keeps the codes of a style as it first wrote them."""
    field = Field(np.array([[level, 0.0], [0.0, level], [np.nan, level], [0.5, np.nan]]))
    lines, shown = field_lines(field, width=20, height=None, colour=True)
    assert shown is field
    assert [line.plain.rstrip() for line in lines] == [
        "  0   1",
        "0 " + "▀" * 8,
        "2 " + "▄" * 4 + "▀" * 4,
    ]
    out = StringIO()
    console = Console(file=out, color_system=system, force_terminal=True, _environ={})  # type: ignore[arg-type]
    console.print(lines[1])
    assert code in out.getvalue()


def test_a_field_is_pooled_to_the_room_there_is() -> None:
    levels = np.zeros((5, 7))
    levels[4, 6] = 0.5
    lines, shown = field_lines(Field(levels), width=6, height=3, colour=False)
    assert shown.levels.shape == (2, 4)
    assert (shown.row_step, shown.column_step) == (3, 2)
    assert [line.plain for line in lines] == ["  0", "0 0000", "3 0005"]


def test_pooling_keeps_what_is_no_cell_apart() -> None:
    found = pooled(Field(np.array([[0.1, np.nan], [np.nan, np.nan]])), 2, 1).levels
    assert found[0, 0] == 0.1
    assert np.isnan(found[1, 0])


def test_the_ramp_grows_lighter_all_the_way() -> None:
    light = [0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue in RAMP]
    assert (np.diff(light) > 0).all()
    assert len(RAMP) == NUM_STEPS
    assert steps_of(np.array([-1.0, 0.0, 1.0, 2.0])).tolist() == [0, 0, 239, 239]


def test_the_legend_names_both_ends() -> None:
    assert legend("0", "7.5", colour=False).plain == "0 0123456789 7.5"
    assert legend("0", "9", colour=True).plain.split() == ["0", "9"]
