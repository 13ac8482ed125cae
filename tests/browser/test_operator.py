"""Orders from the page: who may give them, what is asked first, what reaches the controller."""

import grpc

from moe_serve.rpc import placement_pb2 as pb
from tests.browser.rig import MARKS, Rig, rig

pytestmark = MARKS

TOKENS = {"read-token": "read", "admin-token": "admin"}
DIALOG = "document.querySelector('dialog[open]')"
FAULT = "document.querySelector('[data-figure=fault]')"


async def sign_in(r: Rig, token: str) -> None:
    """Type the token and confirm."""
    await r.tab.until(f"{DIALOG}?.querySelector('input[type=password]') != null")
    await r.tab.ask(f"{DIALOG}.querySelector('input').focus()")
    await r.tab.write(token)
    await r.tab.press("Enter")


def asked(r: Rig, kind: type) -> list[object]:
    """Orders of a kind that reached the controller."""
    return [request for request in r.service.asked if isinstance(request, kind)]


def applied(r: Rig) -> list[str]:
    """Plans that were really applied; a session is checked by an order that does nothing."""
    return [
        request.plan_id
        for request in r.service.asked
        if isinstance(request, pb.ApplyPlanRequest) and not request.validate_only
    ]


async def test_a_page_without_an_operator_shows_no_orders() -> None:
    async with rig(tokens=TOKENS, token="read-token") as r:
        await r.tab.until("document.querySelector('[data-figure=operator]') !== null")
        assert await r.tab.ask("document.querySelector('.operator') === null")
        assert "Pause" not in await r.text("body")
        assert "Drain" not in await r.text("body")


async def test_a_wrong_token_is_refused_and_a_right_one_gives_orders() -> None:
    async with rig(tokens=TOKENS, token="read-token") as r:
        r.expected.add("/api/v1/session")
        await r.click("[data-figure=operator]")
        await sign_in(r, "wrong")
        await r.tab.until(f"{FAULT} !== null")
        assert await r.tab.ask("document.querySelector('.operator') === null")
        # A token that may only read is not enough.
        await r.tab.ask(f"{DIALOG}.querySelector('input').value = ''")
        await sign_in(r, "read-token")
        await r.tab.until(f"{FAULT} !== null && !{DIALOG}.querySelector('.act').disabled")
        assert await r.tab.ask("document.querySelector('.operator') === null")
        await r.tab.ask(f"{DIALOG}.querySelector('input').value = ''")
        await sign_in(r, "admin-token")
        await r.tab.until("document.querySelector('.operator') !== null")
        assert await r.tab.ask(f"{DIALOG} === null")

        # The token is nowhere a script could find it.
        kept = await r.tab.ask(
            "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
            " + document.documentElement.outerHTML"
        )
        assert "admin-token" not in kept

        await r.press_button("Pause", ".operator")
        await r.tab.until(f"{DIALOG}?.innerText.includes('No plan begins')")
        assert asked(r, pb.PauseRequest) == [], "nothing is done before it is confirmed"
        await r.press_button("Cancel", "dialog")
        await r.tab.until(f"{DIALOG} === null")
        assert asked(r, pb.PauseRequest) == []
        await r.press_button("Pause", ".operator")
        await r.tab.until(f"{DIALOG} !== null")
        await r.tab.ask(f"{DIALOG}.querySelector('input').focus()")
        await r.tab.write("night shift")
        await r.press_button("Pause", "dialog")
        await r.tab.until(f"{DIALOG} === null")
        await r.tab.until("document.querySelector('.pill.is-paused') !== null")
        (paused,) = asked(r, pb.PauseRequest)
        assert paused.reason == "night shift"
        assert ("Pause", "admin-token") in r.service.callers

        await r.press_button("Resume", ".operator")
        await r.press_button("Resume", "dialog")
        await r.tab.until("document.querySelector('.pill.is-steady') !== null")

        await r.press_button("Sign out", ".operator")
        await r.tab.until("document.querySelector('.operator') === null")


async def test_a_drain_and_a_plan_reach_the_controller() -> None:
    async with rig() as r:
        await r.click("[data-figure=operator]")
        await r.tab.until(f"{DIALOG}?.innerText.includes('without tokens')")
        await r.press_button("Take control", "dialog")
        await r.press_button("Drain a rank", ".operator")
        await r.tab.until(f"{DIALOG}?.querySelector('select') != null")
        await r.tab.ask(f"{DIALOG}.querySelector('select').value = '2'")
        await r.press_button("Drain", "dialog")
        await r.tab.until("document.querySelector('[data-figure=said]').innerText !== ''")
        assert [request.rank for request in asked(r, pb.DrainRankRequest)] == [2]

        r.service.plan_room = [pb.Removed(layer=0, expert=e, rank=3) for e in (25, 26)]
        await r.press_button("Plan", ".operator")
        await r.press_button("Compute", "dialog")
        await r.tab.until("document.querySelector('.plan .notice') !== null")
        assert applied(r) == []
        assert "computed, in place of 6 replicas" in await r.text(".plan .sums")
        await r.press_button("Apply this plan", ".plan")
        await r.tab.until(f"{DIALOG} !== null")
        begin = "3 moves begin now, in place of 6 replicas; "
        assert begin in str(await r.tab.ask(f"{DIALOG}.innerText"))
        await r.press_button("Apply", "dialog")
        await r.tab.until(f"{DIALOG} === null")
        (plan_id,) = applied(r)
        assert f"plan={plan_id}" in await r.tab.ask("location.hash")


