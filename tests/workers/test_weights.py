"""The weights file: what it holds, and that a file which does not fit changes nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny_lm
from workers.weights import load_into, save_weights, tensor_names


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_travel_from_one_model_to_another(tmp_path: Path, tied: bool) -> None:
    source, target = (tiny_lm(seed=seed, tie_word_embeddings=tied) for seed in (1, 2))
    assert not same(snapshot(source), snapshot(target))
    size = save_weights(source, tmp_path / "w")
    assert size == (tmp_path / "w").stat().st_size
    assert ("lm_head.weight" in tensor_names(source)) is not tied
    load_into(target, tmp_path / "w")
    assert same(snapshot(source), snapshot(target))
    assert [path.name for path in tmp_path.iterdir()] == ["w"], "no temporary file is left"


def test_a_cast_file_fits_a_model_of_that_dtype_only(tmp_path: Path) -> None:
    model = tiny_lm(seed=1)
    save_weights(model, tmp_path / "w", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"BF16.*the model has F32"):
        load_into(model, tmp_path / "w")
    half = tiny_lm(seed=2).to(torch.bfloat16)
    load_into(half, tmp_path / "w")
    assert same(snapshot(half), snapshot(model.to(torch.bfloat16)))


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"missing {NAME}"),
        (lambda t: t.update(extra=torch.zeros(1)), "not in the model extra"),
        (
            lambda t: t.update({NAME: t[NAME][:, :-1].contiguous()}),
            rf"{NAME} is F32\[128, 63\], the model has F32\[128, 64\]",
        ),
        (lambda t: t.update({NAME: t[NAME].double()}), rf"{NAME} is F64\[128, 64\], the model has F32\[128, 64\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_whole(tmp_path: Path, change, message: str) -> None:
    model = tiny_lm(seed=1)
    save_weights(tiny_lm(seed=2), tmp_path / "w")
    tensors = load_file(tmp_path / "w")
    change(tensors)
    save_file(tensors, tmp_path / "w")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load_into(model, tmp_path / "w")
    assert same(before, snapshot(model))


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all", "cut"])
def test_a_missing_or_broken_file_is_refused(tmp_path: Path, content: bytes | str | None) -> None:
    model, path = tiny_lm(seed=1), tmp_path / "w"
    if content == "cut":
        save_weights(model, path)
        path.write_bytes(path.read_bytes()[:-7])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    before = snapshot(model)
    with pytest.raises(ValueError, match=str(path)):
        load_into(model, path)
    assert same(before, snapshot(model))
