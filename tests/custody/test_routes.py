"""Routed experts: out of the engine's envelope, under the digests, into the row, to the trainer; or the call is refused."""

from __future__ import annotations

import base64
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.schema import ROUTED_EXPERTS, ROUTES_SHAPE, STAGING, TRAIN, TRAIN_COLUMNS
from ledger.errors import CallFailedError
from ledger.reasons import CallFailure, Reason
from tests.custody.planes import FaultyPlane
from tests.custody.rig import House, user
from tests.custody.tokenizers import saved
from workers.generation.engine import Generation
from workers.generation.rendering import ChatRenderer
from workers.generation.routes import BadRoutes, RoutedExperts, decode_routes, encode_routes
from workers.training.errors import BadTrainRow
from workers.training.rows import collate, fetch_rows

LAYERS, TOPK = 3, 2
CPU = torch.device("cpu")


def envelope(experts: np.ndarray, dtype: str = "int16", layers: int = LAYERS, topk: int = TOPK) -> str:
    data = base64.b64encode(experts.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
    return f"nrlre1:{dtype}:{len(experts)}x{layers}x{topk}:{data}"


@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["int8", "int16", "int32"]), st.integers()
)
def test_what_is_encoded_comes_back(tokens: int, layers: int, topk: int, dtype: str, seed: int):
    experts = np.random.default_rng(abs(seed)).integers(-1, 100, (tokens, layers * topk)).astype(np.int16)
    routed = decode_routes(envelope(experts, dtype, layers, topk), tokens)
    np.testing.assert_array_equal(routed.experts, experts)
    assert (routed.layers, routed.topk, routed.experts.dtype) == (layers, topk, np.int16)
    assert encode_routes(routed) == envelope(experts, "int16", layers, topk)


