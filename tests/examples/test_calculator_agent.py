from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
import pytest

from examples.calculator_agent import CALCULATOR, CalculatorAgent, calculate
from ledger.records import FunctionCall, Message, ToolCall
from workers.environments.base import ChatAnswer, Prompt
from workers.environments.registry import BadEnvironment, make_environment

pytestmark = pytest.mark.anyio

PROMPT = Prompt(id="p", data={"question": "2 * 3 + 4", "answer": 10})


class Model:
    """Says what it is told to, in turn."""

    def __init__(self, *says: str | Message) -> None:
        self._says = iter(says)
        self.calls: list[list[Message]] = []

    async def chat(self, messages: list[Any], *, tools: Any = ()) -> ChatAnswer:
        assert list(tools) == [CALCULATOR]
        self.calls.append([m if isinstance(m, Message) else msgspec.convert(m, Message) for m in messages])
        said = next(self._says)
        message = said if isinstance(said, Message) else Message(role="assistant", content=said)
        return ChatAnswer(call_id="r/0", message=message, finish_reason="stop", prompt_tokens=1, completion_tokens=1)


def uses(arguments: str) -> Message:
    call = ToolCall(id="c1", function=FunctionCall(name="calculator", arguments=arguments))
    return Message(role="assistant", tool_calls=(call,))


async def test_a_tool_s_result_goes_back_and_the_right_answer_earns_all() -> None:
    model = Model(uses('{"expression": "2*3+4"}'), "It is 10")
    result = await CalculatorAgent().rollout(model, PROMPT)
    assert (result.reward, result.metrics) == (1.0, {"tool_calls": 1.0, "solved": 1.0})
    assert model.calls[1][-1] == Message(role="tool", tool_call_id="c1", content="10")


async def test_a_second_try_earns_half_and_there_is_no_third() -> None:
    model = Model("9", "10")
    assert (await CalculatorAgent().rollout(model, PROMPT)).reward == 0.5
    assert len(model.calls[1]) == 3
    assert (await CalculatorAgent().rollout(Model("9", "8"), PROMPT)).reward == 0.05
    assert (await CalculatorAgent().rollout(Model("no", "idea"), PROMPT)).reward == 0.0


async def test_turns_are_limited_however_often_the_tool_is_used() -> None:
    result = await CalculatorAgent(turns=3).rollout(Model(*[uses("{}")] * 3), PROMPT)
    assert (result.reward, result.metrics["tool_calls"]) == (0.0, 3.0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * (7 + 5)", "144"),
        ("-3 - 4", "-7"),
        ("(" * 90 + "1" + ")" * 90, "1"),
        ("9**9**9", "error"),
        ("a", "error"),
        ("10**9", "error"),
        ("1 +", "error"),
        ("999999 * 999999 * 9", "error"),
        ("__import__('os')", "error"),
        (5, "error"),
    ],
)
def test_the_calculator_takes_sums_and_nothing_else(expression: Any, value: str) -> None:
    assert calculate(msgspec.json.encode({"expression": expression}).decode()).startswith(value)


@pytest.mark.parametrize("arguments", ["", "[]", "{}", "no json", '{"expression": null}'])
def test_arguments_that_are_none_are_an_error_for_the_model(arguments: str) -> None:
    assert calculate(arguments).startswith("error")


def test_a_configuration_makes_it_and_its_prompts_follow_from_the_seed() -> None:
    made = make_environment("examples.calculator_agent:CalculatorAgent", {"turns": 2, "largest": 9})
    first, again = (list(islice(made.prompts(5), 20)) for _ in range(2))
    assert first == again
    with pytest.raises(BadEnvironment, match="at least 1"):
        make_environment("examples.calculator_agent:CalculatorAgent", {"turns": 0})
