"""Metrics of a service that lives: every metric there is has samples, through the metrics port and
through Ray's exporter, and every expression of dashboard and alerts finds what it looks for.
"""

from __future__ import annotations

import itertools
import re
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from moe_serve.bootstrap.local_ray import LocalRay
from moe_serve.client import Client
from moe_serve.errors import MoeServeError
from moe_serve.telemetry.alerts import ALERTS, expression, rules
from moe_serve.telemetry.grafana import queries
from moe_serve.telemetry.registry import METRICS, series_at
from moe_serve.telemetry.scrape import scrape_config
from moe_serve.telemetry.spec import PREFIX, Scale, Size
from placement.topology import Phase
from tests.prometheus_process import Prometheus, needs_prometheus, prometheus
from tests.promql import selectors
from tests.service_cluster import Service, service_config, wait_until

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 32, 4, 128
HOT = 6
"""Experts that are asked for at a time; which ones changes all the time, so that moves pay."""
CALLS_OF_A_DOMAIN = 250
SIZE = Size(layers=LAYERS, ranks=4, routers=2, nodes=2, experts=EXPERTS)
WAIT_S = 200.0
RAY_SILENT = {
    "series_dropped_total": "nothing is dropped",
    "plans_stalled_total": "no plan stands still",
    "ejections_total": "no shard fails",
    "copy_wait_seconds_total": "copies are small",
    "expert_pairs_total": "single experts are told at ports.metrics alone",
}
"""Counters that stay at 0 in this run, which Ray shows none of, and what it is not told."""


class Calls:
    """A context in which front ends call without pause; their hot experts move on. `failures`:
    errors, in words."""

    def __init__(self, routers: Sequence[str]) -> None:
        self.failures: list[str] = []
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(router, seed), daemon=True)
            for seed, router in enumerate(routers)
        ]

    def __enter__(self) -> Calls:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(60.0)

    def _call(self, router: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        with Client([router], stream=True) as client:
            for number in itertools.count():
                if self._done.is_set():
                    return
                first = number // CALLS_OF_A_DOMAIN * HOT
                ids = (first + rng.permutation(HOT)[:TOP_K]) % EXPERTS
                rows = rng.standard_normal((4, HIDDEN)).astype(np.float32)
                gates = rng.random((4, TOP_K)).astype(np.float32)
                layer, phase = int(rng.integers(LAYERS)), Phase(int(rng.integers(2)))
                try:
                    client.forward(
                        layer, rows, np.tile(ids, (4, 1)).astype(np.int32), gates, phase=phase
                    )
                except MoeServeError as error:
                    self.failures.append(error.message)
                    return


def page(address: str, accept: str = "") -> tuple[str, str]:
    """(text, its content type) of a scrape."""
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30.0) as answer:  # noqa: S310
        return answer.read().decode(), answer.headers["Content-Type"]


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in parse_plain(text)}


def sampled(text: str) -> set[str]:
    """Names of metrics that have a sample, as the registry spells them."""
    found = set()
    for family in families(text).values():
        if family.samples:
            found.add(family.name + ("_total" if family.type == "counter" else ""))
    return found


@pytest.fixture(scope="module")
def service(deploy_service: Any, scratch: Path) -> Service:
    config = service_config(
        "measured",
        "package:tiny_moe",
        scratch / "state",
        slots=40,
        rebalance={"floor": 1, "drain_wait_s": 0.5, "cooldown_s": 0.0},
    )
    ports = config.ports.model_copy(update={"metrics": 0})
    wanted = config.metrics.model_copy(update={"per_expert": True})
    deployed: Service = deploy_service(
        config.model_copy(update={"ports": ports, "metrics": wanted})
    )
    return deployed


@pytest.fixture(scope="module")
def address(service: Service) -> str:
    assert service.deployed.metrics_address
    return service.deployed.metrics_address


@pytest.fixture(scope="module")
def busy(service: Service, address: str) -> Iterator[Service]:
    """The service while experts move; everything that a metric can tell has happened once."""
    with Calls(service.routers) as calls:
        wait_until(
            "every metric has a sample",
            lambda: set(METRICS) - sampled(page(address)[0]) == set(),
            WAIT_S,
        )
        yield service
    assert calls.failures == []


def test_every_metric_is_scraped_with_its_labels_and_their_values(
    busy: Service, address: str
) -> None:
    found = families(page(address)[0])
    count = 0
    for family in found.values():
        name = family.name + ("_total" if family.type == "counter" else "")
        spec = METRICS[name]
        assert family.documentation == spec.text
        wanted = "histogram" if spec.buckets else spec.kind.value
        assert family.type == wanted
        for sample in family.samples:
            count += 1
            extra = {"le"} if sample.name.endswith("_bucket") else set()
            assert set(sample.labels) == {*spec.labels, *extra}, sample
            for label in spec.labels:
                values = spec.values[label]
                if not isinstance(values, Scale):
                    assert sample.labels[label] in values, sample
    whole = series_at(SIZE, per_expert=True)
    print(f"{count} series of at most {whole} at {SIZE}")
    assert count <= whole


