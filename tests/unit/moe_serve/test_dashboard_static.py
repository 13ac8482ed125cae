"""The page's files: pinned, complete, nothing from elsewhere, nothing that the policy forbids."""

import hashlib
import json
import re
from pathlib import Path

import pytest

import moe_serve.dashboard
from moe_serve.dashboard.app import SECURITY_HEADERS, allowed_hosts, load_assets
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.errors import StartRefused

STATIC = Path(moe_serve.dashboard.__file__).parent / "static"
OURS = sorted(STATIC.glob("*.js"))
MODULE_LINES_MAX = 300
TAKES = re.compile(r"""^import \{([^}]*)\} from ["']([^"']+)["']""", re.MULTILINE)
GIVES = re.compile(r"^export (?:async )?(?:const|let|function|class) (\w+)", re.MULTILINE)
IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*["']([^"']+)["']""")


def test_vendored_modules_are_what_the_manifest_pins() -> None:
    manifest = json.loads((STATIC / "vendor" / "manifest.json").read_text())
    pinned = json.loads(
        (STATIC.parents[2] / "vendor-js" / "package.json").read_text(encoding="utf-8")
    )["dependencies"]
    assert {entry["package"]: entry["version"] for entry in manifest} == pinned
    listed = {name: digest for entry in manifest for name, digest in entry["sha256"].items()}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (STATIC / "vendor").iterdir()
        if path.suffix in {".js", ".css"}
    }
    assert found == listed


def test_every_vendored_package_brings_its_licence() -> None:
    manifest = json.loads((STATIC / "vendor" / "manifest.json").read_text())
    short = {entry["package"].rpartition("/")[2] for entry in manifest}
    assert {path.name.split(".")[0] for path in (STATIC / "vendor").glob("*.LICENSE.txt")} == short


@pytest.mark.parametrize(
    "path", sorted(STATIC.rglob("*.js")), ids=lambda path: path.relative_to(STATIC).as_posix()
)
def test_modules_import_only_files_that_are_shipped(path: Path) -> None:
    for target in IMPORT.findall(path.read_text(encoding="utf-8")):
        assert target.startswith("./"), target
        assert (path.parent / target).is_file(), target


def test_the_page_fetches_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"<style|\son\w+=|\sstyle=", html)
    for path in [STATIC / "index.html", STATIC / "style.css", *OURS]:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|url\(", text), path.name
    for name in re.findall(r'(?:src|href)="(/static/[^"]+)"', html):
        assert (STATIC / name.removeprefix("/static/")).is_file(), name


def test_modules_are_short_and_every_one_is_used() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in OURS}
    assert [name for name, text in texts.items() if text.count("\n") > MODULE_LINES_MAX] == []
    imported = {target for text in texts.values() for target in IMPORT.findall(text)}
    assert {f"./{name}" for name in texts} - imported == {"./app.js"}


def test_what_a_module_exports_another_one_takes() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in OURS}
    taken = {
        (source, name.strip())
        for text in texts.values()
        for names, source in TAKES.findall(text)
        for name in names.split(",")
    }
    given = {(f"./{file}", name) for file, text in texts.items() for name in GIVES.findall(text)}
    assert len(given) > len(texts)
    assert given - taken == set()


def test_no_module_makes_markup_or_code_of_text() -> None:
    for path in OURS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|\beval\(|new Function", text), (
            path.name
        )


def test_the_policy_lets_only_our_own_scripts_run() -> None:
    policy = dict(
        part.strip().split(" ", 1)
        for part in SECURITY_HEADERS["Content-Security-Policy"].split(";")
    )
    assert policy["script-src"] == "'self'"
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"


def test_assets_hold_the_page_and_its_modules() -> None:
    assets = load_assets()
    assert {"index.html", "app.js", "style.css", "vendor/preact.js"} <= set(assets)
    assert assets["app.js"].content_type == "text/javascript"


def test_hosts_are_what_was_bound() -> None:
    assert allowed_hosts("::1", 80) == {"[::1]:80", "localhost:80"}


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org", ""])  # noqa: S104
def test_a_host_that_is_not_loopback_is_refused(host: str) -> None:
    with pytest.raises(StartRefused, match="loopback"):
        DashboardSettings(admin_address="127.0.0.1:1", host=host)


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(StartRefused, match="65535"):
        DashboardSettings(admin_address="127.0.0.1:1", port=70_000)
    with pytest.raises(StartRefused, match="host:port"):
        DashboardSettings(admin_address="nowhere")
