"""The control plane: what the run's owner may read and do, with the token of control.json.

GET  /control/rollouts                  the open and sealed rollouts
GET  /control/rollouts/<id>/manifest    one rollout's record and receipt
POST /control/rollouts/<id>/seal        close the record: later calls get 409; answers with the receipt
POST /control/rollouts/<id>/declare     name the terminal call: {"call_id": "<call id, or a response's id>"}
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ledger.http.bodies import decode
from ledger.ids import call_of
from ledger.ledger import Ledger


class Declaration(Struct, frozen=True, forbid_unknown_fields=True):
    call_id: Annotated[str, Meta(min_length=1, max_length=512)]


class Control:
    """Each method gives the JSON body of its answer, and raises LedgerError or ApiError."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def rollouts(self) -> bytes:
        return msgspec.json.encode({"rollouts": self._ledger.entries()})

    def manifest(self, rollout_id: str) -> bytes:
        return msgspec.json.encode(self._ledger.manifest(rollout_id))

    async def seal(self, rollout_id: str) -> bytes:
        return msgspec.json.encode(await self._ledger.seal(rollout_id))

    async def declare(self, rollout_id: str, body: bytes) -> bytes:
        call_id = call_of(decode(Declaration, body).call_id)
        await self._ledger.declare_terminal(rollout_id, call_id)
        return msgspec.json.encode({"rollout_id": rollout_id, "declared": call_id})
