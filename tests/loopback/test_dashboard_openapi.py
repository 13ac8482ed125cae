"""Every documented endpoint against its own description: schemathesis asks a running page.

In a process of its own, the same requests each time: boundary values of every parameter and body
first, then made-up ones, right and wrong. Status, content type, headers and shape of each answer
must be as the served document says; wrong requests must be refused, right ones taken; nothing may
end in a 5xx.
"""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.page import Rig, rig

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

EXAMPLES = 6
"""Made-up requests an endpoint and kind, beside those of the boundary values."""


async def check(r: Rig, folder: Path, config: str, *more: str) -> str:
    """What schemathesis prints; fails where it found something."""
    file = folder / "schemathesis.toml"
    file.write_text(config)
    program = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("schemathesis"),
        "--config-file",
        file,
        "run",
        f"{r.url}api/v1/openapi.json",
        "--phases=coverage,fuzzing",
        f"--max-examples={EXAMPLES}",
        "--generation-deterministic",
        "--warnings=off",
        "--no-shrink",
        *more,
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await program.communicate()
    text = out.decode()
    assert program.returncode == 0, text
    return text


async def busy(r: Rig) -> str:
    """The page with something in each of its documents; config of an operator's session."""
    for window in (1, 2, 3):
        r.service.close_window()
        await r.until("api/v1/frame", lambda f, wanted=window: f["window"] == wanted)
    moves = r.service.begin_plan()
    r.service.tell()
    await r.until("api/v1/frame?before_plan=1", lambda f: f["before_plan"])
    await r.until("api/v1/moves", lambda m: len(m["moves"]) == len(moves))
    jar = aiohttp.DummyCookieJar()
    async with (
        aiohttp.ClientSession(cookie_jar=jar) as client,
        client.post(r.url + "api/v1/session", json={}) as answer,
    ):
        value = answer.headers["Set-Cookie"].partition(";")[0].partition("=")[2]
        csrf = (await answer.json())["csrf"]
    return f'[auth.openapi.session]\napi_key = "{value}"\n[parameters]\n"X-CSRF-Token" = "{csrf}"\n'


async def test_every_endpoint_answers_as_its_description_says(tmp_path: Path) -> None:
    async with rig() as r:
        config = await busy(r)
        # The stream has no end to check. Logins are apart: each new session may end this one.
        text = await check(
            r,
            tmp_path,
            config,
            "--exclude-path=/api/v1/stream",
            "--exclude-path=/api/v1/session",
        )
        assert "16 selected" in text, text
        assert {type(one).__name__ for one in r.service.asked} >= {
            "PauseRequest",
            "ResumeRequest",
            "ComputePlanRequest",
            "DrainRankRequest",
            "UndrainRankRequest",
        }, "commands got through, so their answers were looked at"


async def test_sessions_answer_as_their_description_says(tmp_path: Path) -> None:
    async with rig() as r:
        await check(r, tmp_path, await busy(r), "--include-path=/api/v1/session")
