"""Published weights: exactly what the trainer serves, whole or not there, in any state but lost."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.models import tiny_model
from tests.workers.training.make import CPU, begin, make_trainer, random_rows, train_step
from workers.training import disk
from workers.training.errors import NoSpace, OutOfOrder
from workers.training.model import load_model
from workers.training.publish import publish
from workers.weight_sync.file import FileTransport
from workers.weight_sync.spec import WeightSyncSpec
from workers.weights import load_into, tensor_names


def files(folder: Path) -> FileTransport:
    return FileTransport(WeightSyncSpec(folder=str(folder)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_model_loads_exactly_what_was_trained(tmp_path: Path, dtype: torch.dtype, tied: bool):
    model = tiny_model(tmp_path / "m", tie_word_embeddings=tied)
    trainer = make_trainer(model, dtype=dtype)
    train_step(trainer, 0, random_rows(4))
    done = publish(trainer, files(tmp_path / "weights"), 7)
    assert done.address == str(tmp_path / "weights" / "v7.safetensors")
    assert done.version == 7
    assert 0 < Path(done.address).stat().st_size - done.bytes < 10_000, "the file's header"

    fresh = load_model(str(model), dtype, CPU)
    load_into(fresh, Path(done.address))
    mine = trainer.policy.model.state_dict()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in fresh.state_dict().items())
    ids = torch.arange(12)[None]
    assert torch.equal(fresh(input_ids=ids).logits, trainer.policy.model(input_ids=ids).logits)
    with safe_open(done.address, framework="pt") as file:
        assert sorted(file.keys()) == sorted(tensor_names(fresh))
        assert all(file.get_tensor(name).dtype == dtype for name in file.keys())  # noqa: SIM118
    assert ("lm_head.weight" in tensor_names(fresh)) is not tied


def test_weights_published_in_an_open_step_are_those_it_began_with(model: Path, tmp_path: Path):
    trainer = make_trainer(model)
    train_step(trainer, 0, random_rows(3))
    first = publish(trainer, files(tmp_path), 1)
    trainer.begin_step(begin(1, random_rows(3)))
    again = publish(trainer, files(tmp_path), 2)
    assert Path(first.address).read_bytes() == Path(again.address).read_bytes()


def test_a_version_can_be_published_again(model: Path, tmp_path: Path):
    trainer = make_trainer(model)
    before = Path(publish(trainer, files(tmp_path), 1).address).read_bytes()
    train_step(trainer, 0, random_rows(3))
    assert Path(publish(trainer, files(tmp_path), 1).address).read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["v1.safetensors"]


def test_lost_weights_are_not_published(model: Path, tmp_path: Path):
    trainer = make_trainer(model)
    with pytest.raises(KeyboardInterrupt), trainer.state.moves_weights():
        raise KeyboardInterrupt
    with pytest.raises(OutOfOrder, match="publish_weights: the weights are lost"):
        publish(trainer, files(tmp_path), 1)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_names_the_folder_and_the_need(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 93, 7))
    with pytest.raises(NoSpace, match=rf"{tmp_path}: \d+ bytes are needed, 7 are free"):
        publish(make_trainer(model), files(tmp_path), 1)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A real file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_that_is_full_gives_a_clear_error_and_keeps_no_half_file(
    model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(model)
    with pytest.raises(NoSpace, match=rf"{small_disk}: \d+ bytes are needed"):
        publish(trainer, files(small_disk), 1)
    # The space is taken by another process after the check.
    (small_disk / "other").write_bytes(b"x" * 1_000_000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9))
    with pytest.raises(NoSpace, match=rf"{small_disk} ran full while \d+ bytes were written"):
        publish(trainer, files(small_disk), 1)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_another_write_error_keeps_its_text_and_names_the_folder(model: Path, tmp_path: Path):
    """A file size limit is a write error that is not a full disk."""
    trainer = make_trainer(model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=rf"{tmp_path}.*File too large"):
            publish(trainer, files(tmp_path), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []
