"""Services of their own on the shared cluster, one a test module."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_serve.bootstrap.local_ray import LocalRay
from moe_serve.config import ServiceConfig
from tests.service_cluster import Service, running

Deploy = Callable[..., Service]
"""Of a service file and, as `history_dir`, the folder in which its processes note facts."""


@pytest.fixture(scope="module")
def deploy_service(ray_cluster: LocalRay) -> Iterator[Deploy]:
    """Deploys a service and waits until it is ready; all are taken down after the module."""
    with ExitStack() as stack:

        def deployed(config: ServiceConfig, history_dir: Path | str = "") -> Service:
            return stack.enter_context(running(config, history_dir=history_dir))

        yield deployed


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the module's checkpoint and state."""
    return tmp_path_factory.mktemp("service")
