from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from examples import prepare_quickstart
from tests.examples.conftest import HANG_GUARD_S, ROOT, SHORT

USER, ASSISTANT, END = 4, 5, 1


def character(c: str) -> int:
    """Six markers, the newline, then printable ASCII from the space on."""
    return 7 + ord(c) - ord(" ")


def test_the_result_is_a_model_directory_whose_chat_template_gives_the_expected_ids(untrained_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(untrained_model)
    model = AutoModelForCausalLM.from_pretrained(untrained_model)

    ids = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Reverse: abc"},
            {"role": "assistant", "content": "cba"},
            {"role": "user", "content": "Reverse: xy"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )

    first, second, third = ([character(c) for c in text] for text in ("Reverse: abc", "cba", "Reverse: xy"))
    assert ids == [USER, *first, END, ASSISTANT, *second, END, USER, *third, END, ASSISTANT]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Reverse: abccbaReverse: xy"
    assert (tokenizer.eos_token_id, model.config.eos_token_id, model.config.model_type) == (END, END, "llama")
    assert model.config.vocab_size == len(tokenizer)


def prepare(out: Path, *arguments: str) -> None:
    """The script's main function; with `SHORT` only the training that `arguments` name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare_quickstart.py", str(out), *SHORT, *arguments])
        prepare_quickstart.main()


def test_a_finished_model_is_left_alone_and_another_one_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    prepare(out)
    before = (out / "model.safetensors").stat()
    capsys.readouterr()

    prepare(out)
    assert capsys.readouterr().out == f"{out} is ready\n"
    with pytest.raises(SystemExit, match=r"was made with .*'seed': 0.*--force replaces it"):
        prepare(out, "--seed", "1")

    after = (out / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    prepare(out, "--seed", "1", "--force")
    assert json.loads((out / "warm_start.json").read_text())["recipe"]["seed"] == 1


def test_a_folder_that_is_no_model_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(SystemExit, match="was not made by this program"):
        prepare(tmp_path, "--force")
    assert (tmp_path / "notes.txt").read_text() == "precious"


def test_training_follows_from_the_seed_alone(tmp_path: Path) -> None:
    weights: list[dict[str, bytes]] = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        prepare(tmp_path / name, "--seed", seed, "--softening-steps", "3")
        weights.append(
            {key: value.tobytes() for key, value in load_file(tmp_path / name / "model.safetensors").items()}
        )
    assert weights[0] == weights[1] != weights[2]


def test_an_interrupted_preparation_leaves_no_half_model(tmp_path: Path) -> None:
    out = tmp_path / "model"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "prepare_quickstart.py"), str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert "training" in process.stdout.readline()
        assert "step 0" in process.stdout.readline()
    finally:
        process.kill()
        process.wait(HANG_GUARD_S)
    assert not out.exists()
