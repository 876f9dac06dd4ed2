"""Agents that are programs of their own are trained through the gate, and the run's owner can look in while they play."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from tests.e2e.running import conserved, finished, started

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

EVERYTHING = """
import json, sys
from openai import OpenAI, BadRequestError

client = OpenAI()
task = json.load(sys.stdin)
ask = [{"role": "user", "content": task["word"]}]
first = client.chat.completions.create(model="any", messages=ask, max_tokens=6, stop=["q", "zz"], logprobs=True, seed=1)
choice = first.choices[0]
assert len(choice.logprobs.content) == first.usage.completion_tokens
assert "q" not in (choice.message.content or "")
ask += [choice.message, {"role": "user", "content": "again"}]
text, usage = "", None
for chunk in client.chat.completions.create(
    model="any", messages=ask, stream=True, stream_options={"include_usage": True}
):
    usage = chunk.usage or usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
assert usage.prompt_tokens > first.usage.total_tokens
side = client.completions.create(model="any", prompt=[41, 42], max_tokens=3)
assert [m.id for m in client.models.list()] == ["tiny"]
try:
    client.chat.completions.create(model="any", messages=ask, temperature=0.1)
except BadRequestError as error:
    assert error.code == "fixed_by_the_run", error
else:
    raise SystemExit("another temperature was accepted")
print(json.dumps({"reward": len(set(text)) / 10, "metrics": {"side": len(side.choices[0].text)}, "terminal": chunk.id}))
"""

GIVES_UP = """
import sys
from openai import OpenAI, APITimeoutError
try:
    OpenAI(max_retries=0, timeout=0.05).chat.completions.create(
        model="any", messages=[{"role": "user", "content": "a"}], max_tokens=400)
except APITimeoutError:
    print(0.5)
else:
    print(1)
"""

WAITS = "import time; print(1, flush=True); time.sleep(600)"


def playing(config: dict[str, Any], folder: Path, script: str, **rollout: Any) -> dict[str, Any]:
    (folder / "agent.py").write_text(script)
    (folder / "tasks.jsonl").write_text("".join(f'{{"word": "w{i}"}}\n' for i in range(9)))
    args = {"command": ["python", "agent.py"], "prompts": "tasks.jsonl", "max_processes": 4}
    return config | {
        "run": {"dir": "run", "steps": 2},
        "environment": {"name": "agent_process", "args": args},
        "rollout": config["rollout"] | {"groups_per_step": 2, "group_size": 2, "max_staleness": 0} | rollout,
    }


async def test_the_official_client_is_trained_with_all_that_it_can_do(config: dict[str, Any], tmp_path: Path) -> None:
    run = await finished(playing(config, tmp_path, EVERYTHING), tmp_path)
    summary = run.summary()
    assert conserved(summary), summary
    assert (summary["trained"], summary["drop_reasons"]) == (8, {})
    steps = run.metrics()
    assert all(step["environment"]["agent_failed"] == 0 for step in steps)
    assert all("side" in step["environment"] for step in steps)
    assert steps[0]["agreement"]["difference_max"] < 1e-4
    assert "swept" not in run.output
    assert not (run.run_dir / "control.json").exists()


@pytest.mark.long
async def test_the_example_of_an_external_agent_is_trained(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    config = playing(config, tmp_path, "")
    config["environment"]["args"] |= {
        "command": ["python", "examples/openai_agent.py"],
        "prompts": "examples/openai_agent.jsonl",
    }
    run = await finished(config, tmp_path)
    assert conserved(run.summary())
    assert (run.summary()["trained"], run.summary()["drop_reasons"]) == (8, {})
    assert {step["environment"]["turns"] for step in run.metrics()} == {2.0}


@pytest.mark.long
async def test_the_example_with_a_tool_is_trained(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    config = config | {
        "environment": {"name": "examples.calculator_agent:CalculatorAgent", "args": {"turns": 3}},
        "run": {"dir": "run", "steps": 2},
    }
    run = await finished(config, tmp_path)
    assert conserved(run.summary())
    assert run.summary()["drop_reasons"] == {}
    assert run.metrics()[0]["agreement"]["difference_max"] < 1e-4


@pytest.mark.long
async def test_a_client_that_gives_up_costs_its_own_rollout_only(config: dict[str, Any], tmp_path: Path) -> None:
    config = playing(config, tmp_path, GIVES_UP, max_tokens=400) | {"finalizer": {"max_dropped_in_a_row": 2}}
    run = await finished(config, tmp_path, code=1)
    assert conserved(run.summary())
    assert "call_failed" in str(run.summary()["drop_reasons"])
    assert "failed: cancelled" in run.output


@pytest.mark.long
async def test_the_owner_can_look_in_and_a_signal_ends_agents_too(config: dict[str, Any], tmp_path: Path) -> None:
    async with started(playing(config, tmp_path, WAITS), tmp_path) as run:
        control = run.run_dir / "control.json"
        with anyio.fail_after(120):
            while not control.exists():
                await anyio.sleep(0.1)
        assert stat.S_IMODE(control.stat().st_mode) == 0o600
        where = json.loads(control.read_text())
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {where['token']}"}) as http:
            listed: list[Any] = []
            with anyio.fail_after(60):
                while len(listed) < 4:
                    try:
                        async with http.get(f"{where['address']}/control/rollouts") as response:
                            assert response.status == 200
                            listed = (await response.json())["rollouts"]
                    except aiohttp.ClientConnectorError:
                        pass
                    await anyio.sleep(0.1)
            assert {entry["state"] for entry in listed} == {"open"}
            name = listed[0]["rollout_id"]
            async with http.get(f"{where['address']}/control/rollouts/{name}/manifest") as response:
                assert (await response.json())["receipt"]["rejections"]
        run.interrupt(signal.SIGINT)
        assert await run.exit_code() == 130, run.output
        await run.gone()
    assert conserved(run.summary())


async def test_a_port_that_is_taken_is_said_before_anything_is_started(config: dict[str, Any], tmp_path: Path) -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as taken:
        port = taken.listeners[0].extra(anyio.abc.SocketAttribute.local_port)
        run = await finished(config | {"gate": {"port": port}}, tmp_path, code=1)
    assert f"gate: cannot listen on 127.0.0.1 port {port}" in run.output
    assert "starting workers" not in run.output
