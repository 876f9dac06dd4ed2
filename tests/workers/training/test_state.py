"""Checkpoints: what is resumed goes on bit for bit, any tool loads the model, and a damaged folder is refused whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny_model
from tests.workers.training.make import (
    add_microbatches,
    begin,
    make_trainer,
    random_rows,
    same,
    train_rows,
    train_step,
    weights,
)
from workers.training import disk
from workers.training.api import LossSpec, OptimizerSpec
from workers.training.errors import BadCheckpoint, NoSpace, OutOfOrder
from workers.training.state import load, save
from workers.training.step import Phase
from workers.training.trainer import Trainer

SPEC = OptimizerSpec(lr=1e-3, warmup_steps=6, weight_decay=0.01)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def trained(model: Path, steps: int, dtype: torch.dtype = torch.float32) -> Trainer:
    trainer = make_trainer(model, dtype=dtype, optimizer=SPEC, loss=LossSpec(kl_coef=0.1))
    for step in range(steps):
        train_step(trainer, step, random_rows(4, seed=step))
    return trainer


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Master weights, served weights and moments."""
    out = weights(trainer) | {f"served.{n}": p.detach().clone() for n, p in trainer.policy.model.named_parameters()}
    for name, master in trainer.policy.masters.items():
        out |= {f"{moment}.{name}": value.clone() for moment, value in trainer.optimizer.state[master].items()}
    return out


@DTYPES
def test_a_resumed_trainer_goes_on_bit_for_bit(model: Path, tmp_path: Path, dtype: torch.dtype):
    straight = trained(model, 5, dtype)
    first = trained(model, 3, dtype)
    save(first, tmp_path / "c", model_path=model)
    resumed = make_trainer(model, dtype=dtype, optimizer=SPEC, loss=LossSpec(kl_coef=0.1))
    load(resumed, tmp_path / "c")
    assert same(everything(resumed), everything(first))
    assert resumed.info().step == 3
    for step in (3, 4):
        metrics = train_step(resumed, step, random_rows(4, seed=step))
        assert metrics.kl_reference is not None
        assert metrics.kl_reference > 0, "the reference is the model the run began with"
    assert same(everything(resumed), everything(straight))


def test_saving_changes_nothing(model: Path, tmp_path: Path):
    trainer = trained(model, 2)
    save(trainer, tmp_path / "c", model_path=model)
    train_step(trainer, 2, random_rows(4, seed=2))
    assert same(everything(trainer), everything(trained(model, 3)))


def test_a_checkpoint_before_the_first_step_loads(model: Path, tmp_path: Path):
    save(trained(model, 0), tmp_path / "c", model_path=model)
    trainer = trained(model, 2)
    load(trainer, tmp_path / "c")
    train_step(trainer, 0, random_rows(4, seed=0))
    assert same(everything(trainer), everything(trained(model, 1)))


def test_an_open_step_is_not_part_of_a_checkpoint_and_goes_on_after_it(model: Path, tmp_path: Path):
    trainer = trained(model, 2)
    rows = random_rows(4, seed=2)
    announced = train_rows(rows, seed=2)
    trainer.begin_step(begin(2, rows))
    add_microbatches(trainer, 2, rows, [announced[:2]])
    save(trainer, tmp_path / "c", model_path=model)

    restored = trained(model, 0)
    load(restored, tmp_path / "c")
    assert restored.info().step == 2
    assert same(everything(restored), everything(trained(model, 2)))

    with pytest.raises(OutOfOrder, match="trained already"):
        add_microbatches(trainer, 2, rows, [announced[:2]])
    trainer.begin_step(begin(2, rows, restart=True))
    add_microbatches(trainer, 2, rows, [announced])
    trainer.finish_step(2)
    assert same(everything(trainer), everything(trained(model, 3)))


def test_loading_drops_an_open_step(model: Path, tmp_path: Path):
    save(trained(model, 1), tmp_path / "c", model_path=model)
    trainer = trained(model, 1)
    rows = random_rows(4, seed=7)
    trainer.begin_step(begin(1, rows))
    add_microbatches(trainer, 1, rows, [train_rows(rows)])
    load(trainer, tmp_path / "c")
    train_step(trainer, 1, random_rows(4, seed=1))
    assert same(everything(trainer), everything(trained(model, 2)))


def test_loading_brings_lost_weights_back(model: Path, tmp_path: Path):
    trainer = trained(model, 2)
    save(trainer, tmp_path / "c", model_path=model)
    with pytest.raises(KeyboardInterrupt), trainer.state.moves_weights():
        raise KeyboardInterrupt
    with pytest.raises(OutOfOrder, match="lost"):
        save(trainer, tmp_path / "d", model_path=model)
    load(trainer, tmp_path / "c")
    assert trainer.state.phase is Phase.IDLE
    assert same(everything(trainer), everything(trained(model, 2)))


def test_the_random_state_is_restored(model: Path, tmp_path: Path):
    trainer = trained(model, 1)
    save(trainer, tmp_path / "c", model_path=model)
    drawn = torch.rand(4)
    load(trainer, tmp_path / "c")
    assert torch.equal(torch.rand(4), drawn)


