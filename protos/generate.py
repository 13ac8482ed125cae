"""Generate the Python code of the public gRPC API.

Responsible for turning `protos/moe_serve/rpc/v1/*.proto` into `moe_serve/rpc/v1/*_pb2*.py` and
their type stubs. Must never be imported by the service: the generated code is committed, and the
wheel holds only that. Called by `make proto` and by the test that compares the committed code with
a fresh generation.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


class GenerationError(Exception):
    """The protocol compiler or one of its plug-ins refused or is missing."""


def proto_files() -> list[Path]:
    """Return every `.proto` under `protos/`, relative to it, sorted."""
    return sorted(path.relative_to(PROTOS) for path in PROTOS.rglob("*.proto"))


def generate(out: Path) -> list[Path]:
    """Write the code for every proto under `out` and return the written files, relative to `out`.

    The path of a proto is the path of its Python package, so generated imports need no patching.

    Raises:
        GenerationError: a plug-in is missing, or the compiler reports a fault (in its own words).
    """
    protos = proto_files()
    before = set(_generated(out))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *map(str, protos),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GenerationError(f"protoc ended with {done.returncode}: {done.stderr.strip()}")
    stems = {proto.parent / proto.stem for proto in protos}
    written = [path for path in _generated(out) if _stem(path) in stems]
    for stale in before - set(written):
        (out / stale).unlink()
    return written


def _plugin(name: str) -> str:
    # Beside this interpreter first: the PATH of `make` does not name the virtual environment.
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise GenerationError(f"{name} is not installed; run: make setup")
    return found


def _generated(out: Path) -> list[Path]:
    folder = out / "moe_serve" / "rpc"
    found = (path for path in folder.rglob("*_pb2*.py*") if path.suffix in {".py", ".pyi"})
    return sorted(path.relative_to(out) for path in found)


def _stem(path: Path) -> Path:
    return path.parent / path.name.partition("_pb2")[0]


def main() -> int:
    """Generate into the checkout, or into `--out`; print what was written."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="where to write (default: here)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    try:
        written = generate(out)
    except GenerationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
