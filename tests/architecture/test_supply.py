"""What is installed is what was pinned, the container file asks for nothing that it does not need,
and the pages for operators say who is an administrator and what each refusal means."""

from __future__ import annotations

import ast
import json
import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.architecture.tree import ROOT

PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)$")
WITH_PYTHON = frozenset({"pip", "setuptools", "wheel"})
OURS = "moe-serve"
SECRET = re.compile(r"token|secret|password|credential|api_?key", re.IGNORECASE)


def plain_name(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in filter(None, (line.split("#", 1)[0].strip() for line in lines)):
        match = PIN.match(line)
        assert match, f"not an exact pin: {line!r}"
        name = plain_name(match[1])
        assert name not in found, f"pinned twice: {name}"
        found[name] = match[2]
    return found


def installed() -> dict[str, str]:
    """Name -> version, without the local part that builds of torch carry ("2.13.0+cpu")."""
    return {
        plain_name(found.metadata["Name"]): found.version.split("+", 1)[0]
        for found in metadata.distributions()
    }


def needed() -> set[str]:
    """What the package needs with all its extras, through every level."""
    present = installed()
    found: set[str] = set()
    waiting = [OURS]
    while waiting:
        name = waiting.pop()
        if name in found or name not in present:
            continue
        found.add(name)
        extras = metadata.metadata(name).get_all("Provides-Extra") or [] if name == OURS else []
        for requirement in map(Requirement, metadata.requires(name) or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras)):
                waiting.append(plain_name(requirement.name))
    return found - {OURS} - WITH_PYTHON


def test_what_is_installed_is_what_was_pinned() -> None:
    """Pins of packages that only some extras need may have nothing installed."""
    present = installed()
    both = {name: version for name, version in pins().items() if name in present}
    differ = {n: (v, present[n]) for n, v in both.items() if present[n] != v}
    assert differ == {}, "run `make setup`, or pin what the tests ran with"
    assert len(both) > 50


def test_everything_needed_that_is_installed_is_pinned() -> None:
    found = needed()
    assert {"ray", "torch", "grpcio", "pytest"} <= found
    assert sorted(found - set(pins())) == []


# -- the container ---------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of the Dockerfile, continuation lines joined."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (word.upper(), rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


def of(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    start = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


def test_the_container_runs_as_a_user_without_rights() -> None:
    users = [rest for word, rest in last_stage() if word == "USER"]
    # By number: whoever forbids root can tell that this is not root.
    assert [re.fullmatch(r"([1-9]\d+):([1-9]\d+)", user) is not None for user in users] == [True]
    words = [word for word, _ in last_stage()]
    after = words[words.index("USER") :]
    assert {"ENTRYPOINT", "CMD"} <= set(after)
    assert not {"RUN", "COPY", "ADD"} & set(after)
    assert "sudo" not in " ".join(of("RUN"))


def test_the_container_writes_to_its_state_and_to_tmp_only() -> None:
    (environment,) = [rest for word, rest in last_stage() if word == "ENV"]
    said = dict(part.split("=", 1) for part in environment.split())
    assert (said["HOME"], said["XDG_STATE_HOME"]) == ("/state", "/state")
    assert said["PYTHONDONTWRITEBYTECODE"] == "1"
    assert [json.loads(rest) for rest in of("VOLUME")] == [["/state"]]
    # What would be compiled at the first call is compiled where the image is built.
    assert any("moe_serve.warm_kernels" in rest for rest in of("RUN"))


def test_the_container_starts_a_service_that_comes_back_and_ends_when_told() -> None:
    (entry,), (command,) = of("ENTRYPOINT"), of("CMD")
    shell, option, script, name = json.loads(entry)
    assert (shell, option, name) == ("/bin/sh", "-c", "moe-serve")
    # `exec`: no shell between the signal and the program.
    assert script.endswith('&& exec moe-serve "$@"')
    assert json.loads(command)[:2] == ["up", "--keep"]
    assert of("STOPSIGNAL") == ["SIGTERM"]


def test_the_container_is_built_from_pinned_packages_and_holds_no_secret() -> None:
    assert all(re.match(r"python:3\.11-slim-\w+( AS \w+)?$", rest) for rest in of("FROM"))
    installs = [rest for rest in of("RUN") if "pip install" in rest]
    assert installs
    assert all("-c constraints.txt" in rest for rest in installs)
    assert of("ADD") == [], "COPY takes files of ours only"
    assert not any(tool in rest for rest in of("RUN") for tool in ("curl", "wget"))
    assert not [
        rest for word, rest in instructions() if word in ("ENV", "ARG") and SECRET.search(rest)
    ]
    copied = {name for rest in of("COPY") if "--from" not in rest for name in rest.split()[:-1]}
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert kept[1] == "*", "everything that is not named stays out"
    assert {line[1:] for line in kept if line.startswith("!")} == copied


def test_no_page_asks_for_the_network_of_the_host() -> None:
    pages = [ROOT / "deploy" / "Dockerfile", ROOT / "docs" / "how-to" / "deploy.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert not re.search(r"--net(work)?[= ]host|--privileged|--user[= ]root", text)
    (command,) = re.findall(r"^    docker run (?:.*\\\n)*.*$", text, re.MULTILINE)
    for option in ("--read-only", "--cap-drop ALL", "no-new-privileges", "--init", "--tmpfs /tmp"):
        assert option in command


# -- who is an administrator -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "sentence",
    [
        "Tenants who can submit Ray jobs are administrators.",
        "Separate tenants need separate Ray clusters",
        "everything: run code as the service's user on every node",
        "Every user of the machine, with `network: loopback`",
        "Holder of an `admin` token",
        "whoever has the token shares queue, limits and counters with all who have it",
        "Ray's ports are not ours.",
        "dependencies are pinned by version, not by hash",
    ],
)
def test_the_security_page_says_whom_one_trusts(sentence: str) -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert sentence in " ".join(text.split())


# -- what each refusal means -----------------------------------------------------------------------

REFUSALS = ("StartRefused", "JournalFull", "JournalDamaged")
HOLE = "\0"
"""Stands for what a message names."""


def refusals(package: str) -> list[str]:
    """Texts with which the modules of a package refuse, with holes."""
    found = []
    for path in sorted((ROOT / "moe_serve" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in REFUSALS:
                match node.args:
                    case [ast.Constant(value=str(text))]:
                        found.append(text)
                    case [ast.JoinedStr(values=parts)]:
                        found.append(
                            "".join(
                                str(p.value) if isinstance(p, ast.Constant) else HOLE for p in parts
                            )
                        )
    return found


def lines_explained() -> list[list[str]]:
    """Of each line that the page explains: the pieces between what is left open in it."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| ")]
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    pieces = [re.split(r"\.\.\.|\bN\b|\bR\b|;", text) for text in quoted]
    return [[piece.strip() for piece in one if piece.strip()] for one in pieces]


def is_explained(text: str, lines: list[list[str]]) -> bool:
    def in_order(pieces: list[str]) -> bool:
        at = 0
        for piece in pieces:
            at = text.find(piece, at) + len(piece)
            if at < len(piece):
                return False
        return max(map(len, pieces), default=0) >= 10

    return any(in_order(pieces) for pieces in lines)


def test_every_refusal_of_the_controller_has_a_row() -> None:
    texts, lines = refusals("controller"), lines_explained()
    # A journal that is damaged is named by its file.
    texts = [text.replace(f"move {HOLE}*", "move state.db*") for text in texts]
    assert len(texts) >= 12
    assert [text for text in texts if not is_explained(text, lines)] == []
    assert not is_explained("the moon is in the way; wait a day", lines)
