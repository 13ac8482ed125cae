"""The documentation speaks of the tree that exists."""

import re
from pathlib import Path

import pytest

from docs.http_reference import own_codes
from docs.make_reference import FOLDER, PAGES
from tests.architecture.tree import PACKAGES, ROOT, name_of

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
TREE = re.compile(r"^```tree\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def _pages() -> list[Path]:
    folders = [ROOT / "docs", ROOT / "examples", ROOT / "benchmarks"]
    inside = [path for folder in folders for path in sorted(folder.rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *inside]


def _anchors(page: Path) -> set[str]:
    # As the usual renderers make them: lower case, no punctuation, blanks become hyphens.
    heads = re.findall(r"^#+ +(.+?) *$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


def tree_paths(text: str) -> list[str]:
    """Return the paths a `tree` block names.

    A line is indent, name, two blanks or more, remark; two blanks of indent a level; a folder ends
    with a slash; several names on a line are separated by one blank.
    """
    paths: list[str] = []
    above: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip(" "))
        assert indent % 2 == 0, f"odd indent in the tree: {line!r}"
        level = indent // 2
        assert level <= len(above), f"a level is skipped in the tree: {line!r}"
        names = re.split(r" {2,}", line.strip())[0].split(" ")
        above = above[:level]
        paths += ["".join(above) + name for name in names]
        if names[-1].endswith("/"):
            above.append(names[-1])
    return paths


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in _pages():
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            if not there.exists() or (
                anchor and there.suffix == ".md" and anchor not in _anchors(there)
            ):
                broken.append(f"{name_of(page)}: {target}")
    assert broken == []


def test_the_front_page_is_there() -> None:
    assert ROOT / "README.md" in _pages()


def test_every_path_in_the_tree_exists() -> None:
    (block,) = TREE.findall(ARCHITECTURE.read_text(encoding="utf-8"))
    paths = tree_paths(block)
    assert len(paths) > len(PACKAGES)
    missing = [
        path
        for path in paths
        if not ((ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file())
    ]
    assert missing == []


def test_every_top_level_module_is_in_the_tree() -> None:
    (block,) = TREE.findall(ARCHITECTURE.read_text(encoding="utf-8"))
    named = set(tree_paths(block))
    there = set()
    for package in PACKAGES:
        for path in (ROOT / package).iterdir():
            if path.is_dir() and any(path.rglob("*.py")):
                there.add(f"{package}/{path.name}/")
            elif path.suffix == ".py" and path.stem != "__init__":
                there.add(f"{package}/{path.name}")
    assert sorted(there - named) == []


def test_the_tree_is_read_as_people_read_it() -> None:
    block = "a/          one\n  b.py c.py   two\n  d/\n    e.py  three\nf.md\n"
    assert tree_paths(block) == ["a/", "a/b.py", "a/c.py", "a/d/", "a/d/e.py", "f.md"]


def test_every_decision_says_its_four_parts() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert records != []
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        heads = re.findall(r"^## (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert heads == ["Context", "Choice", "Cost", "When to revisit"], path.name


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_reference_is_what_the_code_says(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "run: python -m docs.make_reference"


def test_every_page_of_the_reference_has_a_writer() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_no_field_or_option_is_without_a_meaning() -> None:
    empty = [
        f"{name}: {line}"
        for name, page in PAGES.items()
        for line in page().splitlines()
        if line.startswith("| `") and line.endswith("|  |")
    ]
    assert empty == []


def test_codes_of_errors_are_read_from_the_code() -> None:
    source = 'ApiError(403, "x", code="a")\nApiError(404, "y")\nunavailable("z", code="b")\n'
    assert list(own_codes(source)) == [(403, "a"), (503, "b")]
    for hidden in ('ApiError(status, "x", code="a")', 'unavailable("x", code=word)'):
        with pytest.raises(ValueError, match="line 1"):
            list(own_codes(hidden))
    assert "`too_many_questions`" in PAGES["http.md"]()
