"""The compute benchmarks: they measure what they say and refuse wrong output. No figure is
asserted.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import compute, gpu
from benchmarks.compute_variants import BASELINE, Case, make_batch, measure, oracle, plain_loop
from benchmarks.environment import record, use_one_thread, write_json

TINY = Case(tokens=5, hidden_size=32, intermediate_size=16, num_experts=6, top_k=2)


def test_every_variant_of_a_case_is_measured_against_the_loop() -> None:
    results = {result.variant: result for result in measure(TINY, 1, 10.0, budget_s=0.0)}
    assert {BASELINE, "plain loop (control)", "numpy", "torch loop"} <= set(results)
    assert results[BASELINE].speedup == 1.0
    for result in results.values():
        assert result.error <= 1e-5
        assert result.speedup_low <= result.speedup <= result.speedup_high
        assert result.gflop_per_s == pytest.approx(TINY.flops / result.best_s / 1e9)
        assert result.share_of_peak == pytest.approx(result.gflop_per_s / 10.0)


def test_the_oracle_tells_a_wrong_weight() -> None:
    batch = make_batch(TINY, np.random.default_rng(1))
    expected = oracle(TINY, batch)
    run = plain_loop(TINY, batch)
    assert np.allclose(run(), expected, rtol=1e-4, atol=1e-5)
    used = int(batch.experts[0, 0])
    batch.blobs[used].view(np.float32)[-32:] += 1.0
    assert not np.allclose(run(), oracle(TINY, batch), rtol=1e-4, atol=1e-5)


def test_threads_cannot_be_set_too_late() -> None:
    with pytest.raises(RuntimeError, match="numpy and torch imported before"):
        use_one_thread()


def test_the_record_says_with_what_and_where(tmp_path: Path) -> None:
    environment = record("compute", seed=7)
    assert environment.seed == 7
    assert environment.commit
    assert {"numpy", "torch", "numba"} <= set(environment.versions)
    assert environment.cpu_count >= 1
    path = tmp_path / "figures.json"
    write_json(path, environment, {"cases": []})
    written = json.loads(path.read_text())
    assert written["environment"]["versions"] == environment.versions
    assert written["cases"] == []
    assert any("seed 7" in line for line in environment.lines())


def test_sizes_of_the_issue_are_measured() -> None:
    assert {(tokens, 1024, 512, 16, 4) for tokens in (1, 8, 64, 512)} <= set(compute.SIZES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_the_gpu_benchmark_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "no CUDA device: skipped\n"


def test_the_gpu_benchmark_can_be_rehearsed_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.BUDGET_S, "cpu", 0.0)
    path = tmp_path / "gpu.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert gpu.main(["--device", "cpu", "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    written = json.loads(path.read_text())
    assert {result["dtype"] for result in written["numerics"]} == {"bfloat16", "float16", "float32"}
    assert all(result.get("passed", True) for result in written["numerics"])
    assert {result["path"] for result in written["ways"]} >= {"plain loop", "loop"}
    assert len(written["copies"]) == 3
