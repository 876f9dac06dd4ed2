"""Capture: what was sampled is what is staged, proven, and what the next turn starts from."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

from dataplane.memory import MemoryPlane
from dataplane.schema import STAGING, STAGING_COLUMNS
from ledger.links import link_of
from ledger.records import CallReply, CallRequest, Message, ParentCoords, Sampling, WeightSpan
from ledger.verify import RowPlan, VerifiedRow, materialize
from tests.models import END, TEMPLATE, tiny_lm, tiny_model, tiny_tokenizer
from tests.workers.generation.helpers import freeze_after, frozen, load, reference_logprobs
from tests.workers.generation.test_text_bound import byte_level
from workers.generation.api import EngineSpec
from workers.generation.capture import Capture
from workers.generation.rendering import ChatRenderer
from workers.generation.torch_engine import TorchEngine
from workers.rpc.errors import HandlerError
from workers.weights import save_weights

pytestmark = pytest.mark.anyio


@dataclass
class Rig:
    """A capture on a real engine and a memory plane, and the conversation so far."""

    engine: TorchEngine
    renderer: ChatRenderer
    plane: MemoryPlane
    capture: Capture

    def request(
        self, *messages: Message, call: int = 0, parent: ParentCoords | None = None, **sampling: Any
    ) -> CallRequest:
        settings = Sampling(**({"max_tokens": 12, "seed": call} | sampling))
        return CallRequest(rollout_id="r-1", call_id=f"r-1/{call}", messages=messages, sampling=settings, parent=parent)

    async def row(self, reply: CallReply) -> SimpleNamespace:
        (row,) = await self.plane.get(STAGING, [reply.coords.staging_key], STAGING_COLUMNS)
        return SimpleNamespace(**row)

    async def verified(self, chain: Sequence[CallReply]) -> VerifiedRow:
        """The conversation, through the ledger's own verification."""
        links = tuple(link_of(reply.coords, reply.finish_reason) for reply in chain)
        rows = {reply.coords.staging_key: await self.row(reply) for reply in chain}
        result = materialize(RowPlan(rollout_id="r-1", links=links), rows)
        assert isinstance(result, VerifiedRow), result
        return result


@asynccontextmanager
async def rigged(path: Path, *, stop: bool = True, **spec: Any) -> AsyncIterator[Rig]:
    renderer = ChatRenderer.load(path)
    engine = await TorchEngine.start(path, EngineSpec(**spec), stop_token_ids=renderer.stop_token_ids if stop else ())
    plane = MemoryPlane()
    try:
        with anyio.fail_after(60):
            yield Rig(engine, renderer, plane, Capture(engine, renderer, plane))
    finally:
        await engine.aclose()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Logits near uniform: the special tokens are sampled as often as any, and text seldom gives them back.
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", seed=1, initializer_range=0.02)


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[Rig]:
    async with rigged(model_dir) as rig:
        yield rig


def user(text: str) -> Message:
    return Message(role="user", content=text)


def parent_of(chain: Sequence[CallReply], messages: int) -> ParentCoords:
    last = chain[-1].coords
    return ParentCoords(
        call_id=last.call_id,
        staging_keys=tuple(reply.coords.staging_key for reply in chain),
        cum_len=last.cum_len,
        chain_hash=last.chain_hash,
        cumulative_hash=last.cumulative_hash,
        messages=messages,
    )


async def failure(capture: Capture, request: CallRequest) -> tuple[str, str, bool]:
    with pytest.raises(HandlerError) as error:
        await capture.answer(request)
    failed = error.value.failure
    return failed.kind, failed.failure_class, failed.retryable


