"""Python blocks of the tutorial run as they stand, each in a process of its own, against a router
that computes with the tiny model's weights."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moe_serve.bootstrap.parts import checkpoint_folder
from moe_serve.bootstrap.record import ServiceRecord, write_record
from moe_serve.weights import Checkpoint
from moe_serve.weights.canonical import canonical_views
from tests.architecture.tree import ROOT
from tests.doc_blocks import blocks_of
from tests.fakes.dispatch_service import FakeRouter, threaded_router

CHECKPOINT = Checkpoint.open(checkpoint_folder("package:tiny_moe"))
CLIENT, MODEL = (block for block in blocks_of("docs/tutorial.md") if block.kind == "python")
CALLS = "range(100_000)"


@cache
def _weights(layer: int, expert: int) -> tuple[np.ndarray, np.ndarray]:
    spec = CHECKPOINT.spec
    raw = CHECKPOINT.read_expert(layer, expert, "float32")
    views = canonical_views(raw.data, spec.hidden_size, spec.intermediate_size, "float32")
    return views.gate_up.astype(np.float64), views.down.astype(np.float64)


def _experts(layer: int, expert: int, rows: np.ndarray) -> np.ndarray:
    gate_up, down = _weights(layer, expert)
    gate, up = np.split(rows @ gate_up, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ down


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRouter]:
    """Serve the tiny model under the record that `up -f examples/tiny-moe.yaml` would write."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    spec = CHECKPOINT.spec
    with threaded_router(
        experts=_experts,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        hidden_size=spec.hidden_size,
        checkpoint_layers=spec.layer_ids,
    ) as found:
        write_record(
            ServiceRecord(
                service="tiny-moe",
                ray_address="",
                namespace="moe_serve",
                admin_address="",
                router_addresses=(found.address,),
                dashboard_url="",
                config_file="",
                network="loopback",
            )
        )
        yield found


def _run(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=ROOT,
        env={**os.environ, "TRANSFORMERS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(60)
def test_the_client_block_runs(router: FakeRouter) -> None:
    text = CLIENT.text
    assert CALLS in text
    _run(text.replace(CALLS, "range(24)"))
    assert len(router.requests) == 24
    assert {request.layer for request in router.requests} == set(range(CHECKPOINT.spec.num_layers))


@pytest.mark.timeout(180)  # transformers and torch take seconds to import
def test_the_model_block_writes_text(router: FakeRouter) -> None:
    written = _run(MODEL.text)
    assert written.startswith("def main(")
    assert len(written) > len("def main(") + 10
    assert len(router.requests) >= 39 * CHECKPOINT.spec.num_layers
