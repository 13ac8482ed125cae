"""The service file: every fault at once, with its place, and nothing but plain data out of YAML."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import BaseModel

from moe_serve.config import ConfigInvalid, load_config, parse_config, schema
from moe_serve.config.schema import parse_bytes
from placement.config import RebalanceConfig

ROOT = Path(__file__).resolve().parents[3]
GOOD = b"""service: s
model: {name: m, checkpoint: "package:tiny_moe"}
fleet: {ranks: [{count: 2, slots: 8, profile: p}]}
profiles: [{name: p, flops_per_s: 1, memory_bytes_per_s: 1, copy_bytes_per_s: 1}]
"""


def faults(text: bytes) -> list[str]:
    """All faults of a file, as printed."""
    with pytest.raises(ConfigInvalid) as caught:
        parse_config(text, "f.yaml")
    return [str(fault) for fault in caught.value.faults]


def test_example_is_valid_and_keeps_the_core_defaults() -> None:
    config = load_config(ROOT / "examples" / "tiny-moe.yaml")
    assert config.fleet.num_ranks == 4
    assert config.core_rebalance().regret_decay == RebalanceConfig().regret_decay


def test_all_faults_come_at_once_with_their_places() -> None:
    found = faults(
        b"service: x\nservice: y\n"
        b"model: {name: a, checkpoint: b, dtyp: float32}\n"
        b"fleet:\n  ranks:\n    - {count: 0, slots: 4, budget: 1MiB, profile: q}\n"
        b"profiles:\n"
        b"  - {name: p, flops_per_s: -1, memory_bytes_per_s: 1, copy_bytes_per_s: 1}\n"
        b"network: clutser\nrebalance: {window: 3, floor: 99}\n"
    )
    assert found[0] == "f.yaml:2:1: service: is given twice"
    assert "f.yaml:3:33: model.dtyp: unknown field (got 'float32'); did you mean dtype?" in found
    assert "f.yaml:10:13: rebalance.window: unknown field (got 3); did you mean window_s?" in found
    assert any(line.startswith("f.yaml:9:1: network:") and "cluster?" in line for line in found)
    assert any(line.startswith("f.yaml:8:") and "flops_per_s" in line for line in found)
    assert len(found) == 7


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (b"network: cluster\n", "accept_insecure"),
        (b"rebalance: {floor: 0}\n", "rebalance.floor"),
        (b"limits: {max_message_bytes: lots}\n", "64MiB"),
        (b"ports: {grpc: 70000}\n", "ports.grpc"),
        (b"metrics: {per_expert: true}\n", "told at ports.metrics alone"),
    ],
)
def test_one_fault_names_its_field(change: bytes, word: str) -> None:
    assert word in "\n".join(faults(GOOD + change))


def test_rules_between_fields() -> None:
    assert "profiles" in faults(GOOD.replace(b"profile: p}", b"profile: other}"))[0]
    assert "exactly one of budget and slots" in faults(GOOD.replace(b"slots: 8, ", b""))[0]


def test_rules_between_fields_are_told_at_once_each_at_its_field() -> None:
    twin = b"{name: p, flops_per_s: 1, memory_bytes_per_s: 1, copy_bytes_per_s: 1}"
    text = GOOD.replace(b"profile: p}", b"profile: q}, {slots: 8, profile: r}")
    text = text.replace(b"copy_bytes_per_s: 1}]", b"copy_bytes_per_s: 1},\n  " + twin + b"]")
    assert faults(text + b"network: cluster\n") == [
        "f.yaml:3:38: fleet.ranks.0.profile: 'q' is not under profiles (['p'])",
        "f.yaml:3:62: fleet.ranks.1.profile: 'r' is not under profiles (['p'])",
        "f.yaml:5:4: profiles.1.name: two profiles are named p",
        "f.yaml:6:1: network: cluster needs security.token_file, tls_cert_file and tls_key_file, "
        "or accept_insecure: true (--i-accept-insecure)",
    ]


def test_what_a_name_may_be_is_said_in_words() -> None:
    (fault,) = faults(GOOD.replace(b"service: s", b"service: my service"))
    assert fault == (
        "f.yaml:1:1: service: want at most 63 of A-Z a-z 0-9 . _ - and the first one a letter or a "
        "digit (got 'my service')"
    )
    (fault,) = faults(GOOD.replace(b"slots: 8,", b"slots: 8, device: gpu,"))
    assert "should be 'cpu' or 'cuda'" in fault
    patterns = {
        getattr(one, "pattern", None)
        for model in vars(schema).values()
        if isinstance(model, type) and issubclass(model, BaseModel)
        for info in model.model_fields.values()
        for one in info.metadata
    }
    assert patterns - {None} == set(schema.PATTERN_WORDS), "each pattern has its words"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1, 2]",
        b"a: [1",
        b"\xff\xfe",
        b"a: &x 1\nb: *x\n",
        b"!!python/object/apply:os.system ['true']",
        b"x: !!python/name:os.system\n",
    ],
)
def test_what_is_no_plain_mapping_is_refused(text: bytes) -> None:
    assert faults(text)


def test_huge_and_missing_files_are_refused() -> None:
    assert "at most" in faults(b"#" * ((1 << 20) + 1))[0]
    with pytest.raises(ConfigInvalid) as missing:
        load_config("/nonexistent/service.yaml")
    assert str(missing.value) == (
        "/nonexistent/service.yaml: cannot be read: No such file or directory; give the path of a "
        "service file"
    )


def test_sizes() -> None:
    assert parse_bytes("1.5 KiB") == 1536
    assert parse_bytes("2GB") == 2_000_000_000
    assert parse_bytes(7) == 7
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes("1 QiB")


def test_cluster_with_accepted_insecurity_is_valid() -> None:
    config = parse_config(GOOD + b"network: cluster\nsecurity: {accept_insecure: true}\n", "f")
    assert not config.security.complete


@pytest.mark.parametrize("name", ["pipe", "device"])
def test_what_may_never_end_is_not_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(ConfigInvalid, match="no regular file"):
        load_config(file)


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "http://", "https://a/v1/traces", "ftp://a"]
)
def test_what_is_no_collector_is_refused_in_words(endpoint: str) -> None:
    text = GOOD + f"telemetry: {{otlp_endpoint: '{endpoint}'}}\n".encode()
    with pytest.raises(ConfigInvalid, match="of an OTLP collector"):
        parse_config(text, "f.yaml")


def test_logs_and_traces_are_off_by_default_and_on_by_a_line() -> None:
    plain = parse_config(GOOD, "f.yaml")
    assert (plain.log.slow_request_ms, plain.telemetry.otlp_endpoint) == (0.0, "")
    text = b"log: {slow_request_ms: 250}\ntelemetry: {otlp_endpoint: 'http://[::1]:4317'}\n"
    told = parse_config(GOOD + text, "f.yaml")
    assert (told.log.slow_request_ms, told.telemetry.trace_share) == (250.0, 0.01)
