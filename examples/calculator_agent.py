"""An environment with a tool: sums that are easier with a calculator, and a second try after a mistake.

    python -m controller --config examples/calculator_agent.yaml

The conversation may have many turns, and all that the model said in it is trained: every turn continues the exact tokens of
the turns before. The quickstart's model knows no tools and will not call one; `model.path` may name one that does, such as a
local copy of Qwen/Qwen3-0.6B.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from workers.environments.base import Prompt, RolloutContext, RolloutResult

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate a sum, a difference or a product of whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example 12 * (7 + 5)"}},
            "required": ["expression"],
        },
    },
}
LARGEST = 10**12
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
NUMBER = re.compile(r"-?\d+")


class CalculatorAgent:
    """`turns` model calls at most. The right answer earns 1, a wrong number 0.1; a second try earns half."""

    def __init__(self, turns: int = 4, largest: int = 99) -> None:
        if turns < 1 or largest < 1:
            raise ValueError(f"turns and largest: at least 1; got {turns} and {largest}")
        self._turns = turns
        self._largest = largest

    def prompts(self, seed: int) -> Iterator[Prompt]:
        rng = random.Random(seed)
        for index in count():
            a, b, c = (rng.randint(1, self._largest) for _ in range(3))
            yield Prompt(id=f"sum-{index}", data={"question": f"{a} * {b} + {c}", "answer": a * b + c})

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        messages: list[Any] = [
            {"role": "user", "content": f"What is {prompt.data['question']}? Use the calculator, then say the number."}
        ]
        reward, tries, uses = 0.0, 0, 0
        for _ in range(self._turns):
            answer = await ctx.chat(messages, tools=[CALCULATOR])
            messages.append(answer.message)
            if answer.message.tool_calls:
                for call in answer.message.tool_calls:
                    uses += 1
                    result = calculate(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                continue
            tries += 1
            numbers = NUMBER.findall(answer.text)
            right = bool(numbers) and int(numbers[-1][:20]) == prompt.data["answer"]
            reward = (1.0 if right else 0.1 if numbers else 0.0) / tries
            if right or tries == 2:
                break
            messages.append({"role": "user", "content": "That is not right. Use the calculator."})
        return RolloutResult(reward=reward, metrics={"tool_calls": float(uses), "solved": float(reward >= 0.5)})


def calculate(arguments: str) -> str:
    """What the tool answers: the value, or what is wrong. The model wrote `arguments`, so they may be anything."""
    try:
        expression = json.loads(arguments)["expression"]
        return str(_value(ast.parse(expression[:200], mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case _:
            raise ValueError("only whole numbers, +, -, * and parentheses")
    if abs(result) > LARGEST:
        raise ValueError(f"numbers above {LARGEST} are too large")
    return result
