"""New weights under running calls, in each mode: tokens are exact, spans say whose they are, and every call goes on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.records import Sampling, WeightSpan
from tests.models import tiny_lm, tiny_model
from tests.workers.generation.helpers import freeze_after, frozen, load, running_engine, worst_error
from workers.generation.engine import Engine, EngineStats, Generation
from workers.generation.torch_engine import TorchEngine
from workers.generation.updates import UpdatingEngine
from workers.weight_sync.spec import UpdateMode
from workers.weights import save_weights

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", seed=1)


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, path = tiny_lm("llama", seed=2), tmp_path_factory.mktemp("weights") / "7"
    save_weights(model, path)
    return model, path


def updating(engine: TorchEngine, mode: UpdateMode, *, drain_timeout_s: float = 30) -> UpdatingEngine:
    return UpdatingEngine(engine, mode, drain_timeout_s=drain_timeout_s)


class Calls:
    """Calls that run in a task group, and what they returned, by name."""

    def __init__(self, engine: UpdatingEngine, group: TaskGroup) -> None:
        self._engine, self._group = engine, group
        self.asked: dict[str, tuple[list[int], Sampling]] = {}
        self.done: dict[str, Generation] = {}

    def start(self, name: str, prompt: list[int], sampling: Sampling) -> None:
        self.asked[name] = (prompt, sampling)
        self._group.start_soon(self._run, name)

    async def _run(self, name: str) -> None:
        self.done[name] = await self._engine.generate(name, *self.asked[name])

    async def ended(self, name: str) -> Generation:
        while name not in self.done:
            await anyio.sleep(0.001)
        return self.done[name]


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * j) % 103 for j in range(i % 5 + 1)]


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_sixteen_calls_get_new_weights_while_twelve_run(
    model_dir: Path, new_weights: tuple[Any, Path], mode: UpdateMode
) -> None:
    new, path = new_weights
    models = {0: load(model_dir), 7: new}
    async with running_engine(model_dir, max_batch=12) as torch_engine:
        engine = updating(torch_engine, mode)
        async with anyio.create_task_group() as group:
            calls = Calls(engine, group)
            freeze_after(torch_engine, 12 * 20)
            for i in range(16):
                seed, temperature = ((None, 1.0), (i, 0.7))[i % 2]
                calls.start(f"r{i}", prompt(i), Sampling(max_tokens=60, seed=seed, temperature=temperature))
            await frozen(torch_engine)
            group.start_soon(engine.load_weights, path, 7)
            await anyio.wait_all_tasks_blocked()
            calls.start("late", prompt(3), Sampling(max_tokens=5))
            await anyio.wait_all_tasks_blocked()
            stats = engine.stats()
            assert stats.running + stats.waiting == 17, "held calls count as waiting"
            await engine.resume()
        assert (engine.stats().running, engine.stats().waiting, engine.weight_version) == (0, 0, 7)

    assert calls.done.pop("late").weight_spans == (WeightSpan(7, 0, 5),)
    for name, got in calls.done.items():
        assert (len(got.token_ids), got.finish_reason) == (60, "length")
        assert worst_error(models, calls.asked[name][0], got, calls.asked[name][1]) < TOLERANCE
    versions = [[span.version for span in calls.done[f"r{i}"].weight_spans] for i in range(16)]
    assert versions == ([[0]] * 16 if mode == "drain" else [[0, 7]] * 12 + [[7]] * 4)


async def test_an_aborted_call_goes_on_just_where_it_was(model_dir: Path, new_weights: tuple[Any, Path]) -> None:
    greedy = Sampling(max_tokens=30, temperature=0)
    async with running_engine(model_dir) as torch_engine:
        engine = updating(torch_engine, "abort")
        async with anyio.create_task_group() as group:
            calls = Calls(engine, group)
            freeze_after(torch_engine, 12)
            calls.start("r", prompt(4), greedy)
            await frozen(torch_engine)
            group.start_soon(engine.load_weights, new_weights[1], 7)
            await anyio.wait_all_tasks_blocked()
            await engine.resume()
        got = calls.done["r"]
        assert got.weight_spans == (WeightSpan(0, 0, 12), WeightSpan(7, 12, 30))
        rest = Sampling(max_tokens=18, temperature=0)
        again = await engine.generate("again", [*prompt(4), *got.token_ids[:12]], rest)
        assert (again.token_ids, again.finish_reason) == (got.token_ids[12:], "length")


async def test_a_seeded_call_does_not_draw_the_same_numbers_again(model_dir: Path, tmp_path: Path) -> None:
    """With weights that stay the same it would repeat itself, were the generator started anew with the call's seed."""
    save_weights(load(model_dir), tmp_path / "same")
    async with running_engine(model_dir) as torch_engine:
        engine = updating(torch_engine, "abort")
        seeds: list[int | None] = []
        generate = torch_engine.generate

        async def spy(name: str, ids: Sequence[int], sampling: Sampling, **more: Any) -> Generation:
            seeds.append(sampling.seed)
            return await generate(name, ids, sampling, **more)

        torch_engine.generate = spy  # type: ignore[method-assign]
        async with anyio.create_task_group() as group:
            calls = Calls(engine, group)
            freeze_after(torch_engine, 10)
            calls.start("r", prompt(1), Sampling(max_tokens=20, seed=3))
            await frozen(torch_engine)
            group.start_soon(engine.load_weights, tmp_path / "same", 1)
            await anyio.wait_all_tasks_blocked()
            await engine.resume()
        assert seeds[0] == 3
        assert len(set(seeds)) == len(seeds) == 2


