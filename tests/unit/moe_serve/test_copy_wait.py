"""What copies wait for the copy limit is counted, and a wait that is refused is not."""

import threading

import pytest

from moe_serve.errors import DeadlineExceeded
from moe_serve.wire.copy_client import CopyAborted, CopyClient
from moe_serve.wire.token_bucket import TokenBucket


def test_only_seconds_that_were_waited_count() -> None:
    client = CopyClient(TokenBucket(1000.0, 500.0), clock=lambda: 0.0)
    aborted = threading.Event()
    client.wait_for_tokens(500, 1e9, aborted)
    assert client.waited_s == 0.0
    aborted.set()  # ends the wait at once
    with pytest.raises(CopyAborted):
        client.wait_for_tokens(250, 1e9, aborted)
    assert client.waited_s == 0.25
    with pytest.raises(DeadlineExceeded):
        client.wait_for_tokens(1_000_000, 1.0, threading.Event())
    assert client.waited_s == 0.25
