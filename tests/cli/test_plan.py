"""fenchel plan, as a person and as a program would call it."""

import json
from pathlib import Path

import pytest

from fenchel.cli import main

SEVEN_B = """
text = {vocabulary = 32000}
model = {width = 4096, layers = 32, heads = 32, hidden = 11008, context = 4096, tied = false}
train = {steps = 100_000, batch = 512, accumulate = 512, gather_dtype = "bfloat16"}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "7b.toml").write_text(SEVEN_B)
    return str(tmp_path / "7b.toml")


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_person_gets_two_tables_and_what_to_choose(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # tables are not cut
    assert main(["plan", config, "--gpus", "64"]) == 0
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.split()[1:2] in (["1"], ["8"])]
    by_table = [{len(line.split()) for line in lines[n : n + 6]} for n in (0, 6)]
    assert by_table == [{13}, {12}]
    assert max(map(len, lines)) <= 80
    shown = " ".join(output.split())
    assert "6,738,415,616 parameters on 64 GPUs (8 nodes of 8); 2,097,152 tokens" in shown
    assert "Fastest of fenchel train within 72 of 80 GB: shard=full (" in shown
    rows = shown.partition("grads: ")[0]
    assert rows.count(" none ") == rows.count(" full ") == rows.count(" node ") == 8
    assert shown.index("Fastest") < shown.index("GB per GPU")  # the answer comes first
    assert "train.steps=N" not in shown  # 7b.toml has them
    assert main(["plan", "gpt2", "--gpus", "8"]) == 0
    assert "Days need the length of the run: --set train.steps=N." in words(capsys)


def test_a_program_gets_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--gpus", "64", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 6_738_415_616
    assert len(plan["layouts"]) == 3 * 4 * 2
    full = next(row for row in plan["layouts"] if row["layout"]["shard"] == "full")
    assert full["memory"]["gradients"] == 4 * 105_287_744
    assert full["days"] == pytest.approx(100_000 * full["step"] / 86400)
    assert full["fits"] is True
    assert plan["advice"] is None


def test_where_nothing_fits_a_change_that_would_is_named(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--set", "train.accumulate=1"]
    assert main(["plan", config, "--gpus", "64", *more]) == 0
    shown = words(capsys)
    assert "Fastest of fenchel train within 72 of 80 GB: shard=full with recompute=block (" in shown
    assert "Without recomputation shard=full with context_group=2 fits with train.acc" in shown
    assert main(["plan", config, "--gpus", "64", "--memory", "20", *more]) == 0
    shown = words(capsys)
    assert "No layout of fenchel train fits 18 of 20 GB; shard=full with context_group=2" in shown
    assert "and recompute=block fits with train.accumulate=128 (" in shown
    assert main(["plan", config, "--gpus", "64", "--memory", "2"]) == 0
    assert "no change that was tried would make it fit" in words(capsys)


def test_a_preset_is_a_config_and_layouts_that_cannot_be_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "small", "--gpus", "64"]) == 0
    shown = words(capsys)
    assert "64 GPUs" in shown
    assert "Fastest of fenchel train within 72 of 80 GB: shard=full with context_group=2 (" in shown
    assert "shard=none and 5 more are left out: train.batch=32 does not split into 64" in shown


def test_the_formulas_are_compared_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "model.width=64 model.heads=2 model.layers=2 model.context=32 text.vocabulary=515"
    sets = [word for size in sizes.split() for word in ("--set", size)]
    assert main(["plan", "--gpus", "16", "--simulate", *sets]) == 0
    shown = words(capsys)
    assert "equal to the formulas: rank 0 of 16 holds" in shown
    assert "in 5 gathers and" in shown
    assert "in 3 reduce-scatters" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "0"], "--gpus=0 should be at least 1."),
        (["--gpus", "12"], "12 GPUs do not fill nodes of 8; give a multiple of 8."),
        (["--gpus", "8", "--per-node", "-1"], "--per-node=-1 should be at least 1."),
        (["--gpus", "8", "--memory", "0"], "--memory=0.0 should be above 0 and finite."),
        (["--gpus", "8", "--rate", "nan"], "--rate=nan should be above 0 and finite."),
        (["--gpus", "8", "--attention-rate", "-3"], "--attention-rate=-3.0 should be above 0"),
        (["--gpus", "64", "--set", "train.batch=3"], "train.batch=3 does not split into 64 cells"),
        (["--gpus", "8", "--set", "model.width=x"], "width"),
        (
            ["lama-7b", "--gpus", "8"],
            "neither a file of settings nor a preset; did you mean 'llama-",
        ),
        (["missing.toml", "--gpus", "8"], "there is no settings file missing.toml."),
        ([], "--gpus"),
    ],
)
def test_wrong_arguments_get_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("fenchel: ")
    assert sentence in error
    assert "Traceback" not in error
