"""`python -m ledger`: what a person reads of a run, whether it is healthy, crashed, going on or tampered with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from ledger.__main__ import main
from ledger.audit import Audit, audit
from ledger.errors import CallFailedError, JournalMoved
from ledger.events import CheckpointMarked, Event, MemoryLog
from ledger.ledger import Ledger
from ledger.lineage import fingerprint
from ledger.reasons import Reason
from ledger.segments import current_files, segment_path
from ledger.show import block, table
from ledger.story import Fate, RolloutStory
from tests.ledger.journal.histories import history
from tests.ledger.journal.opened import opened, write
from tests.ledger.rig import Rig
from tests.ledger.worker import assistant, user


async def told() -> list[Event]:
    """One rollout for each thing that a story can tell."""
    log = MemoryLog()
    rig = Rig(log)
    ledger = rig.ledger
    rig.worker.generated = 4
    await rig.start("g0.0", "g0.1", "g0.2", "g0.3", group_id="g0")
    await rig.turns("a", "b", rollout_id="g0.0")
    await ledger.seal("g0.0")
    await ledger.finalize("g0.0", None)
    await rig.turns("a", rollout_id="g0.1")
    await rig.chat(user("a"), assistant("never said"), user("b"), rollout_id="g0.1")
    await ledger.declare_terminal("g0.1", "g0.1/9")
    receipt = await ledger.seal("g0.1")
    await ledger.finalize("g0.1", receipt.reason, receipt.rejections[0].detail)
    await failing_call(rig, "g0.2")
    receipt = await ledger.seal("g0.2", Reason.ROLLOUT_TIMEOUT)
    await ledger.finalize("g0.2", receipt.reason, receipt.rejections[0].detail)
    await ledger.abort("g0.3", "the agent left")
    await ledger.committed("g0")
    await ledger.trained("g0", 4)
    await rig.start("g1.0", group_id="g1")
    await rig.turns("a", rollout_id="g1.0")
    await ledger.admit("g1.0", fingerprint([user("lost")]))
    await ledger.resumed(4)
    await rig.start("g2.0", "g2.1", group_id="g2")
    await rig.turns("a", rollout_id="g2.0")
    await ledger.admit("g2.0", fingerprint([user("under way")]))
    return list(log.events)


async def failing_call(rig: Rig, rollout_id: str) -> None:
    generate = rig.worker.generate

    async def fail(*_: Any) -> Any:
        raise RuntimeError("out of\nmemory \x1b[31m")

    rig.worker.generate = fail
    with pytest.raises(CallFailedError):
        await rig.chat(user("a"), rollout_id=rollout_id)
    rig.worker.generate = generate


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    anyio.run(lambda: told_to(folder / "ledger"))
    return folder


async def told_to(folder: Path) -> None:
    await write(folder, await told())


def run(*arguments: str | Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    assert main([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_table_has_a_line_for_each_rollout_and_the_totals(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    out, err = run("show", run_dir, capsys=capsys)
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert lines["g0.0"].split()[1:3] == ["2", "8"]
    assert lines["g0.0"].split()[4] == "verified"
    assert "trained in step 5 (undone: the run was resumed from step 4)" in lines["g0.0"]
    assert "dropped: unknown_terminal; the rest of its group was trained in step 5" in lines["g0.1"]
    assert "aborted: the run was resumed from step 4" in lines["g1.0"]
    assert "open" in lines["g2.0"]
    assert "live: its group is not finished" in lines["g2.1"]
    assert "7 rollouts, 9 calls, 24 generated tokens: 2 dropped, 2 aborted, 2 live, 1 trained" in out
    assert f"1 rollout_timeout: {Reason.ROLLOUT_TIMEOUT.meaning}" in out
    assert err == ""


def test_a_long_reason_is_cut_in_the_table_and_whole_in_the_block():
    why = "RolloutError: " + "why " * 500
    story = RolloutStory(
        rollout_id="g0.0", group_id="g0", prompt_id="p", dispatch_version=0, fate=Fate(end="aborted", detail=why)
    )
    line = list(table([story]))[1]
    assert "aborted: RolloutError: why why" in line
    assert len(line) < 200
    assert line.endswith("…")
    assert why in block(story)


def test_a_rollouts_block_tells_its_calls_and_its_end(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    out, _ = run("show", run_dir, "--rollout", "g0.0", capsys=capsys)
    assert out.startswith("rollout g0.0\n  dispatched  with group g0, prompt prompt, weights v0\n")
    assert "  calls         0  root           4 prompt, 4 generated (v0" in out
    assert "                1  continues 0    8 + 4 prompt, 4 generated (v0" in out
    assert "  terminal    g0.0/1 (not declared; the calls single it out); calls 0 > 1, 16 tokens\n" in out
    assert "  verdict     verified: every token is proven\n" in out
    assert "  became      trained in step 5 (undone: the run was resumed from step 4)\n" in out


def test_a_groups_blocks_say_why_each_rollout_was_not_trained(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    out, _ = run("show", run_dir, "--group", "g0", capsys=capsys)
    assert out.count("rollout g0.") == 4
    assert "1  fork" in out
    assert "a new root: its history is no earlier call's" in out
    assert "terminal    none; g0.1/9 was declared" in out
    assert "unknown_terminal (the declared terminal is no call of this rollout): declared terminal 'g0.1/9'" in out
    assert "verdict     rejected: rollout_timeout (the rollout did not end within its deadline)\n" in out
    assert "verdict     aborted: the agent left\n" in out


def test_what_an_agent_or_a_worker_said_cannot_act_on_the_terminal(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    out, _ = run("show", run_dir, "--rollout", "g0.2", capsys=capsys)
    assert r"RuntimeError: out of\nmemory \x1b[31m" in out
    assert "\x1b" not in out


def test_calls_without_an_outcome_are_told(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    out, _ = run("show", run_dir, "--rollout", "g1.0", capsys=capsys)
    assert "1  root           no outcome when the rollout was closed" in out
    out, _ = run("show", run_dir, "--rollout", "g2.0", capsys=capsys)
    assert "1  root           no outcome yet" in out
    assert "verdict     none yet, the rollout is open" in out


def test_json_has_one_object_per_rollout(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    out, _ = run("show", run_dir, "--json", capsys=capsys)
    stories = [msgspec.json.decode(line) for line in out.splitlines()]
    assert [s["rollout_id"] for s in stories] == ["g0.0", "g0.1", "g0.2", "g0.3", "g1.0", "g2.0", "g2.1"]
    first = stories[0]
    assert first["fate"] == {"end": "trained", "step": 5, "detail": "", "undone_by_resume": 4}
    assert (first["terminal"], first["selection"], first["chain"]) == ("g0.0/1", "unique_leaf", ["g0.0/0", "g0.0/1"])
    assert len(first["head"]) == 64
    assert stories[2]["calls"][0]["failure"] == "generation_failed"
    out, _ = run("show", run_dir / "ledger", "--json", "--rollout", "g0.0", capsys=capsys)
    assert msgspec.json.decode(out) == first


def test_what_is_not_there_is_said(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, err = run("show", run_dir, "--rollout", "g9.9", capsys=capsys, code=2)
    assert "has no rollout g9.9" in err
    _, err = run("show", run_dir, "--group", "g9", capsys=capsys, code=2)
    assert "has no group g9" in err
    for command in ("show", "verify"):
        _, err = run(command, tmp_path, capsys=capsys, code=2)
        assert f"there is no ledger in {tmp_path}" in err


def test_a_healthy_run_is_sound(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    out, err = run("verify", run_dir, capsys=capsys)
    assert "1 verified" in out
    assert "dispatched 7 = trained 1 + evicted 0 + dropped 2 + aborted 2 + live 2; lost=0 duplicated=0\n" in out
    assert out.endswith("\nsound\n")
    assert err == ""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    anyio.run(lambda: write(tmp_path / "run" / "ledger", history(), segment_bytes=9000))
    return tmp_path / "run" / "ledger"


def test_a_torn_tail_is_told_and_left_as_it_is(journal: Path, capsys: pytest.CaptureFixture[str]):
    last = current_files(journal)[-1].path
    os.truncate(last, last.stat().st_size - 5)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in journal.iterdir()}
    for command in ("show", "verify"):
        _, err = run(command, journal, capsys=capsys)
        assert f"of {last.name} hold no whole frame" in err
        assert "Nothing in them was acknowledged" in err
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in journal.iterdir()} == before


def test_a_tampered_run_is_broken_at_a_named_place(journal: Path, capsys: pytest.CaptureFixture[str]):
    path = segment_path(journal, 1)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    out, _ = run("verify", journal, capsys=capsys, code=1)
    assert f"BROKEN: {path.name} at byte " in out
    assert out.endswith(": the frame's CRC is wrong\n")
    out, err = run("show", journal, capsys=capsys, code=1)
    assert "g0.0" in out, "what stands before the fault is shown"
    assert f"broken: ledger {path}: at byte" in err


def test_a_missing_file_is_broken(journal: Path, capsys: pytest.CaptureFixture[str]):
    segment_path(journal, 2).unlink()
    for command, code in (("verify", 1), ("show", 1)):
        out, err = run(command, journal, capsys=capsys, code=code)
        assert "segment-000002.log" in out + err
        assert "the file is missing" in out + err


def test_a_compacted_run_says_what_is_no_longer_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    anyio.run(lambda: write(tmp_path, [*history(), CheckpointMarked(step=9)], segment_bytes=2000, history_bytes=0))
    out, _ = run("verify", tmp_path, capsys=capsys)
    assert "compacted: trained " in out
    assert out.endswith("sound\n")
    out, _ = run("show", tmp_path, capsys=capsys)
    assert "g3.0" in out


def test_a_run_that_is_compacted_meanwhile_is_read_again(
    journal: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def moved(folder: Path) -> Audit:
        monkeypatch.setattr("ledger.__main__.audit", audit)
        raise JournalMoved(segment_path(folder, 1))

    monkeypatch.setattr("ledger.__main__.audit", moved)
    assert run("verify", journal, capsys=capsys)[0].endswith("sound\n")


def test_a_run_that_goes_on_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async def go_on() -> None:
        async with opened(tmp_path / "ledger") as (journal, _):
            ledger = Ledger(journal)
            rig = Rig(ledger=ledger)
            await rig.start("g0.0", group_id="g0")
            for n in range(3):
                await rig.chat(user(str(n)), rollout_id="g0.0")
                await anyio.to_thread.run_sync(read, n + 1)

    def read(calls: int) -> None:
        out, _ = run("show", tmp_path, "--json", capsys=capsys)
        assert len(msgspec.json.decode(out)["calls"]) == calls
        assert run("verify", tmp_path, capsys=capsys)[0].endswith("sound\n")

    anyio.run(go_on)


def test_as_a_command_it_survives_a_reader_that_leaves(run_dir: Path):
    root = Path(__file__).parents[3]
    done = subprocess.run(
        f"{sys.executable} -m ledger show {run_dir} --json | head -c 1",
        shell=True,
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("{", "")
