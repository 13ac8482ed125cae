"""Run the demo from start to figures: cluster, service, front end, budget change, audit, report.

Responsible for the order of things and for ending everything it started. Judges by `report`. Called
by the CLI.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import grpc
import msgspec

from moe_serve.bootstrap.local_ray import ensure_auth, start_local_ray, stop_local_ray
from moe_serve.bootstrap.parts import checkpoint_folder, moe_spec
from moe_serve.bootstrap.record import service_dir
from moe_serve.bootstrap.service import Deployed, command_connected, deploy, undeploy
from moe_serve.bootstrap.signals import end_as_interrupted
from moe_serve.bootstrap.watchdog import watched
from moe_serve.config import ServiceConfig, parse_config
from moe_serve.demo.front_end import (
    FailedLine,
    GreedyLine,
    Line,
    ParityLine,
    SummaryLine,
    TextLine,
)
from moe_serve.demo.ledgers import audit_pages
from moe_serve.demo.measure import balance_figures, merged
from moe_serve.demo.options import DemoOptions
from moe_serve.demo.prompts import SCHEDULE
from moe_serve.demo.report import checks, figures
from moe_serve.demo.screen import Screen
from moe_serve.demo.static_layout import static_layout
from moe_serve.demo.watch import Watcher
from moe_serve.errors import MoeServeError, StartRefused
from moe_serve.router.faults import ContributionFault, FaultKind
from moe_serve.rpc import placement_pb2

NODES = ({"moe.node": "node-a"}, {"moe.node": "node-b"})
"""Two logical nodes of this machine."""
BUDGET_RANK = 0
BUDGET_SLOTS = 2
"""Half-way, this rank gives up so many slots, and gets them back a little later."""
BUDGET_LOW_SHARE = 0.15
"""Share of the run during which the budget stays low."""
FAULT_AFTER_REQUESTS = 40
"""Requests a router answers rightly before a deliberate fault."""
LEDGER_PAGE = 200_000
MEASURE_WINDOW_S = 2.0
"""Balance is measured in windows of this length, whatever the controller's own are."""
FRONT_END_GRACE_S = 30.0
"""A front end that has been told to stop finishes its batch within this time."""


