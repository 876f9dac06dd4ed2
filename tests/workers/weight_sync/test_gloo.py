"""The gloo broadcast between real processes: all get the same bytes, and who dies or freezes holds up nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from workers.weight_sync.gloo import GlooTransport
from workers.weight_sync.rounds import Member
from workers.weight_sync.spec import WeightSyncSpec

GUARD_S = 60
CHUNK = 1 << 20


def weights(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"embed": torch.randn(2048, 1024), "scale": torch.tensor(2.0), "head": torch.randn(1024, 2048).bfloat16()}


@contextmanager
def trainer(folder: Path, *, engines: int, timeout_s: float = 20) -> Generator[GlooTransport]:
    spec = WeightSyncSpec(transport="gloo", folder=str(folder), engines=engines, timeout_s=timeout_s)
    transport = GlooTransport(spec, chunk_bytes=CHUNK)
    try:
        yield transport
    finally:
        transport.close()


def received(address: str, version: int, *, timeout_s: float = 20) -> dict[str, Tensor]:
    """What an engine gets."""
    transport = GlooTransport(WeightSyncSpec(transport="gloo", timeout_s=timeout_s))
    with transport.receive(address, version, timeout_s=timeout_s) as path:
        return load_file(path)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def start() -> Generator[Callable[..., Future[dict[str, Tensor]]]]:
    """Receives in a thread."""
    with ThreadPoolExecutor(4) as threads:
        yield lambda *args, **kwargs: threads.submit(received, *args, **kwargs)


def test_all_engines_get_what_was_published_and_later_ones_too(
    tmp_path: Path, start: Callable[..., Future[dict[str, Tensor]]]
):
    with trainer(tmp_path, engines=3) as transport:
        for version in (1, 2):
            sent = weights(version)
            address = transport.publish(sent, version)
            sent_before = {name: tensor.clone() for name, tensor in sent.items()}
            sent["embed"].zero_()  # the next step changes the live tensors
            together = [start(address, version) for _ in range(3)]
            assert all(equal(got.result(GUARD_S), sent_before) for got in together)
        assert equal(received(address, 2), sent_before), "an engine that was restarted comes alone"


def test_only_the_last_version_is_offered(tmp_path: Path):
    with trainer(tmp_path, engines=1) as transport:
        transport.publish(weights(1), 1)
        address = transport.publish(weights(2), 2)
        with pytest.raises(LookupError, match="weight version 1 is not offered, 2 is"):
            received(address, 1)


@pytest.fixture(scope="module")
def victims() -> Generator[list[subprocess.Popen[str]]]:
    """Two processes that are ready to be engines."""
    command = [sys.executable, "-m", "tests.workers.weight_sync.member"]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_freezes_in_a_broadcast_does_not_hold_up_the_others(
    tmp_path: Path,
    how: signal.Signals,
    start: Callable[..., Future[dict[str, Tensor]]],
    victims: list[subprocess.Popen[str]],
    caplog: pytest.LogCaptureFixture,
):
    victim = victims.pop()
    try:
        with trainer(tmp_path, engines=2, timeout_s=8) as transport:
            sent = weights(1)
            address = transport.publish(sent, 1)
            assert victim.stdin is not None
            assert victim.stdout is not None
            victim.stdin.write(f"{address} 1 {int(how)}\n")
            survivor = start(address, 1, timeout_s=30)
            assert equal(survivor.result(GUARD_S), sent)
            assert victim.stdout.readline() == "received a chunk, one of 3\n", "they were in one group"
            assert "the broadcast of version 1 to 2 engines failed" in caplog.text
            again = weights(2)
            assert equal(received(transport.publish(again, 2), 2), again), "the trainer goes on"
    finally:
        victim.kill()
        victim.wait(10)


def test_an_engine_that_took_a_ticket_and_died_is_left_out(
    tmp_path: Path, start: Callable[..., Future[dict[str, Tensor]]]
):
    with trainer(tmp_path, engines=2) as transport:
        sent = weights(1)
        address = transport.publish(sent, 1)
        stranger = Member(address, timeout_s=10)
        stranger.take_ticket(1)  # and is never heard of again
        stranger._keys.set(f"ticket/{stranger._keys.add('tickets', 1)}", "no ticket at all")
        assert equal(start(address, 1).result(GUARD_S), sent)


def test_without_a_trainer_receiving_ends_with_the_deadline(tmp_path: Path):
    with trainer(tmp_path, engines=1) as transport:
        address = transport.publish(weights(1), 1)
    with pytest.raises(TimeoutError, match="weight version 1 did not arrive within 1 s"):
        received(address, 1, timeout_s=1)
    with pytest.raises(ValueError, match="'nowhere' is no address of a gloo broadcast"):
        received("nowhere", 1, timeout_s=1)
