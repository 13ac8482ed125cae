"""Lines of our modules' own loggers, as a part's process writes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest

from moe_serve.telemetry import make_logger
from moe_serve.telemetry.library_logs import LIBRARY, JsonLines, write_as_json
from moe_serve.telemetry.logs import FIRST_FIELDS, Level


@pytest.fixture
def stream() -> Iterator[StringIO]:
    """Where the lines go; afterwards the library's logger is as it was."""
    library = logging.getLogger(LIBRARY)
    before = list(library.handlers), library.level, library.propagate
    yield StringIO()
    library.handlers, library.level, library.propagate = before


def lines(stream: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_shards_line_has_the_keys_of_a_routers(stream: StringIO) -> None:
    write_as_json(sink=stream, part="shard-3", node="n1", incarnation=2)
    log = logging.getLogger("moe_serve.shard.batch_run")
    try:
        raise RuntimeError("the device said no")
    except RuntimeError:
        log.exception(
            "rank %d: a batch failed, of requests %s",
            3,
            ["order-1"],
            extra={"request_id": "order-1", "request_ids": ["order-1"]},
        )
    make_logger(stream, part="router-0", node="n1").bind(term=3, epoch=4).warning(
        "request failed", layer=1, request_id="order-1"
    )
    shard, router = lines(stream)
    assert list(shard)[:6] == ["ts", "level", "event", "part", "node", "request_id"]
    assert tuple(router)[:8] == FIRST_FIELDS
    assert shard["request_id"] == router["request_id"] == "order-1"
    assert (shard["part"], shard["level"], shard["incarnation"]) == ("shard-3", "error", 2)
    assert shard["event"] == "rank 3: a batch failed, of requests ['order-1']"
    assert shard["error"] == "RuntimeError: the device said no"
    assert "Traceback" not in stream.getvalue()


def test_the_newest_fields_hold_and_a_line_is_written_once(stream: StringIO) -> None:
    write_as_json(sink=stream, part="shard-3", incarnation=1)
    write_as_json(sink=stream, part="shard-3", incarnation=2)
    logging.getLogger("moe_serve.shard.watch").warning("a batch hangs")
    (line,) = lines(stream)
    assert line["incarnation"] == 2
    assert line["logger"] == "moe_serve.shard.watch"


def test_lines_below_the_level_and_of_others_are_not_ours(stream: StringIO) -> None:
    write_as_json(sink=stream, level=Level.WARNING, part="p")
    logging.getLogger("moe_serve.client.aio").info("no")
    logging.getLogger("ray").warning("nor this")
    assert lines(stream) == []


def test_what_is_secret_or_large_is_scrubbed_here_too(stream: StringIO) -> None:
    write_as_json(sink=stream, part="p")
    logging.getLogger("moe_serve.rpc.auth").warning(
        "refused: Bearer abcdefgh", extra={"token": "abcdefgh", "rows": b"xx"}
    )
    (line,) = lines(stream)
    assert "abcdefgh" not in stream.getvalue()
    assert line["rows"] == "<2 bytes>"


def test_a_line_that_cannot_be_written_ends_nobody(
    stream: StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        def write(self, _text: str) -> int:
            raise OSError("no space")

        def flush(self) -> None:
            return

    handler = JsonLines(Full(), part="p")
    handler.handle(logging.makeLogRecord({"msg": "gone", "levelno": logging.CRITICAL}))
    assert "no space" in capsys.readouterr().err
