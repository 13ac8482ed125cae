"""The built wheel holds what it needs and works without the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGES, ROOT, files_under

TINY_MODEL = (
    "moe_serve/demo/tiny_moe/config.json",
    "moe_serve/demo/tiny_moe/generation_config.json",
    "moe_serve/demo/tiny_moe/model.safetensors",
    "moe_serve/demo/tiny_moe/tokenizer_config.json",
    "moe_serve/demo/tiny_moe/added_tokens.json",
    "moe_serve/demo/traces/tiny_moe_requests.npz",
)
# Read by tools in the checkout, not by the program.
STAYS_BEHIND = frozenset({"placement/ruff.toml"})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        # Not isolated: that would fetch the build's tools from an index.
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--quiet", "--disable-pip-version-check", "-w", str(out), "."),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _run_in(unpacked: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    # -I: neither the current folder nor PYTHONPATH. -B: what is unpacked stays as it is for the
    # other tests, in whatever order they run. The installed libraries stay, the checkout (which an
    # editable install puts on the path) goes.
    prologue = (
        "import sys\n"
        f"sys.path[:] = [{str(unpacked)!r}]"
        f" + [entry for entry in sys.path if entry != {str(ROOT)!r}]\n"
    )
    return subprocess.run(
        [sys.executable, "-I", "-B", "-c", prologue + code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_holds_every_file_of_both_packages(wheel: Path) -> None:
    on_disk = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in files_under(ROOT / package)
        if path.suffix not in {".pyc", ".nbi", ".nbc"}
    } - STAYS_BEHIND
    # The archive's own list: what is unpacked gathers caches once other tests run it.
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if name.split("/")[0] in PACKAGES}
    assert in_wheel == on_disk


def test_the_wheel_holds_the_data_it_serves(unpacked: Path) -> None:
    needed = [*TINY_MODEL, "placement/py.typed", "moe_serve/py.typed"]
    needed += [f"moe_serve/rpc/v1/{proto.stem}_pb2.py" for proto in files_under(ROOT, ".proto")]
    if (ROOT / "moe_serve" / "dashboard").exists():
        needed.append("moe_serve/dashboard/static/index.html")
    assert [name for name in needed if not (unpacked / name).is_file()] == []


def test_nothing_else_lies_in_the_wheel(unpacked: Path) -> None:
    others = {path.name for path in unpacked.iterdir()} - set(PACKAGES)
    assert {name.rpartition(".")[2] for name in others} == {"dist-info"}
    (info,) = others
    assert (unpacked / info / "licenses" / "LICENSE").is_file()
    assert "moe-serve = moe_serve.cli:main" in (unpacked / info / "entry_points.txt").read_text()


def test_the_core_imports_alone(unpacked: Path, tmp_path: Path) -> None:
    modules = sorted(
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in files_under(ROOT / "placement", ".py")
        if path.stem != "__init__"
    )
    done = _run_in(
        unpacked,
        tmp_path,
        "import importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "import placement\n"
        "heavy = {'ray', 'torch', 'grpc', 'zmq', 'moe_serve'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(placement.__file__, placement.__version__)\n",
    )
    assert done.returncode == 0, done.stderr
    file, version = done.stdout.split()
    assert Path(file).parent.parent == unpacked
    assert version in next(unpacked.glob("*.dist-info")).name


def test_the_configuration_imports_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    done = _run_in(
        unpacked,
        tmp_path,
        "import moe_serve, moe_serve.config\nprint(moe_serve.config.__file__)\n"
        "heavy = {'ray', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n",
    )
    assert done.returncode == 0, done.stderr
    assert unpacked in Path(done.stdout.strip()).parents
