"""fenchel train, as a person and as a program would call it."""

import json
import logging
import tomllib
from pathlib import Path

import pytest

from fenchel.checkpoints import Progress
from fenchel.cli import main
from fenchel.distributed.processes import launch
from fenchel.pipeline import RunConfig
from fenchel.train import Outcome

FILES = "config.toml environment.json metrics.jsonl report.html sample.json summary.json".split()


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence that wrong input gets."""
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("fenchel: ")
    assert told.count("\n") == 1
    assert "Traceback" not in told
    return told


def test_a_run_directory_holds_the_whole_story(run_directory: Path) -> None:
    assert all((run_directory / name).is_file() for name in [*FILES, "tokenizer.json"])
    summary = json.loads((run_directory / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["baselines"].keys() == {"bzip2", "ngram5"}
    assert summary["validation"]["bits_per_byte"] > 0
    assert "width" in summary["defaults"]["model"]  # of a smaller model than the default


def test_a_run_by_cross_entropy_is_read_without_a_warning(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run_directory), "--prompt", "the", "--max-new-tokens", "1"]) == 0
    assert "train.loss" not in capsys.readouterr().err


def test_every_log_line_has_the_health_of_each_layer(run_directory: Path) -> None:
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").open()]
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == [5, 10, 15, 20]
    for line in trained:
        for name in ("max_logit", "entropy", "effective", "support"):
            assert len(line[f"attention/{name}"]) == 1
        assert line["train/gradient_norm"] > 0


def test_the_settings_kept_are_complete(run_directory: Path) -> None:
    kept = tomllib.loads((run_directory / "config.toml").read_text())
    assert kept["format"] == 2
    assert kept["train"]["steps"] == 20
    assert kept["model"]["vocabulary"] <= 300
    assert kept["optim"]["optimiser"] == "muon"


def test_a_config_file_is_read_and_flags_win(
    text_file: Path, tmp_path: Path, flags: list[str]
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(f'seed = 5\n[text]\nsource = "{text_file}"\n[train]\nsteps = 7\nbatch = 2\n')
    out = tmp_path / "run"
    short = ["--steps", "3", "--seed", "6"]
    assert main(["train", str(config), *short, "--out", str(out), *flags]) == 0
    kept = tomllib.loads((out / "config.toml").read_text())
    assert (kept["seed"], kept["train"]["steps"], kept["train"]["batch"]) == (6, 3, 4)


def test_a_budget_replaces_the_steps_of_a_config_file(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.toml of a run has both: the steps that its own budget allowed."""
    seen: list[RunConfig] = []

    def begin(config: RunConfig, *_: object) -> Outcome:
        seen.append(config)
        return Outcome("finished", Progress())

    monkeypatch.setattr("fenchel.pipeline.run.begin", begin)
    config, out = str(run_directory / "config.toml"), str(tmp_path / "x")
    assert main(["train", config, "--budget", "90s", "--out", out]) == 0
    assert main(["train", config, "--out", out]) == 0
    assert [(one.train.steps, one.train.budget) for one in seen] == [(None, "90s"), (20, "2m")]


