"""Folders in which processes of a module's service note facts and find orders to lose calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.rpc_loss import RpcLoss


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> RpcLoss:
    return RpcLoss(tmp_path_factory.mktemp("losses"))
