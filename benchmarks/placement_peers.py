"""Published planners, run from their own files: DeepSeek's EPLB and vLLM's EPLB policy.

Responsible for finding those files in a folder, for loading them and for calling their public
function as their own engine calls it. Holds no code of theirs. Called by `placement_runs`.

The folder is `PEERS_DIR`, else `.peers/` beside the benchmarks, which `make peers` fills. It holds

    deepseek_eplb/eplb.py        DeepSeek's file, or else
    sglang_eplb/deepseek.py      the same algorithm as sglang's package carries it
    vllm_eplb/default.py, abstract.py
    */SOURCE                     one line: package and version

Peers plan after every window, on the last window (`last`) or on the sum of the last eight (`sum8`),
globally: one node, one group, which is their best case.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.environment import ROOT
from benchmarks.placement_planners import Planned
from benchmarks.placement_score import from_matrix
from benchmarks.placement_traces import Case

IntArray = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.int64]

PEERS_VARIABLE: Final = "PEERS_DIR"
SUMMED: Final = {"last": 1, "sum8": 8}
"""Load signal -> windows it sums."""
_PACKAGE: Final = "placement_peer_files"
"""Prefix of the names under which peers' modules are loaded."""


class Peer(NamedTuple):
    """A published planner that is here.

    source: package and version, or the file's name. rebalance: (load float [layers, experts], live
    matrix or None, slots, ranks) -> matrix [layers, slots].
    """

    name: str
    source: str
    rebalance: Callable[[npt.NDArray[np.float64], Matrix | None, int, int], Matrix]


class Peers(NamedTuple):
    """Peers that are here, and one line for each that is not."""

    found: tuple[Peer, ...]
    absent: tuple[str, ...]


def peers_folder() -> Path:
    """`PEERS_DIR`, else `.peers` of the checkout."""
    named = os.environ.get(PEERS_VARIABLE, "")
    return Path(named) if named else ROOT / ".peers"


def find_peers(folder: Path) -> Peers:
    """Load what the folder holds. Faults in peers' files are raised; missing files are listed."""
    found: list[Peer] = []
    absent: list[str] = []
    for name, choices, make in (
        ("DeepSeek EPLB", ("deepseek_eplb/eplb.py", "sglang_eplb/deepseek.py"), _deepseek),
        ("vLLM EPLB", ("vllm_eplb/default.py",), _vllm),
    ):
        here = [choice for choice in choices if (folder / choice).is_file()]
        if here:
            found.append(Peer(name, _source(folder / here[0]), make(_load(folder / here[0]))))
        else:
            absent.append(
                f"{name}: no {' or '.join(choices)}; run `make peers` or set {PEERS_VARIABLE}"
            )
    return Peers(tuple(found), tuple(absent))


class PeerPlanner:
    """A peer, asked after every window for a whole new placement."""

    def __init__(self, case: Case, peer: Peer, signal: str) -> None:
        self._case, self._peer = case, peer
        self._windows: deque[IntArray] = deque(maxlen=SUMMED[signal])
        self._live: Matrix | None = None

    def plan(self, window: IntArray, upcoming: IntArray) -> Planned:
        """See `placement_planners.Planner`."""
        del upcoming
        began_s = time.thread_time()
        self._windows.append(window.sum(axis=0))
        load = np.sum(list(self._windows), axis=0).astype(np.float64)
        between_s = time.thread_time()
        case = self._case
        self._live = self._peer.rebalance(load, self._live, case.slots, case.ranks)
        ended_s = time.thread_time()
        placement = from_matrix(self._live, case.ranks, case.experts)
        return Planned(placement, between_s - began_s, ended_s - between_s)


def _source(path: Path) -> str:
    note = path.parent / "SOURCE"
    return note.read_text(encoding="utf-8").strip() if note.is_file() else path.name


def _deepseek(
    module: ModuleType,
) -> Callable[[npt.NDArray[np.float64], Matrix | None, int, int], Matrix]:
    import torch

    rebalance: Any = module.rebalance_experts
    hierarchical = "enable_hierarchical" in rebalance.__code__.co_varnames[:6]

    def call(load: npt.NDArray[np.float64], live: Matrix | None, slots: int, ranks: int) -> Matrix:
        del live  # it has no argument for it
        extra = (False,) if hierarchical else ()
        matrix: Matrix = rebalance(torch.from_numpy(load), slots, 1, 1, ranks, *extra)[0].numpy()
        return matrix

    return call


def _vllm(
    module: ModuleType,
) -> Callable[[npt.NDArray[np.float64], Matrix | None, int, int], Matrix]:
    import torch

    policy: Any = module.DefaultEplbPolicy

    def call(load: npt.NDArray[np.float64], live: Matrix | None, slots: int, ranks: int) -> Matrix:
        old = None if live is None else torch.from_numpy(live)
        matrix: Matrix = policy.rebalance_experts(
            torch.from_numpy(load), slots, 1, 1, ranks, old
        ).numpy()
        return matrix

    return call


def _load(path: Path) -> ModuleType:
    """Load a file as a module of a package that is its folder, so that its `from .x` work."""
    # named by the folder: another folder's `.x` must not be taken for this one's
    package = f"{_PACKAGE}_{zlib.crc32(bytes(path.parent.resolve())):08x}"
    holder = ModuleType(package)
    holder.__path__ = [str(path.parent)]
    sys.modules[package] = holder
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    assert spec is not None, f"{path} is no Python file"
    assert spec.loader is not None, f"{path} has no loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
