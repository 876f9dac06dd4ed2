"""The control plane reads and closes records, with a token of its own."""

from __future__ import annotations

import pytest

from ledger.reasons import Reason
from tests.ledger.http.rig import ROLLOUT, HttpRig

pytestmark = pytest.mark.anyio


async def test_rollouts_are_listed_with_their_calls() -> None:
    async with HttpRig().running(ROLLOUT, "g0.1") as rig:
        await rig.post()
        status, body = await rig.control("GET", "")
        assert status == 200
        assert body["rollouts"] == [
            {"rollout_id": ROLLOUT, "group_id": "g0", "state": "open", "version": 3, "calls": {"committed": 1}},
            {"rollout_id": "g0.1", "group_id": "g0", "state": "open", "version": 1, "calls": {}},
        ]


async def test_a_manifest_shows_every_call_and_the_receipt_so_far() -> None:
    async with HttpRig().running() as rig:
        await rig.post()
        status, body = await rig.control("GET", f"/{ROLLOUT}/manifest")
        assert (status, body["state"], body["version"]) == (200, "open", 3)
        (call,) = body["calls"]
        assert (call["call_id"], call["state"], call["finish_reason"]) == (f"{ROLLOUT}/0", "committed", "stop")
        assert call["coords"]["staging_key"] in rig.worker.rows
        assert body["receipt"]["rejections"][0]["reason"] == "not_sealed"
        assert body["head"] == rig.ledger.manifest(ROLLOUT).head


async def test_a_terminal_is_declared_by_call_id_or_by_response_id() -> None:
    async with HttpRig().running() as rig:
        _, answer = await rig.post()
        for name in (answer["id"], f"{ROLLOUT}/0"):
            status, body = await rig.control("POST", f"/{ROLLOUT}/declare", {"call_id": name})
            assert (status, body["declared"]) == (200, f"{ROLLOUT}/0")
        assert (await rig.ledger.seal(ROLLOUT)).selection == "declared"
        assert (await rig.control("POST", f"/{ROLLOUT}/declare", {"call_id": "x"}))[0] == 409
        status, body = await rig.control("POST", f"/{ROLLOUT}/declare", {"call": "x"})
        assert (status, body["error"]["param"]) == (400, "call")


async def test_sealing_ends_the_record_and_the_controller_gets_the_same_receipt() -> None:
    async with HttpRig().running() as rig:
        await rig.post()
        status, receipt = await rig.control("POST", f"/{ROLLOUT}/seal")
        assert (status, receipt["rejections"]) == (200, [])
        assert (await rig.post())[0] == 409
        assert (await rig.control("POST", f"/{ROLLOUT}/seal"))[0] == 409
        again = await rig.ledger.seal_once(ROLLOUT)
        assert (again.head, again.verdict) == (receipt["head"], "trainable")
        failed = await rig.ledger.seal_once(ROLLOUT, Reason.ROLLOUT_TIMEOUT)
        assert failed.reason is Reason.ROLLOUT_TIMEOUT


async def test_only_the_control_token_opens_it() -> None:
    async with HttpRig().running() as rig:
        for path, method in (("", "GET"), (f"/{ROLLOUT}/manifest", "GET"), (f"/{ROLLOUT}/seal", "POST")):
            assert (await rig.control(method, path, token=None))[0] == 401
            assert (await rig.control(method, path, token=rig.server.api_key(ROLLOUT)))[0] == 403
        assert (await rig.post())[0] == 200


async def test_what_is_not_there_is_said_so() -> None:
    async with HttpRig().running() as rig:
        assert (await rig.control("GET", "/g9.9/manifest"))[0] == 404
        assert (await rig.control("GET", "/a%20b/manifest"))[0] == 400
        assert (await rig.control("GET", f"/{ROLLOUT}/tokens"))[0] == 404
        assert (await rig.control("POST", f"/{ROLLOUT}/manifest"))[0] == 405
