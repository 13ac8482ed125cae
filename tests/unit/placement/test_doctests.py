"""Every worked example in a docstring of `placement` gives what it says."""

import doctest
import importlib
import pkgutil

import pytest

import placement
from placement.split import compile_layer

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(placement.__path__, "placement.")
    if not module.name.endswith(".kernels")
)


@pytest.mark.parametrize("name", MODULES)
def test_worked_examples_hold(name: str) -> None:
    module = importlib.import_module(name)
    # What a caller of the splitter has at hand where an example begins.
    result = doctest.testmod(module, extraglobs={"compile_layer": compile_layer})
    assert result.failed == 0


def test_examples_are_found() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test.name
        for name in ("placement.eplb", "placement.split.levels", "placement.adapters.sglang")
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert "placement.eplb.rebalance_experts" in found
    assert {"placement.split.levels.level", "placement.split.levels.level_uniform"} <= set(found)
    assert "placement.adapters.sglang.location_json" in found
