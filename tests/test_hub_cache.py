"""fenchel/hub_cache.py: names of models, looked up in a cache as the hub makes it."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fenchel
from fenchel.cli import main
from fenchel.data import train_tokenizer
from fenchel.hub_cache import cache_folder, find_checkpoint, model_name, snapshots
from fenchel.inspection import open_model
from fenchel.model import ModelConfig, Transformer

NAME, COMMIT, OLDER = "acme/tiny-1.5", "ab" * 20, "cd" * 20


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama directory."""
    tokenizer = train_tokenizer(["the sea and the land"], 300)
    config = ModelConfig(vocabulary=tokenizer.vocabulary_size, width=16, layers=1, heads=2)
    path = tmp_path_factory.mktemp("exported") / "tiny"
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    fenchel.save(model, tokenizer, path)
    (path / "manifest.json").unlink()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def put(cache: Path, source: Path, commit: str = COMMIT, revision: str = "main") -> Path:
    """A snapshot of the files of a directory, as the hub's library makes it."""
    folder = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for path in (folder / "blobs", snapshot, (folder / "refs" / revision).parent):
        path.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(sorted(source.iterdir())):
        blob = folder / "blobs" / (f"{number:x}" * (64 if file.suffix == ".safetensors" else 40))
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (folder / "refs" / revision).write_text(commit)
    return snapshot


def test_a_name_is_its_snapshot_in_library_and_commands(
    cache: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = put(cache, exported)
    assert find_checkpoint(NAME) == find_checkpoint(f"{NAME}@main") == snapshot
    loaded, direct = fenchel.load(NAME), fenchel.load(exported)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded.model(ids), direct.model(ids))
    words = ["generate", NAME, "--prompt", "the", "--max-new-tokens", "3", "--temperature", "0"]
    assert main(words) == 0
    by_name = capsys.readouterr().out
    words[1] = str(exported)
    assert main(words) == 0
    assert by_name == capsys.readouterr().out
    assert model_name(snapshot) == NAME
    assert open_model(snapshot).name == NAME  # and not the commit
    assert [(one.name, one.revision, one.path) for one in snapshots()] == [(NAME, "main", snapshot)]


def test_a_revision_is_a_branch_a_tag_a_pull_request_or_a_commit(
    cache: Path, exported: Path
) -> None:
    newest, older = put(cache, exported), put(cache, exported, OLDER, "refs/pr/7")
    assert find_checkpoint(NAME) == newest
    for revision in ("refs/pr/7", OLDER):
        assert find_checkpoint(f"{NAME}@{revision}") == older
    (cache / "outside").write_text(COMMIT)
    climbing = f"{NAME}@../../outside"
    assert find_checkpoint(climbing) == Path(climbing)
    with pytest.raises(ValueError, match=rf"no revision v2 of {NAME} .*main.*--revision v2"):
        find_checkpoint(f"{NAME}@v2")


def test_a_path_that_exists_is_never_taken_for_a_name(cache: Path, exported: Path) -> None:
    put(cache, exported)
    Path(NAME).mkdir(parents=True)
    assert find_checkpoint(NAME) == Path(NAME)


@pytest.mark.usefixtures("cache")
def test_what_is_absent_is_answered_with_the_command_that_downloads_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "acme/other@v2"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "no run directory or checkpoint acme/other@v2" in said
    assert "hf download acme/other --revision v2" in said
    Path("mine").mkdir()
    for path in ("nothing", "runs/other", "mine/other", "acme/x@../y"):  # not there, or no name
        assert main(["generate", path]) == 2
        assert "hf download" not in capsys.readouterr().err