class FrontEndProcess:
    """The front end as a child process, and what it said so far."""

    def __init__(self, addresses: tuple[str, ...], checkpoint: str, seconds: float) -> None:
        self.lines: list[Line] = []
        self.first_line = threading.Event()
        self._process = subprocess.Popen(  # noqa: S603 - every argument is ours
            [
                sys.executable,
                "-m",
                "moe_serve.demo.front_end",
                f"--addresses={','.join(addresses)}",
                f"--checkpoint={checkpoint}",
                f"--seconds={seconds}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self.ended = threading.Event()

    def read(self, screen: Screen) -> None:
        """Take every line until the process ends. Runs in a thread."""
        assert self._process.stdout is not None, "stdout is a pipe"
        decoder = msgspec.json.Decoder(Line)
        for raw in self._process.stdout:
            line = decoder.decode(raw)
            self.lines.append(line)
            self.first_line.set()
            if isinstance(line, TextLine):
                screen.text(line)
            elif isinstance(line, FailedLine):
                screen.note(f"request failed: {line.error}")
        self._process.wait()
        self.ended.set()
        self.first_line.set()

    def stop(self) -> None:
        """Let it finish its batch and say its totals; end it where it does not."""
        if self._process.poll() is None:
            self._process.terminate()
            if not self.ended.wait(FRONT_END_GRACE_S):
                self._process.kill()

    @property
    def summary(self) -> SummaryLine:
        """Totals. Raises MoeServeError where the process ended without them."""
        for line in self.lines:
            if isinstance(line, SummaryLine):
                return line
        raise MoeServeError(f"the front end ended with {self._process.poll()} and no totals")


def run_demo(options: DemoOptions, show: Callable[[dict[str, Any]], None] | None = None) -> int:
    """Run the demo. Returns 0 where every figure reached its bar, 1 where one did not, 130 after
    Ctrl-C. show: takes the figures, and has stdout to itself.

    Raises StartRefused where cluster or service will not start. Leaves nothing running in any case.
    """
    if options.json_file is not None:
        _check_writable(options.json_file)
    screen = Screen(options.quiet, sys.stdout if show is None else sys.stderr)
    end_as_interrupted()
    try:
        with _service(options, screen) as (config, deployed):
            found = _watched_run(options, config, deployed, screen)
    except KeyboardInterrupt:
        screen.note("stopped; cluster and service are ended")
        return 130
    results = checks(found, len(SCHEDULE))
    report = {**found, "failed_checks": [check.name for check in results if not check.holds]}
    if options.json_file is not None:
        _write(options.json_file, report)
    screen.summary(found, results)
    if show is not None:
        show(report)
    return 0 if all(check.holds for check in results) else 1


@contextlib.contextmanager
def _service(options: DemoOptions, screen: Screen) -> Iterator[tuple[ServiceConfig, Deployed]]:
    """The demo's own cluster and service, ended in any case."""
    with tempfile.TemporaryDirectory(prefix="moe-demo-") as scratch, _watched(scratch):
        data = resources.files("moe_serve.demo").joinpath("demo.yaml").read_bytes()
        config = parse_config(data, "demo.yaml").model_copy(
            update={"state_dir": Path(scratch) / "state", "dashboard": options.dashboard}
        )
        screen.banner(config)
        ensure_auth(service_dir(config.service, config.state_dir))
        screen.note("starting Ray as two logical nodes on this machine")
        cluster = start_local_ray(_ray_dir(scratch), labels=NODES)
        try:
            with command_connected(cluster.address):
                _wait_for_nodes(len(NODES))
                deployed = deploy(config, progress=screen.note, fault=_fault(options.inject))
                try:
                    yield config, deployed
                finally:
                    screen.note("ending the service")
                    undeploy(config.service)
        finally:
            stop_local_ray(cluster.pids, cluster.temp_dir)


def _ray_dir(scratch: str) -> Path:
    return Path(scratch) / "ray"


def _watched(scratch: str) -> contextlib.AbstractContextManager[None]:
    """Should this program be killed, whenever that is, its cluster ends as well."""
    return watched(_ray_dir(scratch), Path(scratch))


def _wait_for_nodes(count: int) -> None:
    from moe_serve.bootstrap.fleet import alive_nodes

    deadline_s = time.monotonic() + 60.0
    while len(alive_nodes()) < count:
        if time.monotonic() > deadline_s:
            raise StartRefused(
                f"only {len(alive_nodes())} of {count} logical nodes came up in 60 s"
            )
        time.sleep(0.1)


def _fault(inject: str) -> ContributionFault | None:
    return ContributionFault(FaultKind(inject), FAULT_AFTER_REQUESTS) if inject else None


def _watched_run(
    options: DemoOptions, config: ServiceConfig, deployed: Deployed, screen: Screen
) -> dict[str, Any]:
    watcher = Watcher(deployed.admin_address, screen.record)
    watcher.start()
    if deployed.dashboard_url:
        screen.note(f"page: {deployed.dashboard_url}")
        webbrowser.open(deployed.dashboard_url)
    program = "moe-serve" if shutil.which("moe-serve") else f"{sys.executable} -m moe_serve"
    screen.note(
        "other commands, from another shell: "
        f"export MOE_SERVE_ADDRESS={deployed.admin_address}; {program} top"
    )
    front_end = FrontEndProcess(
        deployed.router_addresses, checkpoint_folder(config.model.checkpoint), options.seconds
    )
    reader = threading.Thread(target=front_end.read, args=(screen,), daemon=True)
    reader.start()
    at_start = watcher.stub.GetPlacement(placement_pb2.GetPlacementRequest(), timeout=10.0)
    try:
        front_end.first_line.wait(120.0)
        _play(options.seconds, watcher, front_end, screen)
    finally:
        front_end.stop()
        reader.join(5.0)
        seen = watcher.stop()
    pages = asyncio.run(_ledgers(config))
    spec, _ = moe_spec(config)
    parity = [line for line in front_end.lines if isinstance(line, ParityLine)]
    return figures(
        summary=msgspec.to_builtins(front_end.summary),
        parity=[(line.began_s, line.ended_s, line.max_abs_diff) for line in parity],
        moving=seen.moving,
        greedy_equal=[line.equal for line in front_end.lines if isinstance(line, GreedyLine)],
        ledger=audit_pages(*pages),
        # The first fill of empty ranks is no move of interest.
        moves={
            kind: int(count) - int(at_start.moves_done.get(kind, 0))
            for kind, count in seen.placement.moves_done.items()
        },
        epochs_published=int(seen.placement.epochs_published),
        balance=balance_figures(
            merged(seen.windows, round(MEASURE_WINDOW_S / config.core_rebalance().window_s)),
            static_layout(config, spec),
        ),
        seconds=options.seconds,
    )


def _play(seconds: float, watcher: Watcher, front_end: FrontEndProcess, screen: Screen) -> None:
    """Show the live line until the front end ends; lower a budget half-way and restore it."""
    began_s = time.monotonic()
    low_at_s, high_at_s = 0.5 * seconds, (0.5 + BUDGET_LOW_SHARE) * seconds
    usual = watcher.stub.GetPlacement(placement_pb2.GetPlacementRequest(), timeout=10.0)
    rank = usual.ranks[BUDGET_RANK]
    steps = [
        (low_at_s, rank.budget_bytes - BUDGET_SLOTS * usual.slot_bytes, "gives up two slots"),
        (high_at_s, rank.budget_bytes, "gets them back"),
    ]
    while not front_end.ended.wait(0.5):
        screen.live(watcher.seen)
        if steps and time.monotonic() - began_s >= steps[0][0]:
            _, budget_bytes, what = steps.pop(0)
            screen.note(f"SetBudget: rank {rank.rank} {what} ({budget_bytes} bytes)")
            request = placement_pb2.SetBudgetRequest(rank=rank.rank, budget_bytes=budget_bytes)
            try:
                watcher.stub.SetBudget(request, timeout=30.0)
            except grpc.RpcError as error:
                screen.note(f"SetBudget was refused: {error}")


async def _ledgers(config: ServiceConfig) -> tuple[list[Any], list[Any]]:
    """Ledgers of all shards and routers. The fleet here only finds actors; it creates none."""
    from moe_serve.bootstrap.fleet import RayFleet
    from moe_serve.bootstrap.parts import PartsPlan
    from moe_serve.controller.names import PartKind, parse

    spec, layers = moe_spec(config)
    fleet = RayFleet(
        PartsPlan(config=config, spec=spec, checkpoint_layers=layers, state_dir="", wire_keys=None)
    )
    shards: list[Any] = []
    routers: list[Any] = []
    for name in await fleet.part_names():
        part = parse(config.service, name)
        if part is None:
            continue
        if part.kind is PartKind.SHARD:
            port = await fleet.find_shard(name)
            if port is not None:
                shards.append(await port.take_ledger())
        else:
            remote = await fleet.find_router(name)
            while remote is not None:
                page = await remote.take_ledger(LEDGER_PAGE)
                routers.append(page)
                if len(page.entries) < LEDGER_PAGE:
                    break
    return shards, routers


def _check_writable(file: Path) -> None:
    """Minutes later it would be too late. Raises StartRefused."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise StartRefused(f"--json {file} cannot be written; name a file in a folder of yours")


def _write(file: Path, report: dict[str, Any]) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
