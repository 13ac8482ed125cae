"""The committed gRPC code is what the protos say, and nobody edited it."""

import subprocess
import sys
from pathlib import Path

from tests.architecture.tree import GENERATED, ROOT, files_under


def _is_generated(path: Path) -> bool:
    return "_pb2" in path.name and path.suffix in {".py", ".pyi"}


def test_generated_code_matches_the_protos(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "protos/generate.py", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fresh = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8")
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    committed = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in files_under(GENERATED)
        if _is_generated(path)
    }
    assert sorted(committed) == sorted(fresh), "run: make proto"
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run: make proto"


def test_every_proto_lies_where_its_package_says() -> None:
    protos = files_under(ROOT / "protos", ".proto")
    assert protos != []
    for path in protos:
        package = path.parent.relative_to(ROOT / "protos").as_posix().replace("/", ".")
        assert f"package {package};" in path.read_text(encoding="utf-8"), path.name
