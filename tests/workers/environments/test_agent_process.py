"""Agents as programs: pointed at their rollout, scored by what they print, and never outliving it."""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import pytest

from tests.workers.environments.scripted import ScriptedContext
from workers.environments.agent_process import AgentProcess, AgentsFail
from workers.environments.base import Prompt
from workers.environments.registry import BadEnvironment, make_environment

pytestmark = pytest.mark.anyio

PROMPT = Prompt(id="p", data={"word": "abc"})
SCORERS = """
import time
def length(prompt, output): return {"reward": len(output) / 10, "metrics": {"words": len(output.split())}}
def number(prompt, output): return 0.25
def hang(prompt, output): time.sleep(60)
def wrong(prompt, output): return "good"
def three(seed):
    from workers.environments.base import Prompt
    for i in range(3): yield Prompt(id=f"p{i}", data=seed + i)
"""


class Context(ScriptedContext):
    base_url = "http://127.0.0.1:1/ng-rollout/rollout-0/v1"

    def __init__(self) -> None:
        super().__init__(lambda _: "")
        self.api_key = f"key-{uuid4()}"
        self.terminal: str | None = None

    def declare_terminal(self, call_id: str) -> None:
        self.terminal = call_id


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "prompts.jsonl").write_text('{"word": "abc"}\n\n{"word": "de", "id": "named"}\n"text"\n')
    (tmp_path / "agent_scorers.py").write_text(SCORERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    yield "prompts.jsonl"
    sys.modules.pop("agent_scorers", None)


def agent(script: str, **options: Any) -> AgentProcess:
    return AgentProcess(["sh", "-c", script], **({"prompts": "prompts.jsonl"} | options))


async def play(environment: AgentProcess, context: Context | None = None):
    with anyio.fail_after(60):
        return await environment.rollout(context or Context(), PROMPT)


async def test_an_agent_finds_its_gate_and_its_prompt_and_scores_itself() -> None:
    script = """
        test "$OPENAI_BASE_URL" = http://127.0.0.1:1/ng-rollout/rollout-0/v1 || exit 3
        test "$OPENAI_API_KEY" = "$KEY" || exit 4
        test "$(cat)" = '{"word": "abc"}' || exit 5
        test "$no_proxy,$NO_PROXY" = "10.0.0.1,127.0.0.1,127.0.0.1" || exit 6
        echo thinking
        echo '{"reward": 0.5, "metrics": {"exact": 1}, "terminal": "chatcmpl-rollout-0/0"}'
        echo
    """
    context = Context()
    result = await play(agent(script, env={"KEY": context.api_key, "no_proxy": "10.0.0.1", "NO_PROXY": ""}), context)
    assert (result.reward, result.metrics) == (0.5, {"exact": 1.0, "agent_failed": 0.0})
    assert context.terminal == "chatcmpl-rollout-0/0"


async def test_a_prompt_may_come_as_the_last_argument_and_a_verdict_be_a_number() -> None:
    result = await play(agent('test "$0" = \'{"word": "abc"}\' && echo 0.75', prompt_as="argument"))
    assert result.reward == 0.75


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo first >&2; echo broken >&2; exit 7", "exited with status 7; its last words: broken\nfirst\nbroken"),
        ("exit 7", "exited with status 7\n"),
        ("kill -9 $$", "ended by signal 9"),
        ("echo no number", "its last line must be a number"),
        ("true", "its last line must be a number"),
        ("echo '{\"rewards\": 1}'", "rewards"),
        ("echo 1e308", "Expected `float` <= 1000000000000.0 - at `$.reward`"),
        ("echo NaN", "its last line must be a number"),
        (
            """echo '{"reward": 1, "metrics": {"m": -1e300}}'""",
            "Expected `float` >= -1000000000000.0 - at `$.metrics[...]`",
        ),
        ("printf '\\377\\000\\001'", "its last line must be a number"),
        ("head -c 5000000 /dev/zero; sleep 60", "printed more than 4194304 bytes"),
        ("sleep 60", r"ran longer than 0\.5 s and was killed"),
    ],
)
async def test_an_agent_that_fails_earns_nothing_and_says_why(
    script: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = await play(agent(script, timeout_s=0.5 if script == "sleep 60" else None))
    assert (result.reward, result.metrics) == (0.0, {"agent_failed": 1.0})
    assert why.replace("\\", "") in caplog.text


async def test_agents_that_fail_one_after_another_end_the_run() -> None:
    environment = agent("echo 'ImportError: no openai' >&2; exit 1", max_failures_in_a_row=3)
    for _ in range(2):
        await play(environment)
    with pytest.raises(AgentsFail, match=r"3 agents in a row failed \(.*\).*ImportError: no openai"):
        await play(environment)


async def test_a_scorer_of_one_s_own_sees_prompt_and_output() -> None:
    result = await play(agent("echo two words", scorer="agent_scorers:length"))
    assert (result.reward, result.metrics) == (1.0, {"words": 2.0, "agent_failed": 0.0})
    assert (await play(agent("echo x", scorer="agent_scorers:number"))).reward == 0.25
    result = await play(agent("echo x", scorer="agent_scorers:hang", score_timeout_s=0.5))
    assert result.metrics == {"agent_failed": 1.0}
    with pytest.raises(TypeError, match="returned 'good', not a reward"):
        await play(agent("echo x", scorer="agent_scorers:wrong"))


async def test_a_cancelled_agent_and_all_that_it_started_are_gone(tmp_path: Path) -> None:
    script = "trap '' TERM; sleep 1000 & echo $! $$ > pids; wait; sleep 1000"
    with anyio.move_on_after(0.5):
        await agent(script).rollout(Context(), PROMPT)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    with anyio.fail_after(10):
        while any(alive(pid) for pid in pids):
            await anyio.sleep(0.01)


async def test_what_an_agent_leaves_running_is_killed_with_it(tmp_path: Path) -> None:
    result = await play(agent("(sleep 1000; echo late) & echo $! > pid; echo 1"))
    assert result.reward == 1.0
    with anyio.fail_after(10):
        while alive(int((tmp_path / "pid").read_text())):
            await anyio.sleep(0.01)


async def test_a_daemon_that_left_the_agent_s_group_is_killed_with_it(tmp_path: Path) -> None:
    script = """
        setsid sh -c 'echo $$ > daemon; setsid sleep 1000 & echo $! > other; wait' &
        until [ -s other ]; do sleep 0.01; done
        echo 1
    """
    result = await play(agent(script))
    assert result.reward == 1.0
    with anyio.fail_after(10):
        for name in ("daemon", "other"):
            while alive(int((tmp_path / name).read_text())):
                await anyio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_no_more_agents_run_than_may() -> None:
    script = "mkdir here || exit 9; sleep 0.1; rmdir here; echo 1"
    environment = agent(script, max_processes=1)
    rewards: list[float] = []

    async def one() -> None:
        rewards.append((await play(environment)).reward)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(one)
    assert rewards == [1.0] * 4


def test_prompts_of_a_file_come_again_in_an_order_that_follows_from_the_seed() -> None:
    def ids(seed: int, **options: Any) -> list[str]:
        return [prompt.id for prompt in islice(agent("true", **options).prompts(seed), 9)]

    assert ids(1) == ids(1)
    assert sorted(ids(1)[:3]) == ["named", "prompts-1", "prompts-4"]
    assert len(set(ids(1))) == 9
    assert len({tuple(ids(seed)) for seed in range(10)}) > 1
    assert ids(1, shuffle=False, repeat=False) == ["prompts-1", "named", "prompts-4"]


def test_prompts_may_come_from_a_function() -> None:
    assert [p.data for p in agent("true", prompts="agent_scorers:three").prompts(5)] == [5, 6, 7]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"command": []}, "a program and its arguments"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"prompts": "absent.jsonl"}, "there is no file 'absent.jsonl'"),
        ({"prompts": "agent_scorers:absent"}, "has no function 'absent'"),
        ({"scorer": "absent:f"}, "importing absent failed"),
        ({"timeout_s": 0}, "timeout_s: a finite number"),
        ({"max_processes": 0}, "at least 1"),
    ],
)
def test_a_mistake_in_the_arguments_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadEnvironment, match=message):
        make_environment("agent_process", {"command": ["python"], "prompts": "prompts.jsonl"} | args)


@pytest.mark.parametrize(
    ("lines", "message"),
    [("", "is empty"), ("{", "line 1"), ('{"id": 1}\n{"id": 1}\n', "two prompts have the same id")],
)
def test_a_mistake_in_the_prompts_is_named(lines: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(lines)
    with pytest.raises(BadEnvironment, match=message):
        make_environment("agent_process", {"command": ["python"], "prompts": "bad.jsonl"})


def test_python_is_the_controller_s_own() -> None:
    environment = AgentProcess(["python", "-c", "pass"], prompts="prompts.jsonl")
    assert environment._command[0] == sys.executable
    assert json.dumps(environment._command[1:]) == '["-c", "pass"]'
