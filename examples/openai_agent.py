"""An agent as it may exist already, on the official client: two lines point it at the rollout that it plays.

It is started once for each rollout, by examples/openai_agent.yaml: its task comes on stdin, and the last line that it prints
is its reward. It knows nothing of tokens, weights or training.
"""

from __future__ import annotations

import json
import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

client = OpenAI(
    base_url=os.environ["OPENAI_BASE_URL"],  # the first line
    api_key=os.environ["OPENAI_API_KEY"],  # and the second
)


def ask(messages: list[ChatCompletionMessageParam]) -> tuple[str, str]:
    """The answer, and the id of its response."""
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    return answer.choices[0].message.content or "", answer.id


def main() -> None:
    word: str = json.load(sys.stdin)["word"]
    target = word[::-1]
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Reverse: {word}"}]
    text, answer_id = ask(messages)
    if text != target:
        # Appending to what the model said continues its exact tokens; both answers are trained.
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"Reverse: {word}"})
        text, answer_id = ask(messages)
    right = sum(a == b for a, b in zip(text, target, strict=False)) / max(len(text), len(target))
    print(json.dumps({"reward": right, "metrics": {"turns": len(messages) // 2 + 1}, "terminal": answer_id}))


if __name__ == "__main__":
    main()