def test_the_page_comes_in_the_format_that_is_asked_for(busy: Service, address: str) -> None:
    text, kind = page(address)
    assert kind.startswith("text/plain")
    assert f"# TYPE {PREFIX}moves_total counter" in text
    accept = "application/openmetrics-text; version=1.0.0"
    text, kind = page(address, accept)
    assert kind.startswith("application/openmetrics-text")
    assert {f"{PREFIX}moves", f"{PREFIX}term"} <= {f.name for f in parse_open(text)}


@pytest.fixture(scope="module")
def ray_pages(ray_cluster: LocalRay) -> list[str]:
    """host:port of the exporter of each node; none where Ray came without its agent's packages."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    ports = [(node["NodeManagerAddress"], int(node["MetricsExportPort"])) for node in nodes]
    return [f"{host}:{port}" for host, port in ports if port > 0]


def skip_without(ray_pages: list[str]) -> None:
    if not ray_pages:
        pytest.skip("Ray exports nothing here: needs the packages of ray[default]")


def test_rays_exporter_tells_the_same(busy: Service, ray_pages: list[str]) -> None:
    skip_without(ray_pages)
    wanted = set()
    for name, spec in METRICS.items():
        if name.removeprefix(PREFIX) in RAY_SILENT:
            continue
        parts = ("_bucket", "_sum", "_count") if spec.buckets else ("",)
        wanted |= {f"ray_{name}{part}" for part in parts}
    missing: set[str] = set()

    def all_told() -> bool:
        told = "".join(page(where)[0] for where in ray_pages)
        names = set(re.findall(r"^(ray_moe_serve_\w+)", told, re.MULTILINE))
        missing.clear()
        missing.update(wanted - names)
        return not missing

    try:
        wait_until("Ray's exporters tell every metric", all_told, 90.0)
    except AssertionError:
        pytest.fail(f"not told by Ray: {sorted(missing)}")


# ------------------------------------------------------------------------------------ Prometheus


@pytest.fixture(scope="module")
def scraper(
    busy: Service,
    address: str,
    ray_pages: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes both ways once a second."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "alert-rules.yaml").write_text(yaml.safe_dump(rules()), encoding="utf-8")
    config = scrape_config(address)
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    if ray_pages:
        ray = {"job_name": "ray", "static_configs": [{"targets": ray_pages}]}
        config["scrape_configs"].append(ray)
    with prometheus(config, folder) as running:
        wait_until("all targets answer", lambda: all(running.targets_up() or [False]), 60.0)
        yield running


def in_prometheus(query: str, prefix: str) -> str:
    """A query as Grafana sends it."""
    return expression(query, prefix).replace("$__rate_interval", "1m")


@needs_prometheus
@pytest.mark.parametrize("prefix", ["", "ray_"])
def test_every_query_of_the_dashboard_finds_samples(
    scraper: Prometheus, ray_pages: list[str], prefix: str
) -> None:
    if prefix:
        skip_without(ray_pages)
    silent = {f"{PREFIX}{name}" for name in RAY_SILENT} if prefix else set()
    wanted = [
        query for query in queries() if not silent & {s.name for s in selectors(expression(query))}
    ]
    assert len(wanted) >= len(queries()) - len(RAY_SILENT)
    empty: list[str] = []

    def all_found() -> bool:
        empty[:] = [q for q in wanted if not scraper.query(in_prometheus(q, prefix))]
        return not empty

    try:
        wait_until("every query finds samples", all_found, 90.0)
    except AssertionError:
        pytest.fail(f"without samples: {empty}")
    for query in queries():
        scraper.query(in_prometheus(query, prefix))  # none is refused


@needs_prometheus
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_looks_at_samples_that_exist(scraper: Prometheus, alert: Any) -> None:
    scraper.query(expression(alert.expr))
    scraper.query(expression(alert.expr, "ray_"))
    for selector in selectors(expression(alert.expr)):
        assert scraper.query(selector.text), selector.text


@needs_prometheus
def test_rules_are_healthy_and_a_service_that_works_is_not_away(scraper: Prometheus) -> None:
    def evaluated() -> bool:
        return all(rule["health"] == "ok" for rule in scraper.rules())

    wait_until("all rules were evaluated", evaluated, 60.0)
    found = {rule["name"]: rule["state"] for rule in scraper.rules()}
    assert set(found) == {f"MoeServe{alert.name}" for alert in ALERTS}
    for name in ("ControllerAway", "ExpertMissing", "RankLost", "RequestsFail", "PausedForLong"):
        assert found[f"MoeServe{name}"] == "inactive"
