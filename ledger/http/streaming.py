"""A streamed answer. Nothing of it leaves before the call is committed; until then comments keep the connection alive.

The status is sent with the first comment. So a call that fails before has the status that it would have without streaming;
one that fails later ends the stream with an error, which OpenAI's clients raise.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
from aiohttp import web

from ledger.http import answers
from ledger.http.agents import Prepared
from ledger.http.answers import Answer
from ledger.http.errors import ApiError

_WRITE_S = 5.0
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def stream(request: web.BaseRequest, prepared: Prepared, *, keep_alive_s: float) -> web.StreamResponse:
    """Make the call and send its answer. Raises ApiError for a failure that comes before the first comment, and
    ConnectionError when the client is gone."""
    events = _Events(request)
    outcome: Answer | ApiError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(events.keep_alive, keep_alive_s, tasks.cancel_scope)
        outcome = await prepared.answer()
        tasks.cancel_scope.cancel()
    if outcome is None:
        raise ConnectionResetError("the client is gone")
    if isinstance(outcome, Answer):
        answer = outcome

        def encode() -> bytes:
            return b"".join(answer.events(usage=prepared.usage))

        await events.send(await anyio.to_thread.run_sync(encode) if answer.large else encode())
    elif events.begun:
        await events.send(answers.error_event(outcome.body()))
    else:
        raise outcome
    await events.response.write_eof()
    return events.response


class _Events:
    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)
        self.begun = False

    async def send(self, data: bytes) -> None:
        if not self.begun:
            self.begun = True
            await self.response.prepare(self._request)
        await self.response.write(data)

    async def keep_alive(self, every_s: float, call: anyio.CancelScope) -> None:
        """Send comments until cancelled; end the call when nobody is there to read them."""
        try:
            while True:
                await anyio.sleep(every_s)
                # Not to be cut off between status and comment.
                with anyio.move_on_after(_WRITE_S, shield=True):
                    await self.send(answers.KEEP_ALIVE)
        except ConnectionError:
            call.cancel()
