"""What an environment may return depends on whether the engine's tokens are captured; mistakes are named early."""

from __future__ import annotations

from typing import Any

import pytest

from controller.player import Player, RolloutError
from controller.records import PromptGroup
from ledger.events import MemoryLog, TerminalWitnessed
from ledger.ledger import Ledger
from tests.custody.test_echo import GOOD
from workers.environments.base import Prompt, RolloutResult

pytestmark = pytest.mark.anyio

GROUP = PromptGroup(group_id="g", prompt=Prompt(id="p"), start_version=0, rollout_ids=("g.0",))


class Returns:
    def __init__(self, result: Any) -> None:
        self._result = result

    async def rollout(self, ctx: Any, prompt: Prompt) -> Any:
        return self._result


class Context:
    terminal = None

    def close(self) -> None: ...


async def play(result: Any, *, echo: bool) -> tuple[Any, MemoryLog]:
    log = MemoryLog()
    ledger = Ledger(log, trajectory="echo" if echo else "terminal")
    await ledger.dispatched("g", "p", ["g.0"], 0)
    environment: Any = Returns(result)
    context: Any = Context()
    player = Player(
        environment=environment,
        ledger=ledger,
        make_context=lambda _: context,
        forget=lambda _: None,
        timeout_s=60.0,
        echo=echo,
    )
    return await player.play(GROUP, "g.0"), log


async def test_echoed_tokens_are_handed_on():
    played, _ = await play(RolloutResult(reward=1.0, tokens=GOOD, scored="x"), echo=True)
    assert played.tokens is GOOD


async def test_the_scored_answer_is_put_on_record():
    _, log = await play(RolloutResult(reward=1.0, scored="the answer"), echo=False)
    (witness,) = [e for e in log.events if isinstance(e, TerminalWitnessed)]
    assert (witness.by, witness.calls) == ("content", ())


@pytest.mark.parametrize(
    ("result", "echo", "message"),
    [
        (RolloutResult(reward=1.0, tokens=GOOD), False, "returned tokens, but token_capture.enabled is true"),
        (RolloutResult(reward=1.0, tokens={"input_ids": [1]}), True, "tokens is .* must be None or a Tokens"),  # type: ignore[arg-type]
        (RolloutResult(reward=1.0, scored=3), False, "scored is 3; it must be None or a str"),  # type: ignore[arg-type]
        (RolloutResult(reward=float("nan")), False, r"reward is nan; it must be a finite number of at most 1e\+12"),
        (RolloutResult(reward=1.0, metrics={"m": -1e13}), False, r"metrics\['m'\] is -1\d+\.0; .* of at most 1e\+12"),
    ],
)
async def test_a_result_that_does_not_fit_is_an_error_of_the_environment(result: Any, echo: bool, message: str):
    with pytest.raises(RolloutError, match=rf"environment Returns, prompt 'p', rollout g\.0: .*{message}"):
        await play(result, echo=echo)
