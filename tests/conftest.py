"""What all tests share: Hypothesis profiles, markers by folder, the one seed option, the one Ray
cluster."""

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from moe_serve.bootstrap.local_ray import LocalRay

TESTS = Path(__file__).resolve().parent

# Folders whose tests start processes or sockets carry a marker without having to write it.
MARKER_BY_FOLDER = {
    "integration": "integration",
    "chaos": "chaos",
    "gpu": "gpu",
    "loopback": "loopback",
    "browser": "browser",
}
LONG_TIMEOUT_S = 300
LONG_FOLDERS = frozenset({"integration", "chaos", "browser"})

# `ci` finds the same examples every time, so a red run means a change; `explore` draws new ones.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moe_serve")
    group.addoption("--seed", type=int, default=0, help="first seed of the simulated worlds")
    group.addoption("--seeds", type=int, default=200, help="simulated worlds, each of its own seed")
    group.addoption("--explore", action="store_true", help="Hypothesis draws new examples")
    group.addoption("--rewrite", action="store_true", help="write golden transcripts anew")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("explore" if config.getoption("--explore") else "ci")
    # Ray reads the mode once, when the first test module imports it.
    os.environ.setdefault("RAY_AUTH_MODE", "token")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if TESTS in item.path.parents else ""
        if folder in MARKER_BY_FOLDER:
            item.add_marker(MARKER_BY_FOLDER[folder])
        if folder in LONG_FOLDERS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


@pytest.fixture(scope="session")
def first_seed(request: pytest.FixtureRequest) -> int:
    """First seed of the simulated worlds: `make sim FIRST_SEED=n`."""
    return int(request.config.getoption("--seed"))


@pytest.fixture(scope="session")
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden transcripts are to be written anew instead of compared."""
    return bool(request.config.getoption("--rewrite"))


RAY_LOGS = pytest.StashKey[Path]()
LOG_LINES_SHOWN = 20


@pytest.fixture(scope="session")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator["LocalRay"]:
    """Two logical nodes with labels moe.node=a and moe.node=b, this process being their driver.
    Shared by all tests that deploy a service of their own: one start takes 10 to 90 s."""
    from tests.service_cluster import local_cluster

    with local_cluster() as cluster:
        request.config.stash[RAY_LOGS] = Path(cluster.temp_dir) / "session_latest/logs"
        yield cluster
        del request.config.stash[RAY_LOGS]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what controllers logged last where a test on the Ray cluster fails: their processes and
    logs are gone when somebody reads the report."""
    report = yield
    folder = item.config.stash.get(RAY_LOGS, None)
    if report.failed and folder is not None and "ray_cluster" in getattr(item, "fixturenames", ()):
        report.sections.append(("Last lines of controllers", "\n".join(_controller_lines(folder))))
    return report


def _controller_lines(folder: Path) -> list[str]:
    found = []
    for file in folder.glob("worker-*.err"):
        lines = file.read_text(errors="replace").splitlines()
        if any('"part": "controller"' in line for line in lines):
            said = [_in_short(line) for line in lines[-LOG_LINES_SHOWN:]]
            found.append((file.stat().st_mtime, [file.name, *said]))
    return [line for _, lines in sorted(found) for line in lines]


def _in_short(line: str) -> str:
    """A log line without the fields that are long or the same in all."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    wanted = ("at", "term", "event", "rule", "outcome", "detail", "reason", "trace", "problems")
    return " ".join(str(fields[name]) for name in wanted if fields.get(name))