@DTYPES
def test_any_tool_loads_the_model_and_its_tokenizer(model: Path, tmp_path: Path, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = trained(model, 1, dtype)
    save(trainer, tmp_path / "c", model_path=model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert loaded.dtype == dtype
    mine = dict(trainer.policy.model.named_parameters())
    assert all(torch.equal(parameter, mine[name]) for name, parameter in loaded.named_parameters())
    chat: Any = [{"role": "user", "content": "Hello"}]
    original, copied = (AutoTokenizer.from_pretrained(path) for path in (model, tmp_path / "c"))
    assert copied.apply_chat_template(chat) == original.apply_chat_template(chat)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "c" / name).read_bytes() == (model / name).read_bytes()


def test_the_folder_holds_weights_once_at_its_top_and_no_pickle(model: Path, tmp_path: Path):
    """Engines that read every safetensors file of a model folder must not find the optimizer among them."""
    save(trained(model, 1), tmp_path / "c", model_path=model)
    assert [path.name for path in (tmp_path / "c").glob("*.safetensors")] == ["model.safetensors"]
    suffixes = {path.suffix for path in (tmp_path / "c").rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja"}


def test_nothing_but_the_checkpoint_is_left_beside_it(model: Path, tmp_path: Path):
    save(trained(model, 1), tmp_path / "deep" / "c", model_path=model)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c"]


def test_what_a_killed_save_left_is_in_nobodys_way(model: Path, tmp_path: Path):
    (tmp_path / ".c.partial" / "trainer").mkdir(parents=True)
    (tmp_path / ".c.partial" / "junk").write_text("half")
    save(trained(model, 1), tmp_path / "c", model_path=model)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert not (tmp_path / "c" / "junk").exists()


def test_an_existing_folder_is_not_overwritten(model: Path, tmp_path: Path):
    (tmp_path / "c").mkdir()
    with pytest.raises(BadCheckpoint, match="exists already"):
        save(trained(model, 0), tmp_path / "c", model_path=model)


def test_a_failed_save_leaves_no_folder(model: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        save(trained(model, 0), tmp_path / "c", model_path=tmp_path / "no-such-model")
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_writing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(NoSpace, match=rf"{tmp_path}: \d+ bytes are needed, 1 are free"):
        save(trained(model, 0), tmp_path / "c", model_path=model)
    assert list(tmp_path.iterdir()) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def edit(**changes: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("trainer/state.safetensors", truncate, r"state\.safetensors has \d+ bytes, \d+ were saved"),
    ("trainer/state.safetensors", flip, r"state\.safetensors is corrupted"),
    ("trainer/state.safetensors", Path.unlink, r"lacks its file trainer/state\.safetensors"),
    ("model.safetensors", flip, r"model\.safetensors is corrupted"),
    ("config.json", Path.unlink, r"lacks its file config\.json"),
    ("trainer/state.json", Path.unlink, r"is no trainer checkpoint: it has no trainer/state\.json"),
    ("trainer/state.json", truncate, r"state\.json: Input data was truncated"),
    ("trainer/state.json", edit(step="3"), r"state\.json: Expected `int`, got `str` - at `\$\.step`"),
    ("trainer/state.json", edit(step=-1), r"state\.json: format 1, step -1"),
    ("trainer/state.json", edit(format=2), r"state\.json: format 2, step 2; format 1"),
    ("trainer/state.json", edit(more=1), r"state\.json: Object contains unknown field `more`"),
    ("trainer/state.json", edit(files={}), r"state\.json does not list trainer/state\.safetensors"),
    (
        "trainer/state.json",
        edit(files={"../../x": {"bytes": 1, "sha256": ""}, "trainer/state.safetensors": {"bytes": 1, "sha256": ""}}),
        r"lacks its file \.\./\.\./x",
    ),
]


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "c"
    save(trained(model, 2), path, model_path=model)
    return path


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damaged_checkpoint_is_named_and_changes_nothing(number: int, model: Path, checkpoint: Path, tmp_path: Path):
    name, damage, message = DAMAGES[number]
    copy = tmp_path / "c"
    shutil.copytree(checkpoint, copy)
    damage(copy / name)
    trainer = trained(model, 1)
    before = everything(trainer)
    with pytest.raises(BadCheckpoint, match=message):
        load(trainer, copy)
    assert same(everything(trainer), before)
    assert trainer.info().step == 1


def test_a_missing_folder_is_no_checkpoint(model: Path, tmp_path: Path):
    with pytest.raises(BadCheckpoint, match="is no trainer checkpoint"):
        load(trained(model, 0), tmp_path / "nothing")


def test_another_models_checkpoint_is_refused(checkpoint: Path, tmp_path: Path):
    wider = trained(tiny_model(tmp_path / "wide", hidden_size=64, head_dim=16), 1)
    before = everything(wider)
    with pytest.raises(BadCheckpoint, match=r"does not fit the model: master\.\S+ is torch\.float32 \[\d+(, \d+)?\]"):
        load(wider, checkpoint)
    assert same(everything(wider), before)
    deeper = trained(tiny_model(tmp_path / "deep", hidden_size=32, head_dim=8, num_hidden_layers=3), 1)
    with pytest.raises(BadCheckpoint, match=r"master\.model\.layers\.2\.\S+ is missing.* and \d+ more"):
        load(deeper, checkpoint)
    shallow = trained(tiny_model(tmp_path / "flat", hidden_size=32, head_dim=8, num_hidden_layers=1), 1)
    with pytest.raises(BadCheckpoint, match="is not this model's"):
        load(shallow, checkpoint)


def test_half_the_moments_are_refused(model: Path, checkpoint: Path, tmp_path: Path):
    import safetensors.torch

    copy = tmp_path / "c"
    shutil.copytree(checkpoint, copy)
    file = copy / "trainer/state.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["exp_avg.model.norm.weight"]
    safetensors.torch.save_file(tensors, file)
    state = json.loads((copy / "trainer/state.json").read_text())
    state["files"]["trainer/state.safetensors"] = {"bytes": file.stat().st_size, "sha256": disk.sha256(file)}
    (copy / "trainer/state.json").write_text(json.dumps(state))
    with pytest.raises(BadCheckpoint, match=r"model\.norm\.weight has some of its moments only"):
        load(trained(model, 1), copy)