async def test_a_stop_string_may_begin_before_the_update_and_end_after_it(model_dir: Path) -> None:
    """The tokens say their numbers, so that any two that follow one another are a stop string."""
    greedy = Sampling(max_tokens=16, temperature=0)
    async with running_engine(model_dir, decode=lambda ids: "".join(f"<{i}>" for i in ids)) as torch_engine:
        engine = updating(torch_engine, "abort")
        tokens = (await engine.generate("r", prompt(2), greedy)).token_ids
        at = next(i for i in range(3, 15) if (tokens[i], tokens[i + 1]) not in list(pairwise(tokens[: i + 1])))
        stop = Sampling(max_tokens=16, temperature=0, stop=(f"<{tokens[at]}><{tokens[at + 1]}>",))
        done = at + 1  # the stop string's first token is the last one before the interruption
        first = await engine.generate("s", prompt(2), Sampling(max_tokens=done, temperature=0))
        got = await torch_engine.generate("t", prompt(2), stop, begun=first.token_ids)
        assert (got.token_ids, got.finish_reason) == ([tokens[at + 1]], "stop")


async def test_draining_ends_at_its_deadline_and_the_rest_goes_on(
    model_dir: Path, new_weights: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with running_engine(model_dir) as torch_engine:
        engine = updating(torch_engine, "drain", drain_timeout_s=0.05)
        async with anyio.create_task_group() as group:
            calls = Calls(engine, group)
            freeze_after(torch_engine, 10)
            calls.start("r", prompt(1), Sampling(max_tokens=20))
            await frozen(torch_engine)
            await engine.load_weights(new_weights[1], 7)
            await engine.resume()
    assert [span.version for span in calls.done["r"].weight_spans] == [0, 7]
    assert "1 calls had not ended after 0.05 s" in caplog.text


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_weights_that_do_not_fit_leave_every_call_going(
    model_dir: Path, tmp_path: Path, mode: UpdateMode
) -> None:
    save_weights(tiny_lm("llama", seed=2, num_hidden_layers=1), tmp_path / "small")
    async with running_engine(model_dir) as torch_engine:
        engine = updating(torch_engine, mode, drain_timeout_s=0.01)
        async with anyio.create_task_group() as group:
            calls = Calls(engine, group)
            freeze_after(torch_engine, 10)
            calls.start("r", prompt(1), Sampling(max_tokens=20))
            await frozen(torch_engine)
            with pytest.raises(ValueError, match="missing model"):
                await engine.load_weights(tmp_path / "small", 7)
            await engine.resume()
        assert calls.done["r"].weight_spans == (WeightSpan(0, 0, 20),)
        assert engine.weight_version == 0


class CountingEngine:
    """Token i of a call is 100 * version + i, one per turn of the event loop."""

    vocab_size = 10**6
    max_model_len = 10**6

    def __init__(self) -> None:
        self.weight_version = 0
        self.inside: dict[str, anyio.CancelScope] = {}
        self.emitted = 0
        self.at: dict[int, anyio.Event] = {}

    async def generate(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, *, begun: Sequence[int] = ()
    ) -> Generation:
        assert request_id not in self.inside
        tokens: list[int] = []
        spans: list[WeightSpan] = []
        with anyio.CancelScope() as scope:
            self.inside[request_id] = scope
            try:
                while len(tokens) < sampling.max_tokens:
                    await anyio.lowlevel.checkpoint()
                    version = self.weight_version
                    tokens.append(100 * version + len(begun) + len(tokens))
                    start = spans.pop().start if spans and spans[-1].version == version else len(tokens) - 1
                    spans.append(WeightSpan(version, start, len(tokens)))
                    self.emitted += 1
                    if self.emitted in self.at:
                        self.at[self.emitted].set()
            finally:
                del self.inside[request_id]
        reason = "length" if len(tokens) == sampling.max_tokens else "abort"
        return Generation(tokens, [-float(t) for t in tokens], reason, tuple(spans))

    async def abort(self, request_id: str) -> None:
        if request_id in self.inside:
            self.inside[request_id].cancel()

    async def load_weights(self, path: Path, version: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.weight_version = version

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.inside), waiting=0, kv_usage=0, generated_tokens=0, weight_version=self.weight_version
        )


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["keep", "drain", "abort"]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    updates=st.lists(st.integers(1, 60), max_size=4, unique=True),
    aborted=st.integers(0, 4),
    abort_at=st.integers(1, 60),
)
def test_whatever_the_order_every_token_is_there_once_and_of_the_version_it_says(
    mode: UpdateMode, lengths: list[int], updates: list[int], aborted: int, abort_at: int
) -> None:
    async def scenario() -> None:
        counting = CountingEngine()
        engine = UpdatingEngine(cast(Engine, counting), mode, drain_timeout_s=5)

        async def update(at: int, version: int) -> None:
            await counting.at[at].wait()

            async def change() -> None:
                assert mode == "keep" or not counting.inside, "no call is in the engine"
                await counting.load_weights(Path(), version)

            await engine.update(change)

        async def abort() -> None:
            await counting.at[abort_at].wait()
            await engine.abort(f"r{aborted}")

        counting.at = {at: anyio.Event() for at in (*updates, abort_at)}
        with anyio.fail_after(10):
            async with anyio.create_task_group() as watchers:
                for version, at in enumerate(sorted(updates), 1):
                    watchers.start_soon(update, at, version)
                watchers.start_soon(abort)
                async with anyio.create_task_group() as group:
                    calls = Calls(engine, group)
                    for i, length in enumerate(lengths):
                        calls.start(f"r{i}", [1], Sampling(max_tokens=length))
                watchers.cancel_scope.cancel()
        assert engine.stats().waiting == engine.stats().running == 0
        for i, length in enumerate(lengths):
            got = calls.done[f"r{i}"]
            assert [token % 100 for token in got.token_ids] == list(range(len(got.token_ids)))
            assert got.logprobs == [-float(token) for token in got.token_ids]
            said = [s.version for s in got.weight_spans for _ in range(s.start, s.end)]
            assert said == [token // 100 for token in got.token_ids]
            assert len({s.version for s in got.weight_spans}) == len(got.weight_spans), "spans are not split"
            assert got.finish_reason == ("length" if len(got.token_ids) == length else "abort")
            assert i == aborted or len(got.token_ids) == length, "only who aborts a call ends it early"

    anyio.run(scenario)
