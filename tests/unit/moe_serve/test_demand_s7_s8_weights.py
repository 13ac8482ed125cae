"""S7 and S8: what is wrong with weights is found before memory is taken for it, and no name that a
tenant sends reaches a file.

Each refusal has a test of its own in test_weights_*; here they are added up in a process whose
memory is looked at.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from moe_serve.config.schema import ModelConfig
from moe_serve.errors import InvalidArgument
from moe_serve.router.checks import check_forward, check_model
from moe_serve.rpc import codec, dispatch_pb2
from tests.checkpoint_builder import config, encode, entry, expert_name, raw_file, tensors
from tests.fake_shards import HIDDEN, marker_spec

ROOT = Path(__file__).parents[3]
GROWTH_MAX = 64 << 20
FILE = "model.safetensors"

LOOK = """
import resource, sys
from pathlib import Path
from moe_serve.weights import Checkpoint, WeightsError, load_or_build
good, cache, *bad = (Path(one) for one in sys.argv[1:])
load_or_build(Checkpoint.open(good), "float32", cache)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in bad:
    try:
        load_or_build(Checkpoint.open(folder), "float32", cache)
        print(folder.name, "was taken")
    except WeightsError as error:
        print(folder.name, "refused:", str(error).splitlines()[0])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def folder_with(path: Path, content: bytes, sparse_bytes: int = 0) -> Path:
    """A checkpoint whose weights file is `content`, made longer by a hole on disk."""
    import json

    path.mkdir()
    (path / "config.json").write_text(json.dumps(config()))
    with (path / FILE).open("wb") as file:
        file.write(content)
        if sparse_bytes:
            file.truncate(sparse_bytes)
    return path


def test_s7_refusals_take_no_memory(tmp_path: Path) -> None:
    made = tensors()
    good = folder_with(tmp_path / "good", encode(made))
    name = expert_name(0, 0, "gate")
    nan = {**made, name: np.full_like(made[name], np.nan)}
    huge = 8 << 30
    bad = [
        folder_with(tmp_path / "header_of_4_gib", raw_file(b"", b"", declared=4 << 30), huge),
        folder_with(tmp_path / "header_of_100_mb", raw_file(b"", b"", declared=100 << 20), huge),
        folder_with(tmp_path / "header_overflow", raw_file(b"", b"", declared=2**64 - 1), huge),
        folder_with(
            tmp_path / "huge_shape", raw_file({name: entry(0, huge, [2**31, 2**31])}, b""), huge
        ),
        folder_with(
            tmp_path / "overlap",
            raw_file({name: entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
        ),
        folder_with(
            tmp_path / "hole",
            raw_file({name: entry(0, 8, [2]), "b": entry(12, 20, [2])}, bytes(20)),
        ),
        folder_with(
            tmp_path / "another_shape",
            raw_file({name: entry(0, 4 << 30, [1 << 15, 1 << 15])}, b""),
            (4 << 30) + 200,
        ),
        folder_with(tmp_path / "truncated", encode(made)[:-1]),
        folder_with(tmp_path / "nan", encode(nan)),
        folder_with(tmp_path / "pickle", b"\x80\x04\x95" + bytes(100)),
    ]
    done = subprocess.run(
        [sys.executable, "-c", LOOK, good, tmp_path / "cache", *bad],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=50,
        check=True,
    )
    *said, growth = done.stdout.splitlines()
    assert [line for line in said if "refused:" not in line] == []
    assert len(said) == len(bad)
    assert int(growth) <= GROWTH_MAX, done.stdout


NAMES = [
    "../marker",
    "..",
    ".",
    "/etc/passwd",
    "marker\0",
    "%2e%2e",
    "marker/../marker",
    "http://host/marker",
    "package:tiny_moe",
    "~/marker",
    "m" * 5000,
    "marker ",
    "MARKER",
    "{marker}",
]


class Opened:
    """Paths given to `open` while `on`; audit hooks cannot be taken away again."""

    def __init__(self) -> None:
        self.on = False
        self.paths: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if self.on and event in {"open", "os.listdir", "os.scandir"}:
            self.paths.append(str(args[0]))


OPENED = Opened()


@pytest.fixture
def opened() -> Iterator[list[str]]:
    OPENED.paths.clear()
    yield OPENED.paths
    OPENED.on = False


def test_s8_the_trace_sees_a_file(opened: list[str]) -> None:
    OPENED.on = True
    Path(__file__).read_bytes()
    assert opened == [__file__]


@pytest.mark.parametrize("name", NAMES, ids=lambda n: repr(n[:20]))
def test_s8_a_name_from_a_tenant_opens_nothing(opened: list[str], name: str) -> None:
    request = codec.forward_request(
        codec.ForwardArrays(
            model=name,
            layer=0,
            phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
            data_type=codec.FP32,
            hidden=np.ones((1, HIDDEN), np.float32),
            topk_ids=np.zeros((1, 1), np.int32),
            topk_weights=np.ones((1, 1), np.float32),
            request_id=name[:128],
        )
    )
    faults = []
    OPENED.on = True
    for check in (
        lambda: check_forward(request, marker_spec(), 1 << 20),
        lambda: check_model(name, marker_spec()),
    ):
        try:
            check()
        except InvalidArgument as error:
            faults.append(error)
    OPENED.on = False
    assert [error.violations[0].field for error in faults] == ["model", "model"]
    assert all(len(error.message) < 300 for error in faults)
    assert opened == []


@pytest.mark.parametrize(
    "name", [*NAMES, "", ".hidden", "a" * 64, "a\n"], ids=lambda n: repr(n[:20])
)
def test_s8_a_model_has_a_plain_name(name: str) -> None:
    if name == "MARKER":
        ModelConfig(name=name, checkpoint="c")
        return
    with pytest.raises(ValidationError, match="name"):
        ModelConfig(name=name, checkpoint="c")
