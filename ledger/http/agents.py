"""The OpenAI endpoints of a rollout: from a request's body to a committed call's answer, or to what the agent did wrong."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio.lowlevel

from ledger.errors import LedgerError
from ledger.gate import Gate
from ledger.http import answers
from ledger.http.answers import Answer
from ledger.http.bodies import ChatBody, CompletionBody, decode
from ledger.http.errors import ApiError, is_fatal, of_ledger, refused
from ledger.http.replays import Replays
from ledger.http.sampling import SamplingRules
from ledger.records import CallReply

CHAT = "chat/completions"
COMPLETIONS = "completions"
MODELS = "models"

_LARGE = 1000
"""Messages that take a millisecond to go through."""
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True)
class Prepared:
    """A call that is acceptable and not made yet. `answer` makes it; it raises nothing but a cancellation."""

    answer: Callable[[], Awaitable[Answer | ApiError]]
    stream: bool
    usage: bool
    """Whether a streamed answer is to end with the usage."""


class Agents:
    """`model` is the name that answers carry. At most `max_open_rollouts` rollouts may have calls running.

    `fail` hears of an error after which the run has to end.
    """

    def __init__(
        self,
        gate: Gate,
        rules: SamplingRules,
        replays: Replays,
        *,
        model: str,
        max_open_rollouts: int,
        fail: Callable[[Exception], None],
    ) -> None:
        self._gate = gate
        self._rules = rules
        self._replays = replays
        self._model = model
        self._max_open_rollouts = max_open_rollouts
        self._fail = fail
        self._running: Counter[str] = Counter()
        self._started = int(time.time())

    def models(self) -> bytes:
        return answers.models(self._model, self._started)

    def prepare(self, rollout_id: str, endpoint: str, data: bytes, idempotency_key: str | None) -> Prepared:
        """Raises ApiError for a body or a key that is not acceptable."""
        body = decode(ChatBody if endpoint == CHAT else CompletionBody, data)
        body.check()
        call = self._chat(rollout_id, body) if isinstance(body, ChatBody) else self._complete(rollout_id, body)
        chat = isinstance(body, ChatBody)

        async def make() -> Answer | ApiError:
            return await self._make(rollout_id, call, chat)

        answer = make
        if idempotency_key is not None:
            if _IDEMPOTENCY_KEY.fullmatch(idempotency_key) is None:
                raise refused("the Idempotency-Key header must be 1 to 255 visible ASCII characters")
            fingerprint = hashlib.blake2b(data, digest_size=16, key=endpoint.encode()).digest()

            async def replay() -> Answer | ApiError:
                return await self._replays.run(rollout_id, idempotency_key, fingerprint, make)

            answer = replay
        return Prepared(answer, stream=bool(body.stream), usage=body.wants_usage)

    def _chat(self, rollout_id: str, body: ChatBody) -> Callable[[], Awaitable[CallReply]]:
        sampling = self._rules.of(rollout_id, body)

        async def call() -> CallReply:
            large = len(body.messages) > _LARGE
            if large:
                await anyio.lowlevel.checkpoint()  # The loop has its turn after each millisecond or so of work.
            messages = tuple(message.plain() for message in body.messages)
            if large:
                await anyio.lowlevel.checkpoint()
            return await self._gate.chat(
                rollout_id,
                messages,
                sampling=sampling,
                tools=body.tools or (),
                # The tools stay in the prompt, so that the conversation's exact tokens go on.
                parse_tool_calls=body.tool_choice != "none",
                logprobs=bool(body.logprobs),
            )

        return call

    def _complete(self, rollout_id: str, body: CompletionBody) -> Callable[[], Awaitable[CallReply]]:
        sampling = self._rules.of(rollout_id, body)
        prompt = body.text_or_ids

        def call() -> Awaitable[CallReply]:
            return self._gate.complete(rollout_id, prompt, sampling=sampling, logprobs=body.logprobs is not None)

        return call

    async def _make(self, rollout_id: str, call: Callable[[], Awaitable[CallReply]], chat: bool) -> Answer | ApiError:
        running = self._running
        if rollout_id not in running and len(running) >= self._max_open_rollouts:
            text = f"{len(running)} rollouts have calls running, the most that gate.max_open_rollouts allows; try again"
            return ApiError(429, "too_many_rollouts", text, retry=True)
        running[rollout_id] += 1
        try:
            reply = await call()
        except Exception as error:
            if is_fatal(error):
                self._fail(error)
            return of_ledger(error if isinstance(error, LedgerError) else LedgerError(f"{error!r}"))
        finally:
            running[rollout_id] -= 1
            if not running[rollout_id]:
                del running[rollout_id]
        return Answer(reply, model=self._model, created=int(time.time()), chat=chat)
