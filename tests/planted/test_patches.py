"""Every planted bug is well described and still fits the code. `make planted` plants them."""

import re

import pytest

from tests.planted.copies import copy_tree, drop_caches
from tests.planted.patches import FOLDER, ROOT, BadPatch, all_patches, apply, read_patch
from tests.planted.run import LISTS, Outcome, files_in, lists_of, verdict

PATCHES = sorted(FOLDER.iterdir())


@pytest.mark.parametrize("path", PATCHES, ids=[path.stem for path in PATCHES])
def test_a_patch_is_well_formed_and_applies(path):
    apply(read_patch(path), ROOT, only_check=True)


def test_every_invariant_of_the_data_path_and_of_placement_has_a_planted_bug():
    broken = {planted.breaks for planted in all_patches()}
    assert broken >= {f"I{number}" for number in range(1, 14)}


def test_no_test_that_catches_bugs_is_chosen_by_a_bug():
    names = {planted.name.replace("-", "_") for planted in all_patches()}
    for which in LISTS:
        listed = files_in(which)
        assert len(listed) > 10
        assert all((ROOT / test).exists() for test in listed)
        assert not [test for test in listed if re.search("|".join(names), test)]
        assert not [test for test in listed if "planted" in test]


HEADER = "What: Something\n  long.\nBreaks: I3\n\n"
DIFF = "--- a/placement/load.py\n+++ b/placement/load.py\n@@ -1 +1 @@\n-nothing\n+something\n"


def test_a_patch_says_what_it_does_and_what_it_breaks(tmp_path):
    path = tmp_path / "a-bug.patch"
    path.write_text(HEADER + DIFF, encoding="utf-8")
    planted = read_patch(path)
    assert (planted.name, planted.what, planted.breaks, planted.files) == (
        "a-bug",
        "Something long.",
        "I3",
        ("placement/load.py",),
    )


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("A_bug", HEADER + DIFF, "small letters"),
        ("a-bug", DIFF, "begins with"),
        ("a-bug", HEADER.replace("I3", "X3") + DIFF, "begins with"),
        ("a-bug", HEADER, "changes one file"),
        ("a-bug", HEADER + DIFF.replace("b/placement/load", "b/placement/lead"), "renames none"),
        ("a-bug", HEADER + DIFF.replace("placement/load", "tests/load"), "production code only"),
    ],
)
def test_a_malformed_patch_is_refused(tmp_path, name, text, why):
    path = tmp_path / f"{name}.patch"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadPatch, match=why):
        read_patch(path)


def test_a_patch_that_no_longer_fits_says_so(tmp_path):
    path = tmp_path / "a-bug.patch"
    path.write_text(HEADER + DIFF, encoding="utf-8")
    with pytest.raises(BadPatch, match=r"a-bug\.patch no longer applies, make it anew: .*load\.py"):
        apply(read_patch(path), ROOT, only_check=True)


def test_bugs_of_the_core_meet_the_tests_of_both_packages():
    for planted in all_patches():
        lists = lists_of(planted)
        core = any(file.startswith("placement/") for file in planted.files)
        assert lists == (("placement", "moe_serve") if core else ("moe_serve",))


def test_caches_of_kernels_that_use_a_changed_file_go(tmp_path):
    def write(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    write("placement/low.py")
    write("placement/middle/__init__.py", "from placement.low import x\n")
    write("placement/high.py", "from placement.middle import x\n")
    write("placement/other.py", "import numpy\n")
    for cache in ("high.f-1.py311.nbi", "high.f-1.py311.1.nbc", "other.f-1.py311.nbi"):
        write(f"placement/__pycache__/{cache}")
    copy_tree(tmp_path, ["placement/low.py", "placement/high.py"], tmp_path / "copy")
    copied = {path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert copied >= {"low.py", "high.py", "high.f-1.py311.nbi", "other.f-1.py311.nbi"}
    assert drop_caches(tmp_path, ["placement/low.py"]) == 1
    left = {path.name for path in (tmp_path / "placement/__pycache__").iterdir()}
    assert left == {"other.f-1.py311.nbi"}


FAILED = "FAILED tests/unit/test_a.py::test_b[1] - assert 1 == 2\n1 failed in 2 s\n"


@pytest.mark.parametrize(
    ("rc", "text", "caught", "word"),
    [
        (1, FAILED, True, "tests/unit/test_a.py::test_b[1]"),
        (0, "7 passed", False, "NOT CAUGHT"),
        (None, "..", False, "NOT CAUGHT in its time"),
        (2, "ERROR tests/unit/test_a.py - ImportError: x\n", False, "cannot be tested"),
        (1, "ERROR tests/unit/test_a.py - ImportError: x\n", False, "cannot be tested"),
        (1, "ERROR tests/unit/test_a.py::test_b - x\n", True, "tests/unit/test_a.py::test_b"),
    ],
)
def test_only_a_failed_test_catches_a_bug(rc, text, caught, word):
    outcome = verdict("a-bug", rc, text, 1.0)
    assert isinstance(outcome, Outcome)
    assert outcome.caught is caught
    assert word in outcome.said
