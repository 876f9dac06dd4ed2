"""File primitives do all of what they say, or raise and leave what was there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from controller.reporting.files import AppendFile, replace_file, write_all


def test_more_than_a_pipe_holds_is_written_whole():
    reader, writer = os.pipe()
    data = os.urandom(1 << 20)
    received = bytearray()

    def read() -> None:
        while chunk := os.read(reader, 1 << 16):
            received.extend(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    write_all(writer, data)
    os.close(writer)
    thread.join(timeout=10)
    os.close(reader)
    assert bytes(received) == data


def test_a_full_disk_raises_at_once_and_closing_is_quiet(tmp_path):
    (tmp_path / "file").symlink_to("/dev/full")
    file = AppendFile(tmp_path / "file")
    file.open()
    with pytest.raises(OSError, match="No space left"):
        file.write(b"line\n")
    file.close()
    file.close()


def test_a_replaced_file_has_the_new_content_and_no_temporary_beside_it(tmp_path):
    path = tmp_path / "deep" / "file"
    replace_file(path, [b"old"])
    replace_file(path, [b"n", b"ew"])
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_replacement_that_fails_half_way_leaves_the_old_content(tmp_path):
    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise OSError("the source broke")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="the source broke"):
        replace_file(path, chunks())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
