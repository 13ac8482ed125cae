"""The commands of README, the tutorial and "how to operate" on a service that `up` started: those
of the pages as they stand there, and up, down and what is refused as processes of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli_process import ROOT, Shell, said, the_refusal
from tests.doc_blocks import Block, blocks_of, marked
from tests.front_end_process import tiny_oracle, tiny_rows
from tests.page_shell import PageShell
from tests.service_cluster import wait_until
from tests.traffic import Source, Traffic, Workload, draw

EXAMPLE = "examples/tiny-moe.yaml"
CALLS = 80
FOUR_HOT = Workload(lambda rng: draw(rng, tiny_rows, layers=4, experts=4, top_k=4), tiny_oracle())
"""Of the tiny model's experts only four of each layer."""
DOWN_PORT = "127.0.0.1:1"
THIS = "tests/integration/test_cli_flow.py"
README, TUTORIAL, OPERATE = "README.md", "docs/tutorial.md", "docs/how-to/operate.md"
BY_THE_FIXTURE = (
    f"moe-serve up -f {EXAMPLE}",
    "moe-serve up -f mine.yaml",
    "moe-serve up -f FILE",
    "moe-serve down -y",
)
"""Lines that the fixture `service` runs, with its own file or the tutorial's, which is the same."""
TRACE = "moe_serve/demo/traces/tiny_moe_requests.npz"
LOOKING = ("Is it well?", "Why is it slow", "What is hot", "Load for a trial", "Afterwards: replay")
MOVING = ("Memory", "What moved, and why", "Moving by hand")
BACK = ("Back to an earlier placement, or to a given one", "Placements of other engines")


