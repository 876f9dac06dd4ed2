"""How a chat template goes on after an assistant turn: what a conversation's exact tokens are continued with.

What was said before is in the exact tokens, and a template may render it differently once it is history (dropping
reasoning, or moving tools). So only the end of the turn is looked for: a stand-in takes the turn's place, in two wordings,
and where the two renderings first differ the turn is. Its end is the first stop token after that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]

_KEPT = 256
"""Characters kept of an earlier message: it needs to be there, not to be read."""


class RenderMismatch(Exception):
    """The template gives no way to continue the conversation without changing its earlier tokens."""


class _End(NamedTuple):
    at: int
    """Index of the stop token that ends the turn."""
    after: int
    """Tokens between the turn's wording and its end."""


def after_turn(
    render: Callable[[Messages, bool], list[int]], messages: Messages, covered: int, stop: Collection[int]
) -> list[int]:
    """The tokens from the end of the assistant turn `messages[covered - 1]` on, its stop token first.

    `render(messages, to_answer)` renders a conversation. Raises RenderMismatch, and what `render` raises.
    """
    before = [_shortened(message) for message in messages[: covered - 1]]
    new = messages[covered:]
    for one, other in _wordings(messages[covered - 1]):
        whole = render([*before, one, *new], True)
        end = _end(whole, render([*before, other, *new], True), stop)
        alone = _end(render([*before, one], False), render([*before, other], False), stop)
        if end is None or alone is None:
            continue
        # As history the turn must end as it does alone: a later stop token would be another message's.
        if end.after != alone.after:
            raise RenderMismatch("the chat template ends the assistant turn differently once later messages follow")
        return whole[end.at :]
    raise RenderMismatch("the chat template does not show the assistant turn, or ends it without a stop token")


def _wordings(turn: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Stand-ins for a turn, of its shape and without reasoning: two that differ in their text, then two in a call's name."""
    calls = turn.get("tool_calls")
    said = {key: value for key, value in turn.items() if key not in ("content", "reasoning_content")}
    pairs = [({**said, "content": "ok"}, {**said, "content": "no"})]
    if calls:
        first = calls[0]
        renamed = {**first, "function": {**first["function"], "name": first["function"]["name"] + "2"}}
        pairs.append(({**said, "content": ""}, {**said, "content": "", "tool_calls": [renamed, *calls[1:]]}))
    return pairs


def _end(tokens: Sequence[int], other: Sequence[int], stop: Collection[int]) -> _End | None:
    differs = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
    if differs is None:
        return None
    at = next((i for i in range(differs, len(tokens)) if tokens[i] in stop), None)
    return None if at is None else _End(at, at - differs)


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": message["content"][:_KEPT]}