async def test_a_call_stages_what_the_engine_sampled(rig: Rig, model_dir: Path) -> None:
    request = rig.request(user("hi"), temperature=0.7, top_k=60)
    prompt = await rig.renderer.render_root(request.messages)
    sampled = await rig.engine.generate("reference", prompt, request.sampling)

    reply = await rig.capture.answer(request)
    row, n = await rig.row(reply), len(sampled.token_ids)
    assert row.token_ids.tolist() == [*prompt, *sampled.token_ids]
    assert row.token_mask.tolist() == [0] * len(prompt) + [1] * n
    assert row.weight_versions.tolist() == [0] * (len(prompt) + n)
    assert row.logprobs[: len(prompt)].tolist() == [0.0] * len(prompt)
    np.testing.assert_allclose(row.logprobs[len(prompt) :], sampled.logprobs, atol=1e-5)
    expected = reference_logprobs(load(model_dir), prompt, sampled.token_ids, request.sampling)
    np.testing.assert_allclose(row.logprobs[len(prompt) :], expected, atol=1e-4)

    assert (reply.prompt_tokens, reply.completion_tokens, reply.finish_reason) == (
        len(prompt),
        n,
        sampled.finish_reason,
    )
    assert (reply.coords.prev_len, reply.coords.carry_len, reply.coords.delta_len) == (0, len(prompt), len(prompt) + n)
    assert reply.coords.weight_spans == sampled.weight_spans
    assert reply.message == await rig.renderer.parse(prompt, sampled.token_ids)
    assert (await rig.verified([reply])).loss_tokens == n


async def test_a_second_attempt_of_a_call_whose_answer_was_lost_stages_the_same_tokens_under_the_same_key(
    rig: Rig,
) -> None:
    lost = await rig.capture.answer(rig.request(user("hi")))
    again = msgspec.structs.replace(rig.request(user("hi")), attempt=1)
    reply = await Capture(rig.engine, rig.renderer, rig.plane).answer(again)
    assert reply.coords == lost.coords
    assert await rig.plane.keys(STAGING) == [reply.coords.staging_key]
    await rig.verified([reply])


async def test_a_lost_attempt_that_still_runs_in_the_engine_does_not_stand_in_the_way_of_the_next(rig: Rig) -> None:
    request = rig.request(user("hi"), max_tokens=200)
    async with anyio.create_task_group() as tg:
        tg.start_soon(rig.capture.answer, request)
        await anyio.wait_all_tasks_blocked()
        reply = await rig.capture.answer(msgspec.structs.replace(request, attempt=1, sampling=Sampling(max_tokens=3)))
        tg.cancel_scope.cancel()
    assert reply.completion_tokens <= 3


async def test_later_turns_keep_the_exact_tokens_with_and_without_a_cache(rig: Rig) -> None:
    """Every worker continues alike: one that holds the prefix, and one that has to read it from the data plane."""
    messages, chain, odd = [user("hi")], list[CallReply](), 0
    for turn in range(6):
        parent = parent_of(chain, len(messages) - 1) if chain else None
        request = rig.request(*messages, call=turn, parent=parent, max_tokens=random.Random(turn).randint(1, 9))
        reply = await rig.capture.answer(request)
        elsewhere = Capture(rig.engine, rig.renderer, MemoryPlaneView(rig.plane))
        assert (await elsewhere.answer(request)).coords == reply.coords
        chain.append(reply)
        row = await rig.row(reply)
        sampled = row.token_ids[reply.coords.carry_len :].tolist()
        again = tiny_tokenizer()(reply.message.content or "", add_special_tokens=False)["input_ids"]
        odd += sampled not in (again, [*again, END])
        if chain[1:]:
            closing = chain[-2].finish_reason == "length"
            carry = row.token_ids[: reply.coords.carry_len].tolist()
            text = f"{'<|end|>' * closing}<|user|>turn {turn}<|end|><|assistant|>"
            assert carry == tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
        messages += [reply.message, user(f"turn {turn + 1}")]

    assert odd >= 2, "some turns were not what their text re-tokenizes to"
    assert {reply.finish_reason for reply in chain} >= {"length"}
    row = await rig.verified(chain)
    assert row.length == chain[-1].coords.cum_len
    deltas = [(await rig.row(reply)).token_ids for reply in chain]
    assert row.input_ids.tolist() == np.concatenate(deltas).tolist()


class MemoryPlaneView(MemoryPlane):
    """Reads another plane's rows and writes its own."""

    def __init__(self, plane: MemoryPlane) -> None:
        super().__init__()
        self._rows = plane

    async def get(self, *args: Any, **kwargs: Any) -> Any:
        return await self._rows.get(*args, **kwargs)


