"""fenchel/checkpoints/directory.py: only plain files of the directory, and a true index."""

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fenchel.checkpoints.directory import (
    bounded_json_file,
    open_directory,
    open_tensors,
    read_bounded_json,
    regular_file,
)
from fenchel.files import Damaged, committed

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(5.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded directory, with a file outside that nobody should open."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": A}, path / ONE)
    save_file({"b": B}, path / TWO)
    save_file({"b": B}, tmp_path / "outside.safetensors")
    index(path, {"a": ONE, "b": TWO})
    return path


def index(path: Path, where: Any, **besides: Any) -> None:
    said = {"weight_map": where, **besides}
    (path / "model.safetensors.index.json").write_text(json.dumps(said))


def test_shards_are_found_and_mapped(folder: Path) -> None:
    directory = open_directory(folder)
    assert directory.tensors.keys() == {"a", "b"}
    with open_tensors(directory) as tensors:
        a, b = tensors["a"], tensors["b"]
    assert torch.equal(a, A)
    assert torch.equal(b, B)


def test_changing_a_mapped_tensor_leaves_the_file_alone(folder: Path) -> None:
    before = (folder / ONE).read_bytes()
    with open_tensors(open_directory(folder)) as tensors:
        tensors["a"].zero_()
    assert (folder / ONE).read_bytes() == before


def test_a_single_file_needs_no_index(folder: Path) -> None:
    save_file({"c": A}, folder / "model.safetensors")
    assert open_directory(folder).tensors.keys() == {"c"}


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "..",
        "sub/one.safetensors",
        "./" + TWO,
        "..\\outside.safetensors",
        "C:outside.safetensors",
        "~/outside.safetensors",
        "~outside.safetensors",
        ".hidden.safetensors",
        "nul\x00.safetensors",
        "new\nline.safetensors",
        "a" * 300 + ".safetensors",
        "",
        "absent.safetensors",
    ],
)
def test_an_index_cannot_lead_out_of_the_directory(folder: Path, name: str) -> None:
    index(folder, {"a": ONE, "b": name})
    with pytest.raises(Damaged, match=r"plain names|cannot be read|no safetensors") as refusal:
        open_directory(folder)
    assert str(refusal.value).isprintable()


def test_an_absolute_path_is_refused(folder: Path) -> None:
    index(folder, {"a": ONE, "b": str(folder.parent / "outside.safetensors")})
    with pytest.raises(Damaged, match=r"plain names"):
        open_directory(folder)


@pytest.mark.parametrize("name", ["config.json", ONE, "model.safetensors.index.json"])
def test_no_symbolic_link_is_followed(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "moved")
    (folder / name).symlink_to(folder.parent / "moved")
    with pytest.raises(Damaged, match="symbolic link"):
        open_directory(folder)


