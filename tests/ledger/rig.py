"""A ledger, a gate and a worker put together, with one open rollout."""

from __future__ import annotations

from ledger.events import EventLog, MemoryLog, RolloutEvent
from ledger.gate import Gate
from ledger.ledger import Ledger
from ledger.reasons import Rejection
from ledger.receipts import Receipt
from ledger.records import CallReply, Message
from ledger.verify import VerifiedRow, verify
from tests.ledger.worker import SAMPLING, Worker, user

ROLLOUT = "g0.0"


class Rig:
    def __init__(
        self,
        log: EventLog | None = None,
        *,
        ledger: Ledger | None = None,
        worker: Worker | None = None,
        max_calls: int = 50,
        call_timeout_s: float = 20.0,
        settle_timeout_s: float = 5.0,
    ) -> None:
        self.log = log or MemoryLog()
        self.worker = worker or Worker()
        self.ledger = ledger or Ledger(self.log, settle_timeout_s=settle_timeout_s)
        self.gate = Gate(
            self.ledger,
            lambda request: self.worker.generate(request),
            max_calls_per_rollout=max_calls,
            call_timeout_s=call_timeout_s,
        )

    async def start(self, *rollout_ids: str, group_id: str = "g0") -> None:
        await self.ledger.dispatched(group_id, "prompt", rollout_ids or (ROLLOUT,), 0)
        for rollout_id in rollout_ids or (ROLLOUT,):
            await self.ledger.open(rollout_id, group_id)

    async def chat(self, *messages: Message, rollout_id: str = ROLLOUT, tools=()) -> CallReply:
        return await self.gate.chat(rollout_id, messages, sampling=SAMPLING, tools=tools)

    async def turns(self, *texts: str, rollout_id: str = ROLLOUT) -> list[CallReply]:
        """A linear conversation: user says a text, the model answers, and so on."""
        conversation: tuple[Message, ...] = ()
        replies: list[CallReply] = []
        for text in texts:
            conversation = (*conversation, user(text))
            replies.append(await self.chat(*conversation, rollout_id=rollout_id))
            conversation = (*conversation, replies[-1].message)
        return replies

    async def sealed(self, rollout_id: str = ROLLOUT) -> Receipt:
        return await self.ledger.seal(rollout_id)

    async def result(self, rollout_id: str = ROLLOUT) -> VerifiedRow | Rejection:
        return verify(await self.sealed(rollout_id), self.worker.rows)

    def events(self, rollout_id: str = ROLLOUT) -> list[RolloutEvent]:
        assert isinstance(self.log, MemoryLog)
        return [e for e in self.log.events if isinstance(e, RolloutEvent) and e.rollout_id == rollout_id]


async def started(**options) -> Rig:
    rig = Rig(**options)
    await rig.start()
    return rig
