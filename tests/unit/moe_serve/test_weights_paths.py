"""Files are opened by plain names, and only below the checkpoint's root."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_serve.weights.errors import MissingFile, TruncatedFile, UnsafePath
from moe_serve.weights.paths import (
    CheckpointRoot,
    check_name,
    default_model_name,
    find_root,
    open_file,
    read_exactly,
    read_small_file,
)

BAD_NAMES = [
    "",
    ".",
    "..",
    "../secret",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "nul\0",
    "a\n",
    "%2e%2e",
    "a b",
    "ä",
    "a" * 129,
    "a" * 5000,
    "http://host/x",
]


class Opened:
    """Names given to `open` and `os.open` while `on`; audit hooks cannot be taken away again."""

    def __init__(self) -> None:
        self.on = False
        self.paths: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        # Sources are opened by pytest, to show where an exception was raised.
        if self.on and event == "open" and not str(args[0]).endswith(".py"):
            self.paths.append(str(args[0]))


OPENED = Opened()


@pytest.fixture
def opened() -> Iterator[list[str]]:
    OPENED.paths.clear()
    OPENED.on = True
    yield OPENED.paths
    OPENED.on = False


def read(root: CheckpointRoot, name: str) -> bytes:
    return read_small_file(root, name, 100)[0]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_not_plain_is_refused_and_nothing_opened(
    tmp_path: Path, opened: list[str], name: str
) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "model").mkdir()
    root = find_root(tmp_path / "model")
    opened.clear()
    with pytest.raises(UnsafePath, match="1 to 128 characters"):
        read(root, name)
    assert opened == []


def test_plain_names_pass_up_to_the_limit() -> None:
    for name in ("a", "model-00001-of-00002.safetensors", "A_1.b-", "...", "a" * 128):
        assert check_name(name, "name") == name


def test_a_refusal_does_not_repeat_a_long_name() -> None:
    with pytest.raises(UnsafePath, match="5000 characters") as refused:
        check_name("a" * 5000, "model name")
    assert len(str(refused.value)) < 500


def test_a_file_and_its_stamp_are_read(tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "a.json").write_bytes(b"content")
    opened.clear()
    content, stamp = read_small_file(find_root(tmp_path), "a.json", 7)
    assert opened == [str(tmp_path / "a.json")]
    found = os.stat(tmp_path / "a.json")
    assert content == b"content"
    assert (stamp.name, stamp.size_bytes) == ("a.json", 7)
    assert (stamp.mtime_ns, stamp.inode) == (found.st_mtime_ns, found.st_ino)


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"content.")
    with pytest.raises(UnsafePath, match=r"a.json .* has 8 bytes, more than the limit of 7"):
        read_small_file(find_root(tmp_path), "a.json", 7)


def test_a_link_out_of_the_folder_is_refused_and_not_opened(
    tmp_path: Path, opened: list[str]
) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.json").symlink_to(tmp_path / "secret")
    opened.clear()
    with pytest.raises(UnsafePath, match=r"a\.json is a link that leaves the checkpoint"):
        read(find_root(tmp_path / "model"), "a.json")
    assert opened == []


def test_a_sibling_with_the_same_beginning_is_outside(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model2").mkdir()
    (tmp_path / "model2" / "b").write_text("s")
    (tmp_path / "model" / "a").symlink_to("../model2/b")
    with pytest.raises(UnsafePath, match="leaves the checkpoint"):
        read(find_root(tmp_path / "model"), "a")


def test_a_link_to_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "b").symlink_to("../secret")
    (tmp_path / "model" / "a").symlink_to("b")
    with pytest.raises(UnsafePath, match="leaves the checkpoint"):
        read(find_root(tmp_path / "model"), "a")


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("s")
    (tmp_path / "a").symlink_to("b")
    assert read(find_root(tmp_path), "a") == b"s"


def hub_snapshot(tmp_path: Path) -> Path:
    models = tmp_path / "hub" / "models--org--My-Model"
    (models / "blobs").mkdir(parents=True)
    (models / "blobs" / "3f9a").write_text("blob")
    snapshot = models / "snapshots" / "1a2b"
    snapshot.mkdir(parents=True)
    (snapshot / "a.json").symlink_to("../../blobs/3f9a")
    return snapshot


def test_a_hub_snapshot_may_link_into_its_blobs(tmp_path: Path) -> None:
    root = find_root(hub_snapshot(tmp_path))
    assert read(root, "a.json") == b"blob"
    assert default_model_name(root) == "My-Model"


def test_a_hub_snapshot_may_not_link_into_another_model(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    other = tmp_path / "hub" / "models--org--Other" / "blobs"
    other.mkdir(parents=True)
    (other / "77").write_text("s")
    (snapshot / "b.json").symlink_to(other / "77")
    with pytest.raises(UnsafePath, match="leaves the checkpoint"):
        read(find_root(snapshot), "b.json")


def test_the_wider_root_is_for_hub_folders_only(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "snapshots" / "1a2b"
    folder.mkdir(parents=True)
    (tmp_path / "mine" / "s").write_text("s")
    (folder / "a").symlink_to("../../s")
    with pytest.raises(UnsafePath, match="leaves the checkpoint"):
        read(find_root(folder), "a")


def test_a_dangling_link_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("gone")
    with pytest.raises(MissingFile, match="file a is a link to a file that is not there"):
        read(find_root(tmp_path), "a")
    with pytest.raises(MissingFile, match="file b is missing"):
        read(find_root(tmp_path), "b")


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(UnsafePath, match="cannot be resolved"):
        read(find_root(tmp_path), "a")


@pytest.mark.timeout(5)
def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(UnsafePath, match="not a regular file"):
        read(find_root(tmp_path), "a")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(UnsafePath, match="not a regular file"):
        read(find_root(tmp_path), "a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("s")
    (tmp_path / "a").chmod(0)
    with pytest.raises(MissingFile, match=r"file a .* cannot be opened"):
        read(find_root(tmp_path), "a")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"gone' does not exist; check the path"):
        find_root(tmp_path / "gone")
    with pytest.raises(MissingFile, match="addresses are not fetched"):
        find_root("https://example.org/model")


@pytest.mark.parametrize("path", ["nul\0", "a" * 5000])
def test_a_path_no_system_call_accepts_is_refused(path: str) -> None:
    with pytest.raises(UnsafePath, match="cannot be resolved"):
        find_root(path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("s")
    with pytest.raises(MissingFile, match="is a file; name the folder"):
        find_root(tmp_path / "model.pt")


def test_the_model_is_called_like_its_folder(tmp_path: Path) -> None:
    (tmp_path / "OLMoE-1B").mkdir()
    assert default_model_name(find_root(tmp_path / "OLMoE-1B")) == "OLMoE-1B"
    (tmp_path / "my model").mkdir()
    with pytest.raises(UnsafePath, match="give one explicitly"):
        default_model_name(find_root(tmp_path / "my model"))


def test_reading_past_the_end_is_a_truncation(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with open_file(find_root(tmp_path), "a") as (descriptor, _):
        out = bytearray(4)
        read_exactly(descriptor, "a", 6, memoryview(out))
        assert out == b"6789"
        with pytest.raises(TruncatedFile, match=r"ends at byte 10, but bytes up to 11"):
            read_exactly(descriptor, "a", 7, memoryview(out))
