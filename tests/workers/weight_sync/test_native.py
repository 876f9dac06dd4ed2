"""vLLM's own transfer, as far as it goes without a GPU: what both sides say to each other before any tensor moves."""

from __future__ import annotations

import socket
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from workers.weight_sync.dialogue import Ask, Begin, Broken, Failed, Hello, Line, Offered, decode, encode
from workers.weight_sync.ipc_handles import plain, rebuilt
from workers.weight_sync.native_publisher import NativePublisher
from workers.weight_sync.spec import WeightSyncSpec
from workers.weight_sync.transport import make_publisher

WEIGHTS = {"embed": torch.ones(3, 2, dtype=torch.bfloat16), "scale": torch.tensor(1.0)}


@pytest.fixture
def publisher() -> Generator[NativePublisher]:
    made = make_publisher(WeightSyncSpec(transport="nccl", timeout_s=10))
    assert isinstance(made, NativePublisher)
    try:
        yield made
    finally:
        made.close()


def call(address: str, *, key: str | None = None) -> Line:
    where, _, right = address.partition("/")
    host, _, port = where.partition(":")
    line = Line(socket.create_connection((host, int(port)), timeout=10))
    line.send(Hello(key=right if key is None else key, gpus=1))
    return line


def test_an_engine_hears_what_will_come_and_that_an_old_version_will_not(publisher: NativePublisher):
    publisher.publish(WEIGHTS, 1)
    line = call(publisher.publish(WEIGHTS, 2))
    line.send(Ask(version=1))
    assert line.receive() == Failed(why="weight version 1 is not offered, 2 is")
    line.send(Ask(version=2))
    assert line.receive() == Offered(names=["embed", "scale"], dtypes=["bfloat16", "float32"], shapes=[[3, 2], []])


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would go on")
def test_a_transfer_that_fails_is_told_and_ends_the_connection_but_not_the_next(publisher: NativePublisher):
    address = publisher.publish(WEIGHTS, 1)
    for _ in range(2):
        line = call(address)
        line.send(Ask(version=1))
        assert isinstance(line.receive(), Offered)
        line.send(Begin())
        answer = line.receive()
        assert isinstance(answer, Failed)
        assert answer.why
        with pytest.raises(Broken, match="closed"):
            line.receive()


def test_without_the_key_nothing_is_told(publisher: NativePublisher):
    line = call(publisher.publish(WEIGHTS, 1), key="guess")
    with pytest.raises(Broken):
        line.receive()


def test_closing_ends_every_connection(publisher: NativePublisher):
    address = publisher.publish(WEIGHTS, 1)
    line = call(address)
    line.send(Ask(version=1))
    line.receive()
    publisher.close()
    with pytest.raises(Broken):
        line.receive()
    with pytest.raises(OSError, match="refused"):
        call(address)


@pytest.mark.parametrize("junk", [b"", b"\xc1", encode(Begin())[5:], b"\x81\xa4type\xa6Pickle"])
def test_what_is_no_message_is_refused(junk: bytes):
    with pytest.raises(Broken, match="a message that is none"):
        decode(junk)


def test_ipc_handles_travel_without_classes(tmp_path: Path):
    handle = (
        torch.Tensor,
        torch.Size([3, 2]),
        (2, 1),
        0,
        torch.storage.TypedStorage,
        torch.bfloat16,
        0,
        b"h" * 64,
        12,
        0,
        False,
        b"r",
        0,
        b"e",
        True,
    )
    sent = plain(handle)
    assert not any(isinstance(value, type) for value in sent)
    assert rebuilt(sent) == handle
    with pytest.raises(ValueError, match="no dtype"):
        rebuilt([None, [3], [1], 0, None, "system"])