async def test_the_controllers_refusal_is_shown_in_its_own_words() -> None:
    async with rig() as r:
        r.expected.add("/api/v1/pause")
        r.service.refusals["Pause"] = (
            grpc.StatusCode.FAILED_PRECONDITION,
            "<b>a drain</b> is under way; wait for it",
        )
        await r.click("[data-figure=operator]")
        await r.press_button("Take control", "dialog")
        await r.press_button("Pause", ".operator")
        await r.press_button("Pause", "dialog")
        await r.tab.until(f"{FAULT} !== null")
        assert "<b>a drain</b> is under way" in await r.text("[data-figure=fault]")
        await r.tab.press("Escape")
        await r.tab.until(f"{DIALOG} === null")


async def test_a_session_that_has_ended_is_seen_and_begun_anew() -> None:
    async with rig(tokens=dict(TOKENS), token="read-token") as r:
        r.expected.add("/api/v1/pause")
        await r.click("[data-figure=operator]")
        await sign_in(r, "admin-token")
        await r.tab.until("document.querySelector('.operator') !== null")
        del r.service.tokens["admin-token"]
        await r.press_button("Pause", ".operator")
        await r.press_button("Pause", "dialog")
        await r.tab.until(f"{FAULT} !== null")
        await r.press_button("Cancel", "dialog")
        await r.tab.until("document.querySelector('.operator') === null")
        r.service.tokens["admin-token"] = "admin"
        await r.click("[data-figure=operator]")
        await sign_in(r, "admin-token")
        await r.tab.until("document.querySelector('.operator') !== null")


async def test_a_session_that_another_tab_began_anew_is_taken_over() -> None:
    async with rig(tokens=dict(TOKENS), token="read-token") as r:
        r.expected.add("/api/v1/pause")
        await r.click("[data-figure=operator]")
        await sign_in(r, "admin-token")
        await r.tab.until("document.querySelector('.operator') !== null")
        # The same cookie jar, another session: the token of this page's requests is of the old one.
        begun = await r.tab.ask(
            "fetch('/api/v1/session', {method: 'POST', body: '{\"token\": \"admin-token\"}',"
            " headers: {'Content-Type': 'application/json'}}).then((a) => a.status)"
        )
        assert begun == 200
        await r.press_button("Pause", ".operator")
        await r.press_button("Pause", "dialog")
        await r.tab.until(f"{FAULT} !== null")
        await r.press_button("Pause", "dialog")
        await r.tab.until(f"{DIALOG} === null")
        assert len(asked(r, pb.PauseRequest)) == 1


async def test_no_rank_to_drain_is_said_and_rank_0_left_alone() -> None:
    async with rig() as r:
        await r.click("[data-figure=operator]")
        await r.press_button("Take control", "dialog")
        r.service.drained = set(range(r.service.script.ranks))
        r.service.tell()
        await r.press_button("Undrain", ".operator")  # there once the page knows
        await r.press_button("Cancel", "dialog")
        await r.press_button("Drain a rank", ".operator")
        await r.tab.until(
            "document.querySelector('[data-figure=said]').innerText.includes('No rank is up')"
        )
        assert await r.tab.ask(f"{DIALOG} === null")
        assert asked(r, pb.DrainRankRequest) == []


async def test_an_order_that_is_on_its_way_cannot_be_cancelled() -> None:
    async with rig() as r:
        r.service.delay_s["Pause"] = 3600.0
        r.expected.add("/api/v1/pause")
        await r.click("[data-figure=operator]")
        await r.press_button("Take control", "dialog")
        await r.press_button("Pause", ".operator")
        await r.press_button("Pause", "dialog")
        await r.tab.until(f"{DIALOG}?.querySelector('.quiet').disabled === true")
        await r.tab.press("Escape")
        await r.tab.press("Escape")
        assert await r.tab.ask(f"{DIALOG} !== null")
        # What became of it is said in the dialog: the controller did not answer in time.
        await r.tab.until(f"{FAULT} !== null")
        await r.press_button("Cancel", "dialog")
        await r.tab.until(f"{DIALOG} === null")
