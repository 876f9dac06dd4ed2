"""Stop strings: whether a completion has just spelled one, and the message without it.

The tokens that spelled it stay with the call, as the model has said them; only the text that the agent gets is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ledger.records import Message

Decode = Callable[[Sequence[int]], str]
"""Token ids to text. Used in the engine's thread only."""

_SLACK_TOKENS = 8
"""A decoded tail may begin inside a character; so many tokens earlier it does not matter."""


class StopText:
    """Looks at the end of a completion after each token."""

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        # A token that shows at all shows at least one byte.
        self._window = max(len(text.encode(errors="replace")) for text in stop) + _SLACK_TOKENS

    def reached(self, tokens: Sequence[int], start: int) -> bool:
        """Whether `tokens[start:]`, which did not hold a stop string before its last token, holds one now."""
        tail = self._decode(tokens[max(start, len(tokens) - self._window) :])
        return any(text in tail for text in self._stop)


def cut(message: Message, stop: Sequence[str]) -> Message:
    """The message up to where its reasoning, or else its content, first spells one of `stop`."""
    for name in ("reasoning_content", "content"):
        text: str = getattr(message, name) or ""
        found = [at for at in map(text.find, stop) if at >= 0]
        if found:
            rest = {} if name == "content" else {"content": None}
            return replace(message, **{name: text[: min(found)]}, **rest, tool_calls=())
    return message
