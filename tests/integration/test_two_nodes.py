"""A service on a Ray cluster of two nodes, each in a network namespace of its own, from `up` to
`down`: `network: cluster` with CURVE, TLS and bearer tokens.

Ray is started as an operator would, one `ray start` a node, with token authentication. The command
line runs on the first node, a front end on the second.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli_process import ROOT, Shell, said, the_refusal
from tests.fakes.secured import TOKENS, tls_files, token_file
from tests.marker_checkpoint import EXPERTS, LAYERS, write_marker_checkpoint
from tests.netns import IPS, Network, NoNetworks, two_networks
from tests.service_cluster import wait_until

SITES = ("a", "b")
RAY_PORT, GRPC_PORT, ADMIN_PORT = 6379, 7100, 7200
RAY_ADDRESS = f"{IPS[0]}:{RAY_PORT}"
SLOTS = 10
"""Two ranks hold all 16 experts, so that a whole node can be emptied."""
RAY_WAIT_S = 90.0
MOVES_WAIT_S = 60.0
CALLS = 60
WRONG = "w" * 20
ANY_HOST = {"0.0.0.0", "::"}  # noqa: S104 - what must not be bound


@dataclass
class Machines:
    """Two nodes that run Ray. `shells`: a user on each, with one home and state."""

    folder: Path
    networks: tuple[Network, Network]
    shells: tuple[Shell, Shell]
    nodes: dict[str, subprocess.Popen[bytes]]

    def start_node(self, site: str, network: Network, *place: str) -> None:
        """`ray start`, as its documentation says, in a network."""
        command = [
            *network.inside,
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *place),
            f"--node-ip-address={network.ip}",
            f"--labels=site={site}",
            f"--temp-dir={self.folder / site}",
            "--num-cpus=4",
            f"--object-store-memory={100 << 20}",
            "--disable-usage-stats",
            "--block",
        ]
        with (self.folder / f"ray-{site}.log").open("wb") as log:
            self.nodes[site] = subprocess.Popen(
                command,
                env=self.shells[0].environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill_node(self, site: str) -> None:
        """As a machine that loses its power."""
        node = self.nodes.pop(site)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def log(self, site: str) -> str:
        return (self.folder / f"ray-{site}.log").read_text(errors="replace")[-2000:]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    # Ray's sockets have long paths already.
    folder = tmp_path_factory.mktemp("two")
    (folder / "ray_token").write_text(secrets.token_hex(32))
    (folder / "ray_token").chmod(0o600)
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "ray_token")}
    with contextlib.ExitStack() as stack:
        try:
            networks = stack.enter_context(two_networks())
        except NoNetworks as error:
            pytest.skip(f"no network namespaces on this machine: {error}")
        shells = [Shell(folder, network.inside, environ) for network in networks]
        stack.enter_context(shells[0].cleaned())
        both = Machines(folder, networks, (shells[0], shells[1]), {})
        stack.callback(lambda: [both.kill_node(site) for site in list(both.nodes)])
        head = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false")
        both.start_node("a", networks[0], *head)
        wait_until("the head listens", lambda: ready(both, "a"), RAY_WAIT_S)
        both.start_node("b", networks[1], f"--address={RAY_ADDRESS}")
        wait_until("the other node has joined", lambda: ready(both, "b"), RAY_WAIT_S)
        yield both


def ready(machines: Machines, site: str) -> bool:
    assert machines.nodes[site].poll() is None, machines.log(site)
    return "Ray runtime started" in machines.log(site)


def service_file(folder: Path, **changes: Any) -> str:
    """A service on both nodes. Its secrets lie beside it and are named relative to it."""
    folder.mkdir(exist_ok=True)
    checkpoint = folder / "marker"
    if not checkpoint.exists():
        checkpoint.mkdir()
        write_marker_checkpoint(checkpoint)
        token_file(folder)
        tls_files(folder, ",".join(f"IP:{ip}" for ip in IPS))[1].chmod(0o600)
    group = {"count": 2, "slots": SLOTS, "profile": "declared", "failure_domain_label": "site"}
    tree = {
        "service": "pair",
        "model": {"name": "marker", "checkpoint": "marker"},
        "fleet": {
            "routers": 2,
            "ranks": [{**group, "node_labels": {"site": site}} for site in SITES],
        },
        "profiles": [
            {
                "name": "declared",
                "flops_per_s": 2e7,
                "memory_bytes_per_s": 2e8,
                "copy_bytes_per_s": 1e8,
            }
        ],
        "network": "cluster",
        "security": {
            "token_file": "tokens",
            "tls_cert_file": "cert.pem",
            "tls_key_file": "key.pem",
            "tls_ca_file": "cert.pem",
        },
        "ports": {"grpc": GRPC_PORT, "admin": ADMIN_PORT},
        "rebalance": {"window_s": 1.0, "cooldown_s": 1.0, "drain_wait_s": 1.0, "floor": 1},
        "dashboard": False,
    }
    file = folder / f"{changes.get('service', 'pair')}.yaml"
    file.write_text(yaml.safe_dump({**tree, **changes}))
    return str(file)


@dataclass
class Pair:
    """The service, from both nodes. `here` runs the command line, `there` the front end."""

    machines: Machines
    record: dict[str, Any]
    ca: str
    tokens: str

    @property
    def here(self) -> Shell:
        return self.machines.shells[0]

    @property
    def there(self) -> Shell:
        return self.machines.shells[1]

    def forward(self) -> Any:
        """Calls from the other node, every output compared with the oracle."""
        found = self.there.front_end(
            "forward",
            addresses=self.record["router_addresses"],
            model="marker",
            calls=CALLS,
            token_file=self.tokens,
            tls_ca=self.ca,
        )
        print(found)
        assert found["worst"] <= 1e-5
        assert found["asked"] == found["of"] == LAYERS * EXPERTS
        return found

    def wait(self, what: str, holds: Callable[[Any], Any]) -> Any:
        """The first status for which it holds."""
        seen: list[Any] = []

        def look() -> bool:
            seen[:] = [self.here.data("status")]
            return bool(holds(seen[0]))

        wait_until(what, look, MOVES_WAIT_S)
        return seen[0]


@pytest.fixture(scope="module")
def service(machines: Machines) -> Iterator[Pair]:
    """Up once for the module; down at its end, when none of its parts may be left."""
    here, folder = machines.shells[0], machines.folder / "service"
    before = here.processes()
    began_s = time.monotonic()
    record = here.data("up", "-f", service_file(folder), "--ray-address", RAY_ADDRESS)
    print(f"\nup on two nodes after {time.monotonic() - began_s:.1f} s")
    yield Pair(machines, record, str(folder / "cert.pem"), str(folder / "tokens"))
    done = here.cli("down", "-y")
    assert done.returncode == 0, said(done)
    wait_until("its actors have ended", lambda: not here.actors())
    # Ray keeps some idle processes for whoever comes next.
    later = {p: c for p, c in here.processes().items() if p not in before}
    assert not [command for command in later.values() if "ray::" not in command]
    assert all(node.poll() is None for node in machines.nodes.values())
    assert here.cli("status").returncode == 3


# -- what is where ---------------------------------------------------------------------------------


def test_parts_are_on_both_nodes_and_status_check_is_fine(service: Pair) -> None:
    shown = service.here.data("status")
    assert (shown["network"], shown["accepts_insecure"]) == ("cluster", False)
    hosts = [rank["address"].rpartition(":")[0].removeprefix("tcp://") for rank in shown["ranks"]]
    assert hosts == [IPS[0], IPS[0], IPS[1], IPS[1]]
    assert [rank["failure_domain"] for rank in shown["ranks"]] == ["a", "a", "b", "b"]
    # Nobody said where routers go: one a node.
    routers = {router["address"].rpartition(":")[0] for router in shown["routers"]}
    assert routers == set(IPS)
    assert service.record["admin_address"] == f"{IPS[0]}:{ADMIN_PORT}"
    done = service.here.cli("status", "--check")
    assert done.returncode == 0, said(done)
    # The same from the other node, by the record both share.
    done = service.there.cli("status", "--check")
    assert done.returncode == 0, said(done)


def test_every_port_of_ours_is_bound_to_its_nodes_address(service: Pair) -> None:
    shown = service.here.data("status")
    parts = [*shown["ranks"], *shown["routers"]]
    ours = {int(part["pid"]): part["address"].removeprefix("tcp://") for part in parts}
    assert len(ours) == 6
    bound = [listeners(network) for network in service.machines.networks]
    for pid, address in ours.items():
        network = IPS.index(address.rpartition(":")[0])
        host, port = address.rsplit(":", 1)
        mine = {
            (found_host, found_port) for p, found_host, found_port in bound[network] if p == pid
        }
        # Ray listens for its own calls in each of its workers; that port asks for Ray's token.
        closed = {pair for pair in mine if pair[0] not in ANY_HOST}
        assert closed == {(host, int(port))}
        assert len(mine - closed) <= 1
    admin = [(host, port) for _, host, port in bound[0] if port == ADMIN_PORT]
    assert admin == [(IPS[0], ADMIN_PORT)]


def listeners(network: Network) -> set[tuple[int, str, int]]:
    """(process, host, port) of every listening TCP socket of a network."""
    done = subprocess.run(
        [*network.inside, "ss", "-Hltnp"], capture_output=True, text=True, check=True, timeout=20
    )
    found = set()
    for line in done.stdout.splitlines():
        host, _, port = line.split()[3].rpartition(":")
        plain = host.strip("[]").removeprefix("::ffff:").replace("*", "::")
        found |= {(int(pid), plain, int(port)) for pid in re.findall(r"pid=(\d+)", line)}
    return found


# -- who is let in ---------------------------------------------------------------------------------


def test_a_front_end_on_the_other_node_gets_right_answers(service: Pair) -> None:
    found = service.forward()
    assert found["routers"] == sorted(service.record["router_addresses"])


def test_strangers_get_nothing_from_a_router(service: Pair) -> None:
    routers = service.record["router_addresses"]
    tokens = [TOKENS["dispatch"], "", WRONG, TOKENS["admin"]]
    found = service.there.front_end(
        "dispatch_strangers", addresses=routers, tls_ca=service.ca, tokens=tokens
    )
    refused = ["OK", "UNAUTHENTICATED", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNAVAILABLE"]
    assert found == dict.fromkeys(routers, refused)


def test_the_controller_asks_for_the_role_of_each_call(service: Pair) -> None:
    found = service.there.front_end(
        "admin_strangers",
        address=service.record["admin_address"],
        tls_ca=service.ca,
        tokens=["", WRONG, TOKENS["dispatch"], TOKENS["read"]],
    )
    assert found == {
        "": {"placement": "UNAUTHENTICATED", "drain": "UNAUTHENTICATED"},
        WRONG: {"placement": "UNAUTHENTICATED", "drain": "UNAUTHENTICATED"},
        TOKENS["dispatch"]: {"placement": "PERMISSION_DENIED", "drain": "PERMISSION_DENIED"},
        TOKENS["read"]: {"placement": "OK", "drain": "PERMISSION_DENIED"},
    }


def test_a_socket_without_keys_gets_nothing_from_a_shard(service: Pair) -> None:
    ranks = service.here.data("status")["ranks"]
    addresses = [rank["address"].removeprefix("tcp://") for rank in ranks]
    found = service.there.front_end("bare_sockets", addresses=addresses, wait_s=1.0)
    assert found == [{"connected": True, "handshakes": 0, "answers": 0}] * 4


# -- moves -----------------------------------------------------------------------------------------


def test_a_node_is_emptied_over_the_network_and_filled_again(service: Pair) -> None:
    here = service.here
    # Nothing moves but what is asked for here, so that every way of an expert is known.
    assert here.cli("pause").returncode == 0
    # What the traffic of other tests had set going before ends first, and does not count.
    shown = service.wait(
        "no move is running", lambda s: all(m["state"] != "running" for m in s["moves"])
    )
    before = {move["move_id"] for move in shown["moves"]}
    for rank in (0, 1):
        done = here.cli("drain", str(rank))
        assert done.returncode == 0, said(done)
    shown = service.wait("the first node is empty", lambda s: not (held(s, 0) or held(s, 1)))
    away = crossings(shown, before)
    print(f"from the first node to the second: {away}")
    assert {source for source, _ in away} <= {0, 1}
    assert {target for _, target in away} <= {2, 3}
    assert away
    service.forward()
    # The second node alone holds every expert now.
    assert "bytes" in the_refusal(here.cli("budget", "2", "1slots"))

    for rank in (0, 1):
        assert here.cli("undrain", str(rank)).returncode == 0
    done = here.cli("budget", "2", "4slots")
    assert done.returncode == 0, said(done)
    shown = service.wait("the rank has given up slots", lambda s: len(held(s, 2)) <= 3)
    shown = service.wait("nothing is missing", lambda s: not (s["missing"] or s["degraded"]))
    back = crossings(shown, before)[len(away) :]
    print(f"and back: {back}")
    assert back
    service.forward()
    assert here.cli("budget", "2", f"{SLOTS}slots").returncode == 0
    assert here.cli("resume").returncode == 0


def crossings(shown: Any, before: set[int]) -> list[tuple[int, int]]:
    """(source, target) of every copy that went from node to node, but for moves of `before`."""
    fresh = [move for move in shown["moves"] if move["move_id"] not in before]
    done = [move for move in fresh if move["cross_node"] and move["state"] == "done"]
    assert all(move["copy_bytes"] > 0 for move in done)
    return [(move["source_rank"], move["target_rank"]) for move in done]


def held(shown: Any, rank: int) -> list[Any]:
    return [slot for slot in shown["ranks"][rank]["slots"] if slot["layer"] >= 0]


# -- refusals --------------------------------------------------------------------------------------


def test_loopback_on_two_machines_is_refused(machines: Machines) -> None:
    file = service_file(machines.folder / "service", service="inside", network="loopback")
    before = machines.shells[0].actors()
    done = machines.shells[0].cli("up", "-f", file, "--ray-address", RAY_ADDRESS)
    line = the_refusal(done)
    assert "network: loopback reaches one machine, the cluster has 2" in line
    assert machines.shells[0].actors() == before


def test_a_dead_node_is_refused(machines: Machines) -> None:
    folder = machines.folder / "service"
    ranks = [
        {"count": 1, "slots": 40, "profile": "declared", "node_labels": {"site": site}}
        for site in ("a", "c")
    ]
    file = service_file(folder, service="dead", fleet={"ranks": ranks})
    # Beside the second node, on its machine.
    machines.start_node("c", machines.networks[1], f"--address={RAY_ADDRESS}")
    wait_until("a third node has joined", lambda: ready(machines, "c"), RAY_WAIT_S)
    machines.kill_node("c")
    before = machines.shells[0].actors()
    done = machines.shells[0].cli("up", "-f", file, "--ray-address", RAY_ADDRESS)
    line = the_refusal(done)
    print(line)
    # Which one depends on whether Ray has noticed.
    told = ("no node with labels {'site': 'c'} for rank 1", "left the cluster", "does not answer")
    assert any(words in line for words in told)
    assert machines.shells[0].actors() == before


def test_a_cluster_service_over_an_open_ray_is_refused(machines: Machines) -> None:
    file = service_file(machines.folder / "service", service="open")
    here = machines.shells[0]
    before = here.actors()
    done = here.cli("up", "-f", file, "--ray-address", RAY_ADDRESS, RAY_AUTH_MODE="disabled")
    assert "Ray asks for no token" in the_refusal(done)
    assert here.actors() == before