@pytest.mark.parametrize("index", [False, True])
def test_a_download_that_did_not_finish_is_named(index: bool, cache: Path, exported: Path) -> None:
    snapshot, missing = put(cache, exported), "model.safetensors"
    (snapshot / missing).unlink()
    if index:
        missing = "model-00002-of-00002.safetensors"
        (snapshot / "model-00001-of-00002.safetensors").write_bytes(b"")
        table = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": missing}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=f"{NAME} without {missing}: its download did not finish"):
        find_checkpoint(NAME)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_without_its_blob_is_a_file_that_is_missing(
    missing: str, cache: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (put(cache, exported) / missing).resolve().unlink()
    with pytest.raises(ValueError, match=f"{NAME} without {missing}: .* hf download {NAME}"):
        find_checkpoint(NAME)
    assert main(["list", "checkpoints"]) == 0
    assert f"{NAME}: {missing} is missing" in capsys.readouterr().out


def test_a_model_whose_settings_were_not_downloaded_is_named(cache: Path, exported: Path) -> None:
    snapshot = put(cache, exported)
    (snapshot / "README.md").symlink_to("../../blobs/" + "9" * 40)  # which nothing reads
    assert find_checkpoint(NAME) == snapshot
    (snapshot / "config.json").unlink()
    with pytest.raises(ValueError, match=r"without config\.json"):
        find_checkpoint(NAME)


def test_folders_of_hostile_names_are_not_listed(
    cache: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, exported)
    for name in ("\x1b[31mred--x", "..--x", "a--b--c--..", "evil--a b"):
        (cache / f"models--{name}" / "snapshots" / COMMIT).mkdir(parents=True)
    assert [one.name for one in snapshots()] == [NAME]
    assert main(["list", "checkpoints"]) == 0
    assert "\x1b[31m" not in capsys.readouterr().out


def test_a_model_without_a_tokenizer_is_one_that_is_converted(
    cache: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (put(cache, exported) / "tokenizer.json").unlink()
    assert main(["list", "checkpoints", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["cache"]
    assert (row["served_by"], row["note"]) == (
        "convert",
        "tokenizer.json is missing, and no text is read.",
    )
    assert main(["convert", NAME, "out"]) == 0


@pytest.mark.parametrize("content", ["../../../outside", "", "ab" * 19, "ff" * 20, "\0" * 40])
def test_a_reference_leads_nowhere_but_to_a_snapshot(
    content: str, cache: Path, exported: Path
) -> None:
    snapshot = put(cache, exported)
    (snapshot.parents[1] / "refs" / "main").write_text(content)
    with pytest.raises(ValueError, match="no revision main"):
        find_checkpoint(NAME)


def test_a_snapshot_that_is_a_link_is_no_snapshot(cache: Path, exported: Path) -> None:
    snapshot = put(cache, exported)
    snapshot.rename(cache / "moved")
    snapshot.symlink_to(cache / "moved")
    with pytest.raises(ValueError, match="no revision main"):
        find_checkpoint(NAME)
    assert snapshots() == []


@given(st.text(st.sampled_from("ab./-@~\\\0 "), max_size=12))
def test_no_name_leads_out_of_the_cache(text: str) -> None:
    assert find_checkpoint(text) == Path(text)


def test_the_cache_is_where_the_hub_has_it() -> None:
    home = os.path.expanduser("~/.cache/huggingface/hub")
    assert cache_folder({}) == Path(home)
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert cache_folder({"HF_HOME": "/h", "XDG_CACHE_HOME": "/c"}) == Path("/h/hub")
    assert cache_folder({"HF_HUB_CACHE": "/x", "HF_HOME": "/h"}) == Path("/x")


def test_the_list_says_which_commands_serve_a_cached_model(
    cache: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, exported)
    put(cache, exported, OLDER, "refs/pr/3")
    other = cache / "models--acme--other" / "snapshots" / COMMIT
    other.mkdir(parents=True)
    settings = json.loads((exported / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "model_type": "opt"}))
    weights = (exported / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights)
    half = cache / "models--acme--half" / "snapshots" / COMMIT
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    assert main(["list", "checkpoints", "--json"]) == 0
    rows = {
        (row["name"], row["revision"]): row for row in json.loads(capsys.readouterr().out)["cache"]
    }
    assert rows[NAME, "main"]["served_by"] == "every command"
    assert rows[NAME, "main"]["family"] == "llama"
    assert rows[NAME, "refs/pr/3"]["parameters"] == rows[NAME, "main"]["parameters"] > 0
    assert rows["acme/other", COMMIT]["served_by"] == "inspect, lens, ablate, patch, attach"
    assert rows["acme/half", COMMIT]["served_by"] == "none"
    assert "download did not finish" in rows["acme/half", COMMIT]["note"]
    assert main(["list", "checkpoints"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "acme/half: model.safetensors is missing" in shown
    assert "every command" in shown


def test_an_empty_cache_is_a_sentence(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "checkpoints"]) == 0
    assert f"The Hugging Face cache {cache} has no model." in " ".join(
        capsys.readouterr().out.split()
    )
