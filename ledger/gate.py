"""The gate: every model call of a rollout passes here. No answer leaves before its tokens are staged and the ledger says so.

Whatever happens to a call, error, timeout or cancellation at any point, it ends committed or failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
from msgspec.structs import replace

from ledger.errors import CallFailedError, CallRefused, TooManyCalls
from ledger.ledger import Ledger
from ledger.lineage import Fingerprint, fingerprint, fingerprint_prompt
from ledger.links import check_link, link_of
from ledger.reasons import CallFailure
from ledger.records import CallReply, CallRequest, Message, Sampling

_INLINE_MESSAGES = 1000
"""Fingerprinting more of them takes milliseconds and is done in a thread."""


class Gate:
    """`generate` answers a call after staging its tokens; it raises CallRefused for a request that it did not sample.

    `call_timeout_s` is its deadline. A call without a seed of its own gets one derived from `seed` and the call's id;
    with `seed` None it is sampled without.
    """

    def __init__(
        self,
        ledger: Ledger,
        generate: Callable[[CallRequest], Awaitable[CallReply]],
        *,
        max_calls_per_rollout: int,
        call_timeout_s: float,
        seed: int | None = 0,
    ) -> None:
        self._ledger = ledger
        self._generate = generate
        self._max_calls = max_calls_per_rollout
        self._call_timeout_s = call_timeout_s
        self._seed = seed

    async def chat(
        self,
        rollout_id: str,
        messages: Sequence[Message],
        *,
        sampling: Sampling,
        tools: Sequence[Mapping[str, Any]] = (),
        parse_tool_calls: bool = True,
        logprobs: bool = False,
    ) -> CallReply:
        """The model's next message. Raises UnknownRollout, RolloutClosed, TooManyCalls, CallRefused or CallFailedError; any
        other error is the ledger's own, after which the run has to end.

        A cancellation leaves the call failed, or committed when it came after the tokens were put on record.
        """
        request = CallRequest(
            rollout_id=rollout_id,
            call_id="",
            messages=tuple(messages),
            sampling=sampling,
            tools=tuple(dict(tool) for tool in tools),
            parse_tool_calls=parse_tool_calls,
            logprobs=logprobs,
        )
        if len(messages) > _INLINE_MESSAGES:
            return await self._call(request, await anyio.to_thread.run_sync(fingerprint, messages, tools))
        return await self._call(request, fingerprint(messages, tools))

    async def complete(
        self, rollout_id: str, prompt: str | Sequence[int], *, sampling: Sampling, logprobs: bool = False
    ) -> CallReply:
        """What the model adds to a text, or to token ids, without a chat template. A root; the rest is as in `chat`."""
        request = CallRequest(
            rollout_id=rollout_id,
            call_id="",
            messages=(),
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            sampling=sampling,
            logprobs=logprobs,
        )
        return await self._call(request, fingerprint_prompt(prompt))

    async def _call(self, request: CallRequest, place: Fingerprint) -> CallReply:
        rollout_id = request.rollout_id
        if self._ledger.call_count(rollout_id) >= self._max_calls:
            raise TooManyCalls(rollout_id, self._max_calls)
        admission = await self._ledger.admit(rollout_id, place)
        call_id = admission.call_id
        sampling = request.sampling
        if sampling.seed is None and self._seed is not None:
            sampling = replace(sampling, seed=_derived(self._seed, call_id))
        try:
            reply = await self._answer(replace(request, call_id=call_id, parent=admission.parent, sampling=sampling))
        except CallFailedError as e:
            await self._ledger.settle(call_id, e.reason, e.detail)
            raise
        except CallRefused as e:
            await self._ledger.settle(call_id, CallFailure.REFUSED, str(e))
            raise
        except anyio.get_cancelled_exc_class():
            await self._ledger.settle(call_id, CallFailure.CANCELLED, "the caller stopped waiting")
            raise
        await self._ledger.commit(reply)
        return reply

    async def _answer(self, request: CallRequest) -> CallReply:
        """A checked reply, or CallFailedError or CallRefused."""
        try:
            with anyio.move_on_after(self._call_timeout_s) as deadline:
                reply = await self._generate(request)
                problem = _contradiction(request, reply)
                if problem is not None:
                    raise CallFailedError(request.call_id, CallFailure.INVALID_COORDS, problem)
                return reply
        except (CallFailedError, CallRefused):
            raise
        except Exception as e:
            raise CallFailedError(request.call_id, CallFailure.GENERATION_FAILED, f"{type(e).__name__}: {e}") from e
        assert deadline.cancelled_caught
        raise CallFailedError(request.call_id, CallFailure.TIMEOUT, f"no answer within {self._call_timeout_s:g} s")


def _derived(seed: int, call_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{call_id}".encode()).digest()[:8], "big") >> 1


def _contradiction(request: CallRequest, reply: CallReply) -> str | None:
    """What makes the reply impossible, if anything does. Whether the tokens are what it says is for `verify`."""
    coords, parent = reply.coords, request.parent
    if coords.call_id != request.call_id:
        return f"the coordinates are those of call {coords.call_id!r}"
    if coords.parent_call_id != (None if parent is None else parent.call_id):
        return f"it continues {coords.parent_call_id!r}, not {None if parent is None else parent.call_id!r}"
    if reply.message.role != "assistant":
        return f"the answer's role is {reply.message.role!r}"
    link = link_of(coords, reply.finish_reason)
    rejection = check_link(link, rollout_id=request.rollout_id, prev_len=0 if parent is None else parent.cum_len)
    if rejection is not None:
        return f"{rejection.reason}: {rejection.detail}"
    if request.logprobs and (reply.logprobs is None or len(reply.logprobs) != link.generated):
        return f"it does not hold the logprobs of its {link.generated} tokens"
    if (reply.prompt_tokens, reply.completion_tokens) != (link.prev_len + link.carry_len, link.generated):
        return (
            f"it counts {reply.prompt_tokens} + {reply.completion_tokens} tokens, "
            f"its coordinates {link.prev_len + link.carry_len} + {link.generated}"
        )
    return None
