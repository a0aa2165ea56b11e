"""fenchel lens: laws by layer, a lens that is fitted, kept and read, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fenchel
from fenchel.cli import main
from fenchel.cli.console import Console
from fenchel.cli.lens import _tables
from fenchel.data import train_tokenizer
from fenchel.interpretability import JacobianLens, fit_lens
from fenchel.model import ModelConfig, Transformer

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers."""
    path = tmp_path_factory.mktemp("models") / "three"
    tokenizer = train_tokenizer([text_file.read_text()], 300)
    config = ModelConfig(vocabulary=300, width=16, layers=3, heads=2, context=32, initial="xavier")
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    fenchel.save(model, tokenizer, path)
    return path


def run(checkpoint: Path, text: Path, *words: str) -> int:
    return main(["lens", str(checkpoint), "--text", str(text), *words])


def test_without_a_flag_a_lens_is_fitted_to_what_follows_and_a_page_is_written(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: Said
) -> None:
    page = tmp_path / "lens.html"
    assert run(checkpoint, text_file, "--out", str(page), "--max-tokens", "12") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The lens is fitted to" in said
    assert "after these tokens, from" in said
    assert "offset top" in said
    assert "what each layer predicts next (jacobian lens)" in said
    html = page.read_text()
    assert re.findall(r'data-picture="([^"]+)"', html) == ["laws", "kl"]
    assert "function laws(" in html


def test_the_error_of_a_lens_is_certified_or_called_vacuous(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: Said
) -> None:
    flags = ["--max-tokens", "8", "--stretches", "1", "--out", str(tmp_path / "l.html")]
    assert run(checkpoint, text_file, *flags, "--radius", "1e-6", "--json") == 0
    small = json.loads(capsys.readouterr().out)["errors"]
    assert [row["layer"] for row in small] == [1, 2]
    assert not small[-1]["vacuous"]
    assert run(checkpoint, text_file, *flags, "--radius", "0.9") == 0
    assert "vacuous" in capsys.readouterr().out.split("error of the lens")[1]
    assert run(checkpoint, text_file, "--kind", "logit", "--radius", "0.1") == 2
    assert "certifies a fitted lens" in capsys.readouterr().err


def test_a_lens_is_saved_and_read_again(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: Said
) -> None:
    kept = tmp_path / "l.safetensors"
    assert run(checkpoint, text_file, "--save", str(kept), "--stretches", "3", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["fit"]["texts"] == 3
    assert [one["kind"] for one in first["lenses"]] == [
        "logit",
        "jacobian without offset",
        "jacobian",
    ]
    assert all(first["fit"]["error"][n] > 0 for n in ("1", "2"))
    assert first["lenses"][2]["agreement"][2]["top"] == 1.0
    words = first["words"]
    assert words[str(first["lenses"][0]["top"][0][0][0])]
    assert run(checkpoint, text_file, "--lens", str(kept), "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["lenses"] == first["lenses"]
    assert run(checkpoint, text_file, "--targets", "same", "--json") == 0
    same = json.loads(capsys.readouterr().out)
    assert same["fit"]["targets"] == "same"
    assert same["lenses"][2] != first["lenses"][2]
    assert run(checkpoint, text_file, "--kind", "logit", "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["lenses"] == first["lenses"][:1]
    assert plain["fit"] is None


def test_a_lens_without_means_and_of_some_layers_is_shown(
    checkpoint: Path, text_file: Path, tmp_path: Path, capsys: Said
) -> None:
    model = fenchel.load(checkpoint).model
    kept, page = tmp_path / "published.safetensors", tmp_path / "p.html"
    JacobianLens.from_matrices(model, {2: torch.eye(16)}, texts=1000).save(kept)
    assert run(checkpoint, text_file, "--lens", str(kept), "--out", str(page)) == 0
    said = capsys.readouterr().out
    assert "J x top" in said
    assert "offset top" not in said
    assert "from 1000 stretches" in " ".join(said.split())
    assert "J x" in page.read_text()


def test_tokens_that_look_like_markup_are_shown_as_they_are(capsys: Said) -> None:
    law: dict[str, Any] = {"layer": 1, "top": 1.0, "kl": 0.0, "rank": 1.0, "loss": 1.0}
    lens = {"kind": "logit", "layers": [1], "first": [1, 1], "agreement": [law]}
    record = {
        "subject": {"name": "[/b]", "family": "llama", "parameters": 1},
        "text": "[bold]",
        "tokens": ["[/i]", " [red]"],
        "fit": None,
        "words": {5: "[/u]"},
        "lenses": [{**lens, "top": [[[5], [5]]]}],
    }
    for table in _tables(record):
        Console().terminal.print(table)
    said = capsys.readouterr().out
    assert all(word in said for word in ("[/b]", "[bold]", "[/i]", "·[red]", "[/u]"))


def test_a_short_text_is_its_own_fit_and_a_large_model_has_none(
    checkpoint: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the people of these States have peace")
    assert run(checkpoint, short, "--json") == 0
    assert "these tokens themselves" in json.loads(capsys.readouterr().out)["did"]
    monkeypatch.setattr("fenchel.cli.lens._QUICK", {"cpu": 1.0})
    assert run(checkpoint, short, "--json") == 0
    did = json.loads(capsys.readouterr().out)["did"]
    assert re.search(r"Only the logit lens is shown: a Jacobian lens takes about \d+ s", did)
    assert run(checkpoint, short, "--kind", "jacobian", "--json") == 0
    assert json.loads(capsys.readouterr().out)["fit"]["texts"] == 1


def test_a_model_of_one_layer_has_its_own_law(
    run_directory: Path, text_file: Path, capsys: Said
) -> None:
    assert run(run_directory, text_file, "--json") == 0
    assert "the model has one layer" in json.loads(capsys.readouterr().out)["did"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lens", "other"], "was made with other weights"),
        (["--lens", "pickle.pt"], "pickle"),
        (["--lens", "missing"], "missing"),
        (["--lens", "other", "--save", "x"], "--lens has a lens already"),
        (["--kind", "logit", "--save", "x"], "--kind logit fits no lens"),
        (["--stretches", "0"], "should be 1 or more"),
        (["--fit", "missing.txt"], "there is no text"),
        (["--fit", "short.txt"], "--fit short.txt has fewer tokens than a stretch of"),
        (["--max-tokens", "1"], "should be 2 or more"),
    ],
)
def test_bad_input_gets_a_sentence(
    words: list[str],
    sentence: str,
    checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Transformer(ModelConfig(vocabulary=300, width=16, layers=3, heads=2, context=32))
    fit_lens(model, [[1, 2, 3, 4]], skip=1).save("other")
    torch.save({"J": {}}, "pickle.pt")
    Path("short.txt").write_text("peace")
    assert run(checkpoint, text_file, "--json", *words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not Path("x").exists()