async def test_a_weight_change_in_mid_call_is_in_the_row(model_dir: Path, tmp_path: Path) -> None:
    save_weights(tiny_lm(seed=2), tmp_path / "w")
    replies: list[CallReply] = []

    async with rigged(model_dir, stop=False) as rig:

        async def call() -> None:
            replies.append(await rig.capture.answer(rig.request(user("hi"), max_tokens=20)))

        async with anyio.create_task_group() as group:
            freeze_after(rig.engine, 5)
            group.start_soon(call)
            await frozen(rig.engine)
            await rig.engine.load_weights(tmp_path / "w", 3)
            await rig.engine.resume()
        (reply,) = replies
        carry = reply.coords.carry_len
        assert reply.coords.weight_spans == (WeightSpan(0, 0, 5), WeightSpan(3, 5, 20))
        versions = (await rig.row(reply)).weight_versions.tolist()
        assert versions == [0] * (carry + 5) + [3] * 15
        assert (await rig.verified([reply])).oldest_version == 0


async def test_a_parent_whose_tokens_are_gone_or_others_is_refused(rig: Rig) -> None:
    reply = await rig.capture.answer(rig.request(user("hi")))
    messages = (user("hi"), reply.message, user("more"))
    parent = parent_of([reply], 2)
    fresh = Capture(rig.engine, rig.renderer, rig.plane)
    key = reply.coords.staging_key
    for capture, wrong in [
        (rig.capture, {"cum_len": parent.cum_len + 1}),
        (rig.capture, {"cumulative_hash": "0" * 64}),
        (rig.capture, {"chain_hash": "0" * 64}),
        (fresh, {"cumulative_hash": "0" * 64}),
        (fresh, {"staging_keys": (key, key)}),
    ]:
        lying = msgspec.structs.replace(parent, **wrong)
        got = await failure(capture, rig.request(*messages, call=1, parent=lying))
        assert got == ("prefix_mismatch", "capture", False)
    for n, capture in ((2, rig.capture), (3, fresh)):
        assert (await capture.answer(rig.request(*messages, call=n, parent=parent))).coords.prev_len == parent.cum_len

    await rig.plane.clear(STAGING, [key])
    fresh = Capture(rig.engine, rig.renderer, rig.plane)
    assert await failure(fresh, rig.request(*messages, call=1, parent=parent)) == ("prefix_lost", "capture", False)
    await rig.plane.aclose()
    got = await failure(fresh, rig.request(*messages, call=1, parent=parent))
    assert got == ("prefix_unavailable", "infra", True)


async def test_a_conversation_that_cannot_be_continued_exactly_is_a_capture_failure(tmp_path: Path) -> None:
    endless = tiny_tokenizer(TEMPLATE.replace("'<|end|>'", "''"))
    async with rigged(tiny_model(tmp_path, tokenizer=endless)) as rig:
        reply = await rig.capture.answer(rig.request(user("hi")))
        request = rig.request(user("hi"), reply.message, user("more"), call=1, parent=parent_of([reply], 2))
        assert await failure(rig.capture, request) == ("render_mismatch", "capture", False)


async def test_a_request_that_makes_no_sense_is_a_data_failure(rig: Rig) -> None:
    reply = await rig.capture.answer(rig.request(user("hi")))
    no_answer = rig.request(user("hi"), user("more"), call=1, parent=parent_of([reply], 2))
    for request in (no_answer, rig.request(user("hi"), temperature=-1)):
        assert await failure(rig.capture, request) == ("bad_request", "data", False)


async def test_a_prompt_must_leave_room_for_a_token(model_dir: Path) -> None:
    async with rigged(model_dir, max_model_len=40) as rig:
        fits, too_long = "x" * 36, "x" * 37  # with the template's three tokens
        reply = await rig.capture.answer(rig.request(user(fits), max_tokens=500))
        assert (reply.prompt_tokens, reply.completion_tokens) == (39, 1)
        request = rig.request(user(too_long))
        assert await failure(rig.capture, request) == ("prompt_too_long", "data", False)
        with pytest.raises(HandlerError, match=r"40 tokens.* at most 40 fit.*max_model_len"):
            await rig.capture.answer(request)
        reply = await rig.capture.answer(rig.request(user("x"), max_tokens=500, call=1, stop_token_ids=()))
        assert reply.prompt_tokens + reply.completion_tokens <= 40