def cached(folder: Path, tmp_path: Path) -> Path:
    """The same as a snapshot in the cache of Hugging Face."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for n, file in enumerate(folder.iterdir()):
        name = f"{n:x}" * (64 if file.suffix == ".safetensors" else 40)
        file.rename(blobs / name)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_a_snapshot_of_the_cache_is_read_as_it_is(folder: Path, tmp_path: Path) -> None:
    before = open_directory(folder)
    snapshot = cached(folder, tmp_path)
    found = open_directory(snapshot)
    assert found.config == before.config
    assert {name: place.entry for name, place in found.tensors.items()} == {
        name: place.entry for name, place in before.tensors.items()
    }
    (tmp_path / "way").symlink_to(snapshot)  # by another way
    assert open_directory(tmp_path / "way").config == before.config


@pytest.mark.parametrize(
    "spoilt", ["outside", "absolute", "namesake", "chain", "folder", "elsewhere"]
)
def test_a_snapshot_leads_nowhere_but_to_its_blobs(
    folder: Path, tmp_path: Path, spoilt: str
) -> None:
    snapshot = cached(folder, tmp_path)
    link, blobs = snapshot / "config.json", snapshot.parents[1] / "blobs"
    target = blobs / link.readlink().name
    match spoilt:
        case "outside" | "absolute":
            target.rename(tmp_path / "moved")
            link.unlink()
            link.symlink_to("../../../moved" if spoilt == "outside" else tmp_path / "moved")
        case "namesake":
            (tmp_path / target.name).write_bytes(b"{}")
            link.unlink()
            link.symlink_to(f"../../../{target.name}")
        case "chain":
            target.rename(tmp_path / "moved")
            target.symlink_to(tmp_path / "moved")
        case "folder":
            blobs.rename(tmp_path / "moved")
            blobs.symlink_to(tmp_path / "moved")
        case "elsewhere":
            snapshot.parent.rename(snapshot.parents[1] / "other")
            snapshot = snapshot.parents[1] / "other" / "0123"
    with pytest.raises(Damaged, match="symbolic link"):
        open_directory(snapshot)


def test_a_dangling_link_is_a_link(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to(folder / "nowhere")
    with pytest.raises(Damaged, match="symbolic link"):
        open_directory(folder)


def test_a_pipe_and_a_folder_are_not_opened(folder: Path) -> None:
    (folder / TWO).unlink()
    os.mkfifo(folder / TWO)  # opening it would wait for ever
    with pytest.raises(Damaged, match="not a regular file"):
        open_directory(folder)
    (folder / TWO).unlink()
    (folder / TWO).mkdir()
    with pytest.raises(Damaged, match="not a regular file"):
        open_directory(folder)


@pytest.mark.parametrize(
    ("where", "besides", "says"),
    [
        (None, {}, "weight_map"),
        ([ONE, TWO], {}, "weight_map"),
        ({}, {}, "weight_map"),
        ({"a": 1, "b": TWO}, {}, "besides files"),
        ({"a": ONE, "b": "pytorch_model.bin"}, {}, "no safetensors file"),
        ({"a": ONE, "b": "config.json"}, {}, "no safetensors file"),
        ({"a": ONE, "b": ONE}, {}, "where it is not"),
        ({"a": ONE, "b": TWO, "c": TWO}, {}, "where it is not"),
        ({"a": ONE}, {}, None),
        ({"a": TWO, "b": TWO}, {}, "where it is not"),
        ({"b": TWO}, {}, None),
        ({"a": ONE, "b": TWO}, {"metadata": {"total_size": 45}}, "total_size"),
        ({"a": ONE, "b": TWO}, {"metadata": {"total_size": "44"}}, "total_size"),
        ({"a": ONE, "b": TWO}, {"metadata": 3}, "total_size"),
        ({"a": ONE, "b": TWO}, {"metadata": {"total_size": 44}}, None),
    ],
)
def test_an_index_must_be_true(
    folder: Path, where: Any, besides: dict[str, Any], says: str | None
) -> None:
    index(folder, where, **besides)
    if says is None:
        assert open_directory(folder).tensors.keys() == where.keys()
        return
    with pytest.raises(Damaged, match=says):
        open_directory(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    save_file({"b": B, "a": A}, folder / TWO)
    with pytest.raises(Damaged, match="lies in 2 of the files"):
        open_directory(folder)


def test_a_tensor_that_the_index_does_not_mention_is_refused(folder: Path) -> None:
    save_file({"b": B, "c": A}, folder / TWO)
    with pytest.raises(Damaged, match="does not mention c"):
        open_directory(folder)


def test_a_pickle_is_named_and_never_opened(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*never"):
        open_directory(folder)


def test_without_weights_the_expected_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        open_directory(folder)


@pytest.mark.parametrize("settings", [{}, {"model_type": None}, {"model_type": ["llama"]}])
def test_a_config_needs_a_model_type(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="no model_type"):
        open_directory(folder)


def test_code_that_a_config_names_is_reported_and_not_run(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}})
    )
    (folder / "evil.py").write_text("raise SystemExit('this ran')")
    with pytest.warns(UserWarning, match="never runs it"):
        open_directory(folder)


def test_json_is_bounded_before_it_is_parsed(folder: Path) -> None:
    (folder / "config.json").write_text(" " * (2**20 + 1))
    with pytest.raises(Damaged, match="more than 1048576"):
        read_bounded_json(folder, "config.json")
    (folder / "tokenizer.json").write_text("[" + "[]," * 2_000_000 + "[]]")
    with pytest.raises(Damaged, match="values"):
        bounded_json_file(folder, "tokenizer.json")


def test_a_file_that_changes_after_its_header_was_read_is_refused(folder: Path) -> None:
    directory = open_directory(folder)
    save_file({"a": A.t().contiguous()}, folder / ONE)
    with open_tensors(directory) as tensors, pytest.raises(Damaged, match="changed"):
        tensors["a"]


def test_a_plain_name_is_a_file_of_the_directory(folder: Path) -> None:
    assert regular_file(folder, ONE) == folder / ONE


@pytest.fixture
def sealed(folder: Path) -> Path:
    """The same directory, sealed by a manifest of ours."""
    path = folder.with_name("sealed")
    with committed(path, {"format": 1}) as fresh:
        for file in folder.iterdir():
            (fresh / file.name).write_bytes(file.read_bytes())
    return path


def test_every_flipped_bit_of_a_sealed_directory_is_found(sealed: Path) -> None:
    draw = random.Random(0)
    for file in sorted(sealed.iterdir()):
        data = file.read_bytes()
        for _ in range(25):
            flipped = bytearray(data)
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            try:
                with open_tensors(open_directory(sealed)) as tensors:
                    assert torch.equal(tensors["a"], A)
                    assert torch.equal(tensors["b"], B)
                assert file.name == "manifest.json"  # not ours any more, and the rest is intact
            except ValueError:
                pass
        file.write_bytes(data)
    open_directory(sealed)


def test_a_change_of_the_users_own_is_named_with_the_way_to_accept_it(sealed: Path) -> None:
    (sealed / "LICENSE").write_text("added")
    open_directory(sealed)
    (sealed / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(Damaged, match=r"json has 22 bytes.*; if the change is yours, delete"):
        open_directory(sealed)
    (sealed / "manifest.json").unlink()
    open_directory(sealed)


def test_a_manifest_cannot_make_a_reader_hash_a_terabyte(folder: Path) -> None:
    path = folder.with_name("huge")
    with committed(path, {"format": 1}) as fresh:
        for file in folder.iterdir():
            (fresh / file.name).write_bytes(file.read_bytes())
        (fresh / "notes.bin").write_bytes(b"")
        (fresh / "other.safetensors").write_bytes(b"")
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("notes.bin", "other.safetensors"):
        with (path / name).open("wb") as file:
            file.truncate(2**40)
        manifest["files"][name]["bytes"] = 2**40
    del manifest["seal"]
    body = json.dumps(manifest, sort_keys=True).encode()
    manifest["seal"] = hashlib.sha256(body).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    with open_tensors(open_directory(path)) as tensors:
        assert torch.equal(tensors["b"], B)


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/etc/passwd", "absent"], ids=["beside", "system", "none"]
)
def test_a_manifest_that_is_a_link_or_names_one_is_refused(sealed: Path, target: str) -> None:
    (sealed / TWO).unlink()
    (sealed / TWO).symlink_to(target)
    with pytest.raises(Damaged, match="symbolic link"):
        open_directory(sealed)
    (sealed / "manifest.json").unlink()
    (sealed / "manifest.json").symlink_to(target)
    with pytest.raises(Damaged, match="symbolic link"):
        open_directory(sealed)
