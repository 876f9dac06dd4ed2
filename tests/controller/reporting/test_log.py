"""The log takes records from any thread, in order and without waiting, and shows warnings."""

from __future__ import annotations

import logging
import threading
import warnings

import anyio
import anyio.to_thread
import pytest
from anyio import CancelScope, fail_after

from controller.reporting.log import logging_to

pytestmark = pytest.mark.anyio

logger = logging.getLogger("controller.something")


async def test_records_are_in_the_file_and_warnings_on_the_display(tmp_path):
    shown: list[str] = []
    async with logging_to(tmp_path / "run", shown.append):
        logger.debug("too fine")
        logger.info("step %d", 3)
        logger.warning("gen-0 is suspect\nand more about it")
        warnings.warn("an old call", stacklevel=1)
    lines = (tmp_path / "run" / "controller.log").read_text().splitlines()
    assert lines[0].endswith("INFO    controller.something: step 3")
    assert lines[1].endswith("WARNING controller.something: gen-0 is suspect")
    assert lines[2] == "and more about it"
    assert "an old call" in lines[3]
    assert shown[0] == "controller.something: gen-0 is suspect"
    assert len(shown) == 2


async def test_a_traceback_is_logged_whole(tmp_path):
    async with logging_to(tmp_path, lambda _: None):
        try:
            raise ValueError("the cause")
        except ValueError:
            logger.exception("it failed")
    text = (tmp_path / "controller.log").read_text()
    assert "Traceback (most recent call last)" in text
    assert text.count("ValueError: the cause") == 1


async def test_each_thread_s_records_keep_their_order(tmp_path):
    def log_many(name: str) -> None:
        for index in range(200):
            logger.info("%s %d", name, index)

    async with logging_to(tmp_path, lambda _: None):
        threads = [threading.Thread(target=log_many, args=(f"thread{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
    lines = (tmp_path / "controller.log").read_text().splitlines()
    for i in range(4):
        own = [line.rsplit(" ", 1)[1] for line in lines if f"thread{i} " in line]
        assert own == [str(index) for index in range(200)]


async def test_a_resumed_run_continues_the_log(tmp_path):
    for attempt in range(2):
        async with logging_to(tmp_path, lambda _: None):
            logger.info("attempt %d", attempt)
    assert len((tmp_path / "controller.log").read_text().splitlines()) == 2


async def test_a_cancelled_run_s_last_records_are_written(tmp_path):
    with fail_after(10), CancelScope() as scope:
        async with logging_to(tmp_path, lambda _: None):
            try:
                scope.cancel()
                await anyio.sleep_forever()
            finally:
                logger.info("cleaned up")
    assert "cleaned up" in (tmp_path / "controller.log").read_text()


async def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path):
    (tmp_path / "controller.log").symlink_to("/dev/full")
    shown: list[str] = []
    async with logging_to(tmp_path, shown.append):
        for _ in range(10):
            logger.info("lost")
    assert len(shown) == 1
    assert "the log ends here" in shown[0]
    assert "No space left on device" in shown[0]


async def test_a_log_that_cannot_be_opened_is_an_error_and_changes_nothing(tmp_path):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match="run"):
        async with logging_to(tmp_path / "run", lambda _: None):
            pass
    assert (root.level, root.handlers) == before


async def test_logging_is_as_it_was_afterwards(tmp_path):
    root = logging.getLogger()
    before = (root.level, list(root.handlers), warnings.showwarning)
    async with logging_to(tmp_path, lambda _: None):
        assert root.handlers != before[1]
    assert (root.level, root.handlers, warnings.showwarning) == before


async def test_the_log_goes_on_while_the_loop_hangs(tmp_path):
    written = threading.Event()

    def watch() -> None:
        logger.warning("the loop hangs")

    async with logging_to(tmp_path, lambda _: written.set()):
        threading.Thread(target=watch).start()
        assert written.wait(timeout=10)  # Blocks the loop on purpose.
        assert "the loop hangs" in (tmp_path / "controller.log").read_text()