@dataclass
class Up:
    """The example, brought up by the command on a Ray cluster of its own. `first`: the placement
    that it began with, exported."""

    shell: Shell
    record: dict[str, Any]
    first: Path

    @property
    def ray_token(self) -> dict[str, str]:
        """What a shell needs to join the same Ray."""
        file = self.shell.folder / "state/moe-serve/tiny-moe/ray_auth_token"
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Up once for the module; down at its end, when nothing of it may be left."""
    with Shell(tmp_path_factory.mktemp("user")).cleaned() as shell:
        record = shell.data("up", "-f", EXAMPLE)
        first = shell.folder / "first.json"
        assert shell.data("export", "-f", str(first))["replicas"] > 0
        yield Up(shell, record, first)
        started = shell.processes()
        assert set(record["ray_pids"]) <= set(started)
        done = shell.cli("down", "tiny-moe", "-y")
        assert done.returncode == 0, said(done)
        assert "Service tiny-moe is down" in done.stdout
        assert shell.left() == {}
        assert not Path(record["ray_temp_dir"]).exists()
        assert shell.cli("status").returncode == 3


def edited(folder: Path, **changes: Any) -> str:
    """The example as a small service with another name, and top-level sections replaced."""
    file = folder / "service.yaml"
    tree = yaml.safe_load((ROOT / EXAMPLE).read_text())
    small = {"service": "other", "dashboard": False, "fleet": a_fleet()}
    file.write_text(yaml.safe_dump({**tree, **small, **changes}))
    return str(file)


def a_fleet(**changes: Any) -> dict[str, Any]:
    """One router and one rank that holds every expert."""
    group = {"count": 1, "slots": 140, "profile": "declared-cpu", **changes}
    return {"routers": 1, "ranks": [group]}


# -- the flow --------------------------------------------------------------------------------------


def test_up_says_where_it_is_and_status_check_is_fine(service: Up) -> None:
    shell, record = service.shell, service.record
    assert record["service"] == "tiny-moe"
    assert len(record["router_addresses"]) == 2
    addresses = (record["admin_address"], *record["router_addresses"])
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert all(Path(f"/proc/{pid}").exists() for pid in record["ray_pids"])
    done = shell.cli("status", "--check")
    assert done.returncode == 0, said(done)
    assert done.stdout.startswith("Service tiny-moe | model tiny-moe")
    shown = shell.data("status")
    assert (shown["degraded"], len(shown["ranks"]), len(shown["routers"])) == (False, 4, 2)


@pytest.fixture
def paused(service: Up) -> Iterator[Up]:
    """Nothing moves but what the test asks for."""
    shell = service.shell
    assert shell.data("pause", "--reason", "a test is going on") == {"paused": True}
    wait_until("nothing moves", lambda: not moving(shell.data("status")))
    yield service
    assert shell.data("resume") == {"paused": False}


def moving(placement: dict[str, Any]) -> bool:
    return any(move["state"] in ("planned", "running") for move in placement["moves"])


def held(placement: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """(layer, expert) of what is listed, by rank."""
    return [
        sorted((s["layer"], s["expert"]) for s in rank["slots"] if s["state"] == "LISTED")
        for rank in placement["ranks"]
    ]


def filled(placement: dict[str, Any], rank: int) -> int:
    return sum(slot["layer"] >= 0 for slot in placement["ranks"][rank]["slots"])


def test_a_client_in_another_process_then_plan_apply_and_back(paused: Up, tmp_path: Path) -> None:
    shell, routers = paused.shell, paused.record["router_addresses"]
    found = shell.front_end("forward", addresses=routers[:1], model="tiny", calls=CALLS)
    print(found)
    assert found["worst"] <= 1e-5
    assert found["asked"] == found["of"] == 128
    assert found["routers"] == sorted(routers)

    as_at_first(paused)
    before = shell.data("status")
    with Traffic([Source(routers[0], stream=True, pause_s=0.01)], FOUR_HOT):
        plan = wait_until(
            "a plan that moves something", lambda: (p := shell.data("plan"))["moves"] and p
        )
    after = shell.data("status")
    assert (before["epoch"], before["moves_done"]) == (after["epoch"], after["moves_done"])

    done = shell.cli("apply", "--check", plan["plan_id"])
    assert done.returncode == 0, said(done)
    assert "nothing was started" in done.stdout
    assert "no-such-plan" in the_refusal(shell.cli("apply", "no-such-plan"))

    applied = shell.data("apply", plan["plan_id"], "--wait", "60")
    assert len(applied["moves"]) == len(plan["moves"])
    assert set(applied["moves"].values()) == {"done"}
    assert shell.data("status")["epoch"] > after["epoch"]
    assert shell.data("explain", "plan")["plan"]["plan_id"] == plan["plan_id"]
    done = shell.cli("events")
    assert done.returncode == 0, said(done)
    assert plan["plan_id"] in done.stdout

    there, file = shell.data("status"), tmp_path / "there.json"
    assert shell.data("export", "-f", str(file))["replicas"] == sum(map(len, held(there)))
    back = shell.data("rollback", plan["plan_id"], "-y")
    assert (back["before_plan"], set(back["moves"].values())) == (plan["plan_id"], {"done"})
    assert held(shell.data("status")) == held(before)
    assert set(shell.data("import", str(file), "-y")["moves"].values()) == {"done"}
    assert held(shell.data("status")) == held(there)


def test_heat_and_load_of_a_running_service(service: Up, tmp_path: Path) -> None:
    """What is hot, as a client in another process made it: the load generator itself."""
    shell = service.shell
    found = shell.data(
        "bench", "--seconds", "4", "--rate", "40", "--zipf", "2", "--slo-ms", "60000"
    )
    print(found)
    assert found["answered"] == found["requests"] > 0
    assert (found["model"], found["errors"]) == ("tiny-moe", {})

    def hottest() -> Any:
        top = shell.data("top", "experts", "-n", "3")
        return top["rows"] if top["rows"][0]["pairs"] else None

    with_load = shell.cli("bench", "--seconds", "8", "--closed", "2", "-o", "yaml")
    assert with_load.returncode == 0, said(with_load)
    assert yaml.safe_load(with_load.stdout)["loop"] == "closed"
    with Traffic(
        [Source(service.record["router_addresses"][0], stream=True, pause_s=0.01)], FOUR_HOT
    ):
        rows = wait_until("a window with load", hottest)
        assert [row["replicas"] > 0 for row in rows] == [True] * 3
        busy = shell.data("top", "ranks")["rows"]
        assert {row["rank"] for row in busy} == {0, 1, 2, 3}
        png, csv = tmp_path / "heat.png", tmp_path / "heat.csv"
        done = shell.cli("heat", "--png", str(png), "--csv", str(csv))
        assert done.returncode == 0, said(done)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(csv.read_text().splitlines()) == 1 + 4 * 32
    done = shell.cli("heat", "--mode", "replicas")
    assert done.returncode == 0, said(done)
    assert "layers x experts: replicas" in done.stdout
    folder = shell.folder / "state/moe-serve/tiny-moe"
    assert shell.data("screen", str(folder))["verdict"].count("_") >= 1
    done = shell.cli("events", "--since", "1h", "-v")
    assert done.returncode == 0, said(done)
    assert shell.data("explain")["verdict"] in {"nothing_slow", "slow", "idle"}


def test_a_budget_falls_and_rises_and_never_below_what_is_needed(paused: Up) -> None:
    shell = paused.shell
    assert shell.data("budget", "0", "34slots")["num_slots"] == 34
    try:
        # One of them is for staging.
        wait_until("what is too much has gone", lambda: filled(shell.data("status"), 0) <= 33)
        assert "bytes" in the_refusal(shell.cli("budget", "0", "1slots"))
        assert shell.data("status")["ranks"][0]["num_slots"] == 34
    finally:
        assert shell.data("budget", "0", "41slots")["num_slots"] == 41
    assert "budget" in shell.cli("events").stdout


# -- pages, as they stand --------------------------------------------------------------------------


def page_shell(service: Up, folder: Path) -> PageShell:
    """Files that the pages name lie in `folder`, and words in capitals stand for what is here."""
    state = service.shell.folder / "state/moe-serve/tiny-moe"
    places = {
        "~/.local/state/moe-serve/NAME": str(state),
        "TRACE.npz": str(ROOT / TRACE),
        "trace.npz": str(ROOT / TRACE),
        "127.0.0.1:50051": service.record["router_addresses"][0],
        "RANK": "0",
        "3-60": "3-6",
    }
    codes = {f"moe-serve {what} --check": (0, 5) for what in ("status", "explain")}
    return PageShell(service.shell, folder, places, codes, BY_THE_FIXTURE)


def as_at_first(service: Up) -> None:
    """Everything lies where it lay when the service began."""
    assert service.shell.data("import", str(service.first), "-y") is not None
    wait_until("nothing moves", lambda: not moving(service.shell.data("status")))


def sections(page: str, names: tuple[str, ...]) -> list[Block]:
    found = {block.section: block for block in marked(page, THIS)}
    return [found[name] for name in names]


def some_load(service: Up) -> Traffic:
    """Few experts are hot."""
    first = service.record["router_addresses"][0]
    return Traffic([Source(first, stream=True, pause_s=0.01)], FOUR_HOT)


def there_is_a_plan(service: Up) -> None:
    wait_until("a plan that moves something", lambda: service.shell.data("plan")["moves"])


def test_every_block_of_how_to_operate_is_in_a_test_below() -> None:
    here = [block.section for block in marked(OPERATE, THIS)]
    assert sorted(here) == sorted((*LOOKING, *MOVING, *BACK))


def test_looking_as_the_page_says(service: Up, tmp_path: Path) -> None:
    pages = page_shell(service, tmp_path / "there")
    with some_load(service):
        for block in sections(OPERATE, LOOKING):
            pages.block(block)
    assert (pages.folder / "heat.png").read_bytes().startswith(b"\x89PNG")
    assert len((pages.folder / "heat.csv").read_text().splitlines()) == 1 + 4 * 32


def test_moving_and_back_as_the_page_says(paused: Up, tmp_path: Path) -> None:
    shell, pages = paused.shell, page_shell(paused, tmp_path / "there")
    as_at_first(paused)
    memory, *moving_blocks = sections(OPERATE, MOVING)
    with some_load(paused):
        # Evicts two, so that there is something for `events --rule evict` to say.
        pages.block(memory)
        wait_until("two have gone", lambda: filled(shell.data("status"), 0) <= 38)
        there_is_a_plan(paused)
        for block in moving_blocks:
            pages.block(block)
        shell.data("pause")
        wait_until("nothing moves", lambda: not moving(shell.data("status")))
        assert shell.data("budget", "0", "41slots")["num_slots"] == 41
    pages.places["PLAN"] = pages.places["PLAN_ID"]
    back, others = sections(OPERATE, BACK)
    pages.block(back)
    as_at_first(paused)
    pages.block(others)
    for name in ("location.json", "map.json", "load_balancer.yaml"):
        assert (pages.folder / name).stat().st_size > 100


def test_the_tutorial(paused: Up, tmp_path: Path) -> None:
    """From its service file to its last question, in order."""
    pages = page_shell(paused, tmp_path / "there")
    pages.folder.mkdir()
    files = {"yaml": "mine.yaml", "python": "client.py"}
    walk = [block for block in blocks_of(TUTORIAL) if block.what == THIS or block.kind == "yaml"]
    as_at_first(paused)
    with contextlib.ExitStack() as stack:
        for block in walk:
            if block.kind in files:
                (pages.folder / files[block.kind]).write_text(block.text)
            elif block.text == "python client.py\n":
                stack.enter_context(client_running(pages))
                there_is_a_plan(paused)
            else:
                pages.block(block)
    written = yaml.safe_load((pages.folder / "mine.yaml").read_text())
    assert written == yaml.safe_load((ROOT / EXAMPLE).read_text())


@contextlib.contextmanager
def client_running(pages: PageShell) -> Iterator[None]:
    """The tutorial's client in the background. It must have lived until it is ended."""
    with subprocess.Popen(
        [sys.executable, "client.py"],
        cwd=pages.folder,
        env=pages.shell.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "4 layers of 32 experts\n"
            yield
            assert client.poll() is None
        finally:
            client.kill()


def test_readme_asks_what_it_says(service: Up, tmp_path: Path) -> None:
    pages = page_shell(service, tmp_path / "there")
    with some_load(service):
        for block in marked(README, THIS):
            pages.block(block)


def test_s17_no_secret_in_a_command_line_an_environment_or_what_is_kept(service: Up) -> None:
    """Ray's token opens everything. It stands in its file of mode 0600 and nowhere else: no
    process was started with it, no record, journal or status holds it."""
    shell, token_file = service.shell, Path(service.ray_token["RAY_AUTH_TOKEN_PATH"])
    token = token_file.read_bytes().strip()
    assert len(token) >= 32
    assert token_file.stat().st_mode & 0o077 == 0

    started = shell.processes()
    assert len(started) > 5
    seen = 0
    for pid in started:
        for what in ("cmdline", "environ"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text = Path(f"/proc/{pid}/{what}").read_bytes()
                seen += bool(text)
                assert token not in text, f"{what} of {pid}"
    assert seen > 10

    kept = [path for path in shell.folder.rglob("*") if path.is_file() and path != token_file]
    assert any(path.name.startswith("state.db") for path in kept)
    assert [str(path) for path in kept if token in path.read_bytes()] == []
    for command in (("status",), ("events",), ("doctor",)):
        done = shell.cli(*command)
        assert token.decode() not in done.stdout + done.stderr


# -- on a running cluster --------------------------------------------------------------------------


def test_a_second_service_on_the_same_ray_comes_and_goes(service: Up, tmp_path: Path) -> None:
    shell, address = service.shell, service.record["ray_address"]
    before = shell.actors()
    assert len(before) == 8  # 4 shards, 2 routers, the controller and the page
    file = edited(tmp_path)
    record = shell.data("up", "-f", file, "--ray-address", address, **service.ray_token)
    assert (record["service"], record["ray_pids"]) == ("other", [])
    assert len(shell.actors()) == 8 + 3
    assert shell.data("status", "-s", "other")["service_id"] == "other"
    ambiguous = shell.cli("status")
    assert ambiguous.returncode == 3
    assert "other" in ambiguous.stderr
    assert "tiny-moe" in ambiguous.stderr

    again = shell.cli("up", "-f", file, "--ray-address", address, **service.ray_token)
    assert "service 'other' is running already" in the_refusal(again)

    done = shell.cli("down", "other", "-y", **service.ray_token)
    assert done.returncode == 0, said(done)
    wait_until("its actors have ended", lambda: shell.actors() == before)
    assert shell.cli("status", "--check").returncode == 0


def test_up_refuses_while_it_is_up(service: Up) -> None:
    started = set(service.shell.processes())
    said_so = the_refusal(service.shell.cli("up", "-f", EXAMPLE))
    assert "service 'tiny-moe' is running already" in said_so
    rehearsed = the_refusal(service.shell.cli("up", "-f", EXAMPLE, "--dry-run"))
    assert "service 'tiny-moe' is running already" in rehearsed
    assert "moe-serve down tiny-moe" in said_so
    assert service.shell.data("status")["degraded"] is False
    assert started <= set(service.shell.processes())


def test_up_refuses_a_taken_port(service: Up, tmp_path: Path) -> None:
    before = service.shell.actors()
    taken = int(service.record["admin_address"].rsplit(":", 1)[1])
    file, address = edited(tmp_path, ports={"grpc": taken}), service.record["ray_address"]
    done = service.shell.cli("up", "-f", file, "--ray-address", address, **service.ray_token)
    line = the_refusal(done)
    assert "router-0" in line
    assert f"127.0.0.1:{taken}" in line
    wait_until("its actors have ended", lambda: service.shell.actors() == before)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"budget": "9TiB", "slots": None}, "bytes of memory missing"),
        ({"node_labels": {"site": "moon"}}, "no node with labels {'site': 'moon'} for rank 0"),
    ],
)
def test_up_refuses_what_no_node_can_hold(
    service: Up, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    before = service.shell.actors()
    file = edited(tmp_path, fleet=a_fleet(**changes))
    address = service.record["ray_address"]
    done = service.shell.cli("up", "-f", file, "--ray-address", address, **service.ray_token)
    assert line in the_refusal(done)
    assert service.shell.actors() == before


def test_up_without_the_clusters_token_is_refused_at_once(service: Up, tmp_path: Path) -> None:
    file, address = edited(tmp_path), service.record["ray_address"]
    done = service.shell.cli("up", "-f", file, "--ray-address", address, timeout_s=40)
    assert "asks for a token and this shell has none" in the_refusal(done)
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    done = service.shell.cli("up", "-f", file, "--ray-address", address, timeout_s=40, **wrong)
    assert "asks for a token and this shell has another one" in the_refusal(done)
    assert "0" * 64 not in done.stderr


# -- refusals that start nothing -------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path / "user").cleaned() as user:
        yield user


def test_up_refuses_a_bad_file(shell: Shell, tmp_path: Path) -> None:
    done = shell.cli("up", "-f", edited(tmp_path, network="everywhere"), timeout_s=40)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{tmp_path}/service.yaml:")
    assert "network" in line
    assert shell.left() == {}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"model": {"name": "m", "checkpoint": "no/such/model"}},
            "is not a folder on this machine",
        ),
        ({"fleet": a_fleet(slots=20)}, "bytes of slots missing"),
    ],
)
def test_up_refuses_what_the_file_alone_shows_before_anything_starts(
    shell: Shell, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    done = shell.cli("up", "-f", edited(tmp_path, **changes), timeout_s=40)
    assert line in the_refusal(done)
    assert "starting" not in done.stderr
    assert shell.left() == {}


def test_a_relative_path_starts_at_the_file(shell: Shell, tmp_path: Path) -> None:
    file = edited(tmp_path, model={"name": "m", "checkpoint": "models/m"})
    done = shell.cli("up", "-f", file, timeout_s=40)
    assert f"{tmp_path}/models/m" in the_refusal(done)


def test_up_refuses_a_dead_ray_at_once(shell: Shell, tmp_path: Path) -> None:
    done = shell.cli("up", "-f", edited(tmp_path), "--ray-address", DOWN_PORT, timeout_s=60)
    assert "no Ray cluster answers at" in the_refusal(done)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = shell.cli("up", "-f", edited(tmp_path), "--ray-address", address, timeout_s=60)
    assert "no Ray cluster answers at" in the_refusal(done)
    assert shell.left() == {}


def test_a_refusal_after_ray_was_started_ends_ray_too(shell: Shell, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = set(os.listdir("/tmp"))
        done = shell.cli("up", "-f", edited(tmp_path, ports={"admin": port}))
    assert f"cannot listen on 127.0.0.1:{port}" in the_refusal(done)
    assert "starting a local Ray cluster" in done.stderr
    assert shell.left() == {}
    new = set(os.listdir("/tmp")) - before
    assert not [name for name in new if (Path("/tmp") / name / "ray_current_cluster").exists()]
    assert shell.cli("status").returncode == 3