async def test_a_prompt_far_too_long_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    async with rigged(tiny_model(tmp_path, tokenizer=byte_level()), max_model_len=40) as rig:
        rig.renderer.bound.context = rig.engine.max_model_len
        long = "a" * 2_000_000
        for request in (rig.request(user(long)), msgspec.structs.replace(rig.request(), prompt=long)):
            assert await failure(rig.capture, request) == ("prompt_too_long", "data", False)
            with pytest.raises(HandlerError, match=r"at least 250\d\d\d tokens.* at most 40 fit.*max_model_len"):
                await rig.capture.answer(request)


async def test_logprobs_that_are_not_finite_are_never_staged(rig: Rig, tmp_path: Path) -> None:
    broken = tiny_lm(seed=1)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    save_weights(broken, tmp_path / "w")
    await rig.engine.load_weights(tmp_path / "w", 1)
    assert await failure(rig.capture, rig.request(user("hi"))) == ("bad_logprobs", "capture", False)
    assert await rig.plane.keys(STAGING) == []


async def test_no_answer_without_staging(rig: Rig) -> None:
    await rig.plane.aclose()
    assert await failure(rig.capture, rig.request(user("hi"))) == ("staging_failed", "infra", True)


async def test_a_dead_engine_is_an_infrastructure_failure(rig: Rig) -> None:
    await rig.engine.aclose()
    assert await failure(rig.capture, rig.request(user("hi"))) == ("engine_dead", "infra", True)


async def test_an_aborted_call_is_staged_as_far_as_it_got(rig: Rig) -> None:
    replies: list[CallReply] = []

    async def call(n: int) -> None:
        replies.append(await rig.capture.answer(rig.request(user("hi"), call=n, temperature=0.0, max_tokens=400)))

    await rig.engine.pause()
    async with anyio.create_task_group() as group:
        group.start_soon(call, 0)
        while not rig.engine.stats().waiting:
            await anyio.sleep(0.0005)
        await rig.engine.abort("r-1/0")
    await rig.engine.resume()
    (reply,) = replies
    assert (reply.finish_reason, reply.completion_tokens) == ("abort", 0)
    assert reply.coords.weight_spans == ()
    assert (await rig.row(reply)).token_mask.tolist() == [0] * reply.prompt_tokens


class SlowPlane(MemoryPlane):
    """Its puts take time, and, like the real ones, end before a cancellation is delivered."""

    async def put(self, *args: Any, **kwargs: Any) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.01)
            await super().put(*args, **kwargs)
        await anyio.lowlevel.checkpoint()


async def test_cancelled_calls_leave_no_request_running_and_no_broken_row(rig: Rig) -> None:
    rng, plane = random.Random(3), SlowPlane()
    capture = Capture(rig.engine, rig.renderer, plane)
    answered: list[CallReply] = []

    async def impatient(n: int) -> None:
        with anyio.move_on_after(rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5), 60])):
            answered.append(await capture.answer(rig.request(user("hi"), call=n, max_tokens=rng.randint(1, 30))))

    async with anyio.create_task_group() as group:
        for n in range(60):
            group.start_soon(impatient, n)
    await rig.engine.pause()
    assert (rig.engine.stats().running, rig.engine.stats().waiting) == (0, 0)
    keys = await plane.keys(STAGING)
    assert {reply.coords.staging_key for reply in answered} <= set(keys)
    assert 0 < len(answered) < 60
    for row in await plane.get(STAGING, keys, STAGING_COLUMNS):
        assert len({column.size for column in row.values()}) == 1


async def test_concurrent_calls_do_not_mix(rig: Rig) -> None:
    replies: dict[int, CallReply] = {}

    async def call(n: int) -> None:
        replies[n] = await rig.capture.answer(rig.request(user(f"hi {n % 5}"), call=n))

    async with anyio.create_task_group() as group:
        for n in range(32):
            group.start_soon(call, n)
    for n, reply in replies.items():
        row = await rig.row(reply)
        prompt = await rig.renderer.render_root([user(f"hi {n % 5}")])
        assert row.token_ids[: len(prompt)].tolist() == prompt
        assert reply.coords.weight_spans == (WeightSpan(0, 0, reply.completion_tokens),)
        await rig.verified([reply])