def test_settings_override_a_preset_which_the_run_does_not_name(
    text_file: Path, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["train", "--preset", "llama-1b", "--text", str(text_file), "--out", str(out), *flags]
    small = "model.heads=2 model.kv_heads=1 model.hidden=24 train.accumulate=2".split()
    sets = [word for setting in small for word in ("--set", setting)]
    assert main([*words, "--steps", "1", *sets]) == 0
    kept = tomllib.loads((out / "config.toml").read_text())
    assert "preset" not in kept
    model = kept["model"]
    assert (model["width"], model["layers"], model["context"], model["hidden"]) == (16, 1, 16, 24)
    assert (model["rotary_base"], kept["optim"]["learning_rate"]) == (5e5, 5e-4)
    assert (kept["train"]["batch"], kept["train"]["accumulate"]) == (4, 2)
    words = ["train", str(out / "config.toml"), "--preset", "base"]
    assert "both give model.width; leave out one" in error_of(words, capsys)
    words = ["train", "--resume", str(out), "--preset", "base"]
    assert "preset cannot change in a run that has begun" in error_of(words, capsys)


def test_a_program_gets_the_summary_as_json(
    text_file: Path, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--text", str(text_file), "--steps", "2", "--out", str(tmp_path / "r")]
    assert main([*words, "--json", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "finished"
    assert told["step"] == 2


@pytest.mark.parametrize("loss", ["entmax", "sparsemax", "hard"])
def test_a_sparse_loss_trains_and_names_its_measures(
    loss: str, text_file: Path, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["train", "--text", str(text_file), "--steps", "5", "--set", f"train.loss={loss}"]
    words += ["--set", "model.tied=true"]  # a fresh LM head of its own is 0, and so is "hard" then
    assert main([*words, *flags, "--set", "train.log_every=1", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    validation = json.loads((out / "summary.json").read_text())["validation"]
    assert {"loss", "accuracy", "support", "uncovered"} <= validation.keys()
    assert validation["loss"] > 0.0
    assert 0.0 <= validation["accuracy"] <= 1.0
    assert validation["support"] >= 1.0
    assert ("bits_per_byte" in validation) == (validation["uncovered"] == 0.0)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0]
    if validation["uncovered"]:
        assert "of the targets have probability 0" in " ".join(shown.split())
        assert "of the targets probability 0" in (out / "report.html").read_text()
    assert main(["generate", str(out), "--prompt", "the", "--max-new-tokens", "1"]) == 0
    assert f"trained by train.loss={loss}" in capsys.readouterr().err
    assert main(["eval", str(out), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    for name in ("loss", "accuracy", "support", "uncovered", "bits_per_byte"):
        assert evaluated[name] == pytest.approx(validation.get(name)), name
    assert main(["eval", str(out)]) == 0
    assert f"uncovered      {validation['uncovered']:.4f}" in capsys.readouterr().out
    assert "leave out --calibration" in error_of(["eval", str(out), "--calibration"], capsys)
    words = ["train", "--resume", str(out), "--steps", "6", "--set", "train.loss_alpha=1.2"]
    assert "the best step so far was chosen by it" in error_of(words, capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "train.loss=softmax"], "should be one of ('cross_entropy', 'entmax'"),
        (["--text", "no/such/file"], "no text"),
        (["--set", "model.widht=8"], "did you mean model.width"),
        (["--set", "modle.width=8"], "did you mean model"),
        (["--set", "model.width=30", "--set", "model.heads=4"], "does not split"),
        (["--set", "model.kind=encoder"], 'trains model.kind="decoder"'),
        (["--preset", "gpt-2"], "there is no preset 'gpt-2'; did you mean 'gpt2'?"),
        (["--set", "preset=huge"], "there is no preset 'huge'; known: demo, small, base, large"),
        (["--set", "model.width=wide"], "should be int"),
        (["--set", "model.width"], "name=value"),
        (["--set", "model.alpha=1.3"], "did you mean model.entmax_alpha?"),
        (["--set", "model.entmax_alpha=1.3"], "entmax_alpha=1.3 would do nothing; it needs choice"),
        (["--set", "optim.score_rate=0.1"], 'needs optimiser="score" or "trust"'),
        (["--set", "train.loss_alpha=1.2"], 'needs loss="entmax"'),
        (["--set", "train.balance_weight=0.5"], "needs model.experts"),
        (["--set", "seed=3", "--set", "seed.first=1"], "no setting 'seed.first'"),
        (["--set", "train=3", "--steps", "5"], "no setting 'train.steps'"),
        (["--seed", "much"], "--seed"),
        (["--set", "train.device=abacus"], "abacus"),
        (["--budget", "soon"], "90s, 3m or 1h"),
        (["--budget", "1m", "--steps", "3"], "not both"),
        (["--set", "train.budget=1m", "--steps", "3"], "not both"),
        (["--budget", "-3m"], "90s, 3m or 1h"),
        (["--steps", "1.5"], "--steps: it takes a whole number, got '1.5'"),
        (["--seed", "1e3"], "it takes a whole number"),
        (["--set", "train.steps=1.5"], "should be int, got 1.5"),
        (["--set", "model.width=1000000"], "memory"),
        (["--set", "model.layers=100000"], "memory"),
        (["--set", "train.batch=1000000000"], "memory"),
        (["--set", "train.batch=10000000", "--set", "train.accumulate=1"], "memory"),
        (["--set", "model.vocabulary=16777216", "--set", "model.width=65536"], "memory"),
        (["--set", "model.experts=10000000"], "memory"),
        (["--set", "tune.rank=3"], "the section tune belongs to fenchel tune DIR"),
        (["no_such.toml"], "no settings file"),
        (["--resume", "no/such/run"], "there is no run directory no/such/run"),
        (["--resume", "x", "--out", "y"], "--resume"),
        (["--log", "papyrus"], "tensorboard"),
    ],
)
def test_wrong_words_get_one_sentence(
    words: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in error_of(["train", *words], capsys)
    left = {p.name for p in tmp_path.rglob("*")} - {"runs"}
    assert not left, "a refused run leaves nothing behind"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\x00\x01\x02" * 100, "zero byte"),
        (b"\xfa\xff\xfe" * 100, "UTF-8"),
        (b"too short for its context", "token"),
    ],
    ids=["empty", "binary", "not UTF-8", "shorter than the context"],
)
def test_a_text_that_cannot_be_trained_on_gets_one_sentence(
    content: bytes, says: str, tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    words = ["train", "--text", str(path), "--steps", "2", "--out", str(tmp_path / "run")]
    assert says in error_of([*words, *flags], capsys)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_never_written_over(
    run_directory: Path, text_file: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in run_directory.rglob("*")}
    words = ["train", "--text", str(text_file), "--out", str(run_directory), *flags]
    assert "holds a run already" in error_of(words, capsys)
    assert {p: p.stat().st_mtime_ns for p in run_directory.rglob("*")} == before


def test_a_folder_or_a_text_in_place_of_the_settings_gets_the_right_flag(
    text_file: Path, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, flag in (
        (text_file.parent, f"--text {text_file.parent}"),
        (text_file, f"--text {text_file}"),
        (run_directory, f"--resume {run_directory}"),
    ):
        assert main(["train", str(path)]) == 2
        assert flag in capsys.readouterr().err


def test_a_text_too_short_for_meaningful_numbers_gets_a_warning(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a few words and no more than that\n" * 30)
    words = ["train", "--text", str(text), "--out", str(tmp_path / "run"), "--steps", "1", *flags]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "The text has 1,020 bytes and its held-out part " in said
    assert "too few for numbers that mean much" in said


@pytest.mark.needs_posix("several processes")
@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["trian"], 2)])
def test_processes_are_started_and_their_exit_code_is_returned(
    words: list[str],
    code: int,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the engine of torchrun, whose own report of a failure is not printed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        assert launch(2, words) == code
    finally:
        logging.disable(logging.NOTSET)
    assert not list(tmp_path.iterdir())  # torch makes a folder of logs
    output = "".join(capfd.readouterr())
    if code:  # the first process that fails ends the other, which may have said the same
        assert output.count("fenchel: there is no command 'trian'") in (1, 2)
    else:
        assert output.count("0.1.0") == 2
    assert len(output.splitlines()) < 7


def test_the_last_evaluation_of_a_short_run_reads_a_part_of_a_long_text(
    text_file: Path,
    tmp_path: Path,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fenchel.pipeline.task.LEAST_VALIDATED", 50)
    words = ["train", "--text", str(text_file), "--out", str(tmp_path / "run"), *flags]
    assert main([*words, "--steps", "1"]) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["text"]["validation_tokens"] > 51
    assert (summary["validation"]["tokens"], summary["validation_limit"]) == (50, 50)
    assert "first 50 tokens of validation text" in capsys.readouterr().out
    assert ", the first 50 tokens of it" in (tmp_path / "run/report.html").read_text()