GOOD = envelope(np.zeros((4, LAYERS * TOPK)))
MALFORMED = [
    ("", "begin with"),
    ("nrlre2:" + GOOD[7:], "begin with"),
    (GOOD.replace("int16", "int64"), "begin with"),
    (GOOD.replace("4x3x2", "4x3"), "begin with"),
    (GOOD.replace("4x3x2", "4x0x2"), "4 x 0 x 2"),
    (GOOD.replace("4x3x2", "5x3x2"), "5 x 3 x 2, for 4 tokens"),
    (GOOD.replace("4x3x2", "4x3x3"), "64 characters of base64, for 72 bytes"),
    (GOOD[:-4], "60 characters"),
    (GOOD[:-1] + "=", "47 bytes"),
    (GOOD + "=", "65 characters"),
    (GOOD + "\n", "65 characters"),
    (GOOD[:30] + "!" + GOOD[31:], "base64"),
    (envelope(np.full((4, 6), -2)), "go from -2"),
    (envelope(np.full((4, 6), 40_000), "int32"), "to 40000"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_a_malformed_envelope_says_what_is_wrong(text: str, message: str):
    with pytest.raises(BadRoutes, match=message):
        decode_routes(text, 4)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(saved(tmp_path_factory.mktemp("tokenizer"), "newlines"))


def routing(house: House, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Have the engine send routes for every token of the request; they are remembered by call."""
    rng, sent = np.random.default_rng(seed), dict[str, np.ndarray]()
    generate = house.engine.generate

    async def with_routes(request_id: str, prompt, sampling) -> Generation:
        generation = await generate(request_id, prompt, sampling)
        tokens = len(prompt) + len(generation.token_ids)
        sent[request_id] = rng.integers(-1, 64, (tokens, LAYERS * TOPK)).astype(np.int16)
        text = encode_routes(RoutedExperts(sent[request_id], LAYERS, TOPK))
        return replace(generation, routed_experts=text)

    house.engine.generate = with_routes  # type: ignore[method-assign]
    return sent


@pytest.mark.anyio
async def test_every_tokens_routes_reach_the_trainer(renderer: ChatRenderer):
    house = House(Path(), renderer=renderer, trajectory="branches")
    sent = routing(house)

    async def branching(rollout_id: str) -> None:
        first, _ = await house.turns(rollout_id, "ab", "ok")
        await house.chat(rollout_id, user("ab"), first.message, user("other"))

    await house.play("g", branching)
    await house.finalize()
    (sample,) = house.samples().values()
    assert sample.keys == ["g.0", "g.0/2"]
    rows = await fetch_rows(house.plane, TRAIN, sample.keys, routes=True)
    # The tokens of a call are routed as that call's engine said, also where a later call has other routes for them.
    root = len(house.engine.conversation("g.0/0"))
    for row, leaf in zip(rows, ("g.0/1", "g.0/2"), strict=True):
        assert row[ROUTES_SHAPE].tolist() == [LAYERS, TOPK]
        expected = np.concatenate([sent["g.0/0"], sent[leaf][root:]])
        np.testing.assert_array_equal(row[ROUTED_EXPERTS].reshape(-1, LAYERS * TOPK), expected)
    batch = collate(sample.keys, rows, vocab_size=1000, device=CPU)
    assert batch.routed_experts is not None
    assert batch.routed_experts.dtype == torch.int32
    assert batch.routed_experts.shape == (2, batch.input_ids.shape[1], LAYERS, TOPK)
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        assert batch.routed_experts[i, :n].flatten().tolist() == row[ROUTED_EXPERTS].tolist()
        assert (batch.routed_experts[i, n:] == -1).all()
    await house.train()
    assert await house.staged() == []
    assert await house.plane.keys(TRAIN) == []


@pytest.mark.anyio
async def test_rows_without_routes_have_no_such_column(renderer: ChatRenderer):
    house = House(Path(), renderer=renderer)
    await house.play("g", lambda rollout_id: house.turns(rollout_id, "ab"))
    await house.finalize()
    rows = await house.plane.get(TRAIN, ["g.0"], TRAIN_COLUMNS)
    assert collate(["g.0"], rows, vocab_size=1000, device=CPU).routed_experts is None


@pytest.mark.anyio
@pytest.mark.parametrize("wrong", ["nonsense", GOOD])
async def test_malformed_routes_refuse_the_call_custody(renderer: ChatRenderer, wrong: str):
    house = House(Path(), renderer=renderer)
    await house.dispatch("g", 1)
    house.engine.spoil = lambda _, generation: replace(generation, routed_experts=wrong)
    with pytest.raises(CallFailedError, match="bad_routes") as error:
        await house.chat("g.0", user("ab"))
    assert error.value.reason is CallFailure.CAPTURE_FAILED
    assert await house.staged() == []


@pytest.mark.anyio
@pytest.mark.parametrize("damage", ["changed", "shorter", "float", "none"])
async def test_staged_routes_that_were_altered_are_never_trained(renderer: ChatRenderer, damage: str):
    plane = FaultyPlane()
    house = House(Path(), renderer=renderer, plane=plane)
    routing(house)
    await house.play("g", *[lambda rollout_id: house.turns(rollout_id, "ab", "ok")] * 2)
    key = next(key for key in plane._partitions[STAGING] if key.startswith("g.1/1"))
    row = plane._partitions[STAGING][key]
    if damage == "none":
        del row[ROUTED_EXPERTS]
    else:
        changes = {
            "changed": lambda column: column + np.int16(1),
            "shorter": lambda column: column[:-1],
            "float": lambda column: column.astype(np.float32),
        }
        row[ROUTED_EXPERTS] = changes[damage](row[ROUTED_EXPERTS])
    await house.finalize()
    reasons = [sample.reason for sample in house.samples().values()]
    assert reasons == [None, Reason.MALFORMED_ROW if damage == "none" else Reason.WRONG_ROUTES]


@pytest.mark.anyio
async def test_a_conversation_that_only_partly_has_routes_is_rejected(renderer: ChatRenderer):
    house = House(Path(), renderer=renderer)
    (rollout_id,) = await house.dispatch("g", 1)
    (first,) = await house.turns(rollout_id, "ab")
    routing(house)
    await house.chat(rollout_id, user("ab"), first.message, user("ok"))
    await house.end("g", [rollout_id])
    await house.finalize()
    assert house.finalizers.rejections == {Reason.WRONG_ROUTES: 1}
    assert await house.staged() == []


@pytest.mark.anyio
async def test_rollouts_with_and_without_routes_are_finalized_together(renderer: ChatRenderer):
    house = House(Path(), renderer=renderer)

    async def without(rollout_id: str) -> None:
        await house.turns(rollout_id, "ab")
        routing(house)

    async def with_routes(rollout_id: str) -> None:
        await house.turns(rollout_id, "ok")

    await house.play("g", without, with_routes)
    await house.finalize()
    assert all(sample.valid for sample in house.samples().values())
    assert house.finalizers.take_counts()["reads"] == 2


def row(tokens: int, layers: int = LAYERS, topk: int = TOPK) -> dict[str, np.ndarray]:
    rng = random.Random(tokens)
    mask = np.array([0] + [1] * (tokens - 1), np.uint8)
    return {
        "input_ids": np.arange(tokens),
        "loss_mask": mask,
        "rollout_logprobs": np.zeros(tokens, np.float32),
        "weight_versions": np.zeros(tokens, np.int64),
        ROUTED_EXPERTS: np.array(rng.choices(range(8), k=tokens * layers * topk), np.int16),
        ROUTES_SHAPE: np.array([layers, topk], np.int32),
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(row(4, layers=2)),
        lambda r: r.pop(ROUTES_SHAPE),
        lambda r: r.update({ROUTES_SHAPE: np.array([0, 2], np.int32)}),
        lambda r: r.update({ROUTED_EXPERTS: r[ROUTED_EXPERTS][:-1]}),
        lambda r: r.update({ROUTED_EXPERTS: r[ROUTED_EXPERTS].astype(np.int64)}),
    ],
)
def test_the_trainer_refuses_routes_of_another_shape(change):
    bad = row(4)
    change(bad)
    with pytest.raises(BadTrainRow, match="routed"):
        collate(["a", "b"], [row(3), bad], vocab_size=100, device=CPU)
