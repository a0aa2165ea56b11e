"""fenchel/files.py: the old state or the new one, nothing between, and every byte checked."""

import errno
import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from fenchel import files
from fenchel.files import (
    Busy,
    Damaged,
    NoSpace,
    committed,
    locked,
    read_json,
    sweep,
    sweep_beside,
    verify,
)


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A committed folder of two files, one of them empty."""
    with committed(tmp_path / "box", {"kind": "box", "step": 5}) as folder:
        (folder / "a.txt").write_text("some words\n")
        (folder / "empty").touch()
    return tmp_path / "box"


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def reseal(folder: Path, change: Callable[[dict], object]) -> None:
    """Change a manifest and seal it again, as only an ill-meaning hand would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    manifest["seal"] = files._seal(manifest)
    (folder / "manifest.json").write_text(files._text(manifest))


# --- messages


def test_a_message_shows_emoji_sequences_as_they_are() -> None:
    for sequence in (
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family
        "\u2764\ufe0f\u200d\U0001f525",  # a heart on fire, with a variation selector
        "\U0001f469\U0001f3fd\u200d\u2695\ufe0f",  # a doctor, with a skin tone
        "\U0001f642\u200d\u2194\ufe0f",  # a head that is shaken
    ):
        assert files.printable(f"a {sequence} b") == f"a {sequence} b"


@pytest.mark.parametrize(
    "code",
    [
        *(0x00, 0x07, 0x08, 0x0A, 0x0D, 0x1B, 0x7F, 0x85, 0x9B, 0x9D, 0xAD, 0x61C, 0x180E),
        *(0x200B, 0x200C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2060, 0x2070)),
        *(0xD800, 0xFEFF, 0xFFF9, 0x1F0FF, 0xE0001, 0xE0067, 0xE007F),
    ],
)
def test_a_message_shows_no_control_or_format_character(code: int) -> None:
    """Alone, between emoji, and beside the joiner of two emoji."""
    wrong, emoji = chr(code), "\U0001f468"
    assert files.printable(f"a{wrong}b") == "a?b"
    assert files.printable(f"{emoji}{wrong}{emoji}") == f"{emoji}?{emoji}"
    assert files.printable(f"{emoji}{wrong}\u200d{emoji}") == f"{emoji}??{emoji}"
    assert files.printable(f"{emoji}\u200d{wrong}{emoji}") == f"{emoji}??{emoji}"


def test_a_message_shows_no_joiner_outside_of_an_emoji_sequence() -> None:
    emoji, joiner = "\U0001f468", "\u200d"
    for text in ("aJb", "J", f"{emoji}J", f"J{emoji}", f"{emoji}JJ{emoji}", f"a\ufe0fJ{emoji}"):
        assert files.printable(text.replace("J", joiner)) == text.replace("J", "?")
    assert files.printable(f"{emoji}{joiner}{emoji}", 2) == f"{emoji}..."


def test_a_text_keeps_its_lines_spaces_and_joiners_and_no_control_character() -> None:
    text = "a\n\tb\u00a0c\u3000\u0645\u200c\u06cc \U0001f468\u200d\U0001f469"
    assert files.printable(text, None) == text
    assert files.printable("x" * 10_000, None) == "x" * 10_000
    for code in (0x00, 0x07, 0x08, 0x0D, 0x1B, 0x7F, 0x9B, 0xAD, 0x202E, 0x2066, 0xD800, 0xFEFF):
        assert files.printable(f"a{chr(code)}b", None) == "ab"


# --- writing


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_atomic(path, "old")
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == {"f"}


@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "f"
    files.write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(Path, call, fail)
    with pytest.raises(OSError, match="broken disk"):
        files.write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == {"f"}


def test_file_and_folder_are_synced_in_the_order_that_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    sync, rename, replace = files.sync, Path.rename, Path.replace

    def watch_sync(path: Path) -> None:
        happened.append(f"sync {path.name.partition('.tmp-')[0]}")
        sync(path)

    def watch_rename(path: Path, target: Path) -> Path:
        happened.append(f"rename {target.name}")
        return rename(path, target)

    def watch_replace(path: Path, target: Path) -> Path:
        happened.append(f"rename {target.name}")
        return replace(path, target)

    monkeypatch.setattr(files, "sync", watch_sync)
    monkeypatch.setattr(Path, "rename", watch_rename)
    monkeypatch.setattr(Path, "replace", watch_replace)
    with committed(tmp_path / "box", {}) as folder:
        (folder / "a").write_text("a")
    manifest = ["sync manifest.json", "rename manifest.json", "sync box"]
    assert happened == ["sync a", *manifest, "rename box", f"sync {tmp_path.name}"]


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "box"
    with committed(path, {}) as folder:
        (folder / "a").write_text("a")
        assert not path.exists()
    assert names(path) == {"a", "manifest.json"}
    assert names(tmp_path) == {"box"}


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_folder_that_was_not_finished_leaves_nothing(
    tmp_path: Path, error: BaseException
) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_text("a")
        raise error

    with pytest.raises(type(error)), committed(tmp_path / "box", {}) as folder:
        fill(folder)
    assert not names(tmp_path)


def test_a_committed_folder_is_never_written_over(sealed: Path) -> None:
    with pytest.raises(OSError), committed(sealed, {}) as folder:
        (folder / "a.txt").write_text("others")
    assert verify(sealed)["kind"] == "box"
    assert names(sealed.parent) == {"box"}


def test_files_are_as_readable_as_the_folder(tmp_path: Path) -> None:
    with committed(tmp_path / "box", {}) as folder:
        (folder / "private").touch(mode=0o600)
    folder_mode = (tmp_path / "box").stat().st_mode & 0o666
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "box").iterdir()} == {folder_mode}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_called_by_its_name_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    with pytest.raises(NoSpace, match=r"no space: .*box"), committed(tmp_path / "box", {}):
        raise OSError(number, "whatever the system says")
    assert not names(tmp_path)


def test_other_storage_errors_are_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), committed(tmp_path / "workspace", {}):
        raise PermissionError(errno.EACCES, "denied", "/workspace/no space left here")


def test_missing_space_is_refused_before_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    files.require_space(tmp_path, 3 * 2**20)
    with pytest.raises(NoSpace, match=r"3\.0 MiB free and 4\.0 MiB are needed"):
        files.require_space(tmp_path, 4 * 2**20)


def test_a_discarded_folder_loses_its_name_before_its_files(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: seen.append(sealed.exists()))
    files.discard(sealed)
    assert seen == [False]
    monkeypatch.undo()
    sweep(sealed.parent, lambda name: name == "box")
    assert not names(sealed.parent)


def test_sweeping_takes_what_dead_writers_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "step-000005.tmp-123").mkdir()
    (tmp_path / "step-000005.tmp-123" / "part").touch()
    (tmp_path / "config.toml.tmp-7").touch()
    (tmp_path / "link.tmp-8").symlink_to(tmp_path / "notes.tmp-mine")
    others = {"notes.tmp-mine", "a.tmp-1.txt", "tmp-5", "step-000005", "notes.tmp-5"}
    for name in others:
        (tmp_path / name).touch()
    sweep(tmp_path, {"step-000005", "config.toml", "link"}.__contains__)
    assert names(tmp_path) == others


# --- reading back


def dead_process() -> int:
    child = get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert child.pid is not None
    return child.pid


@pytest.mark.needs_posix("locked folders")
def test_beside_a_folder_only_what_its_dead_writers_left_is_taken(tmp_path: Path) -> None:
    dead = dead_process()
    (tmp_path / "somewhere").mkdir()
    kept = [
        f"tokens.tmp-{os.getpid()}",  # a living writer's
        f"other.tmp-{dead}",
        f"a.tokens.tmp-{dead}",
        "tokens.tmp-draft",
        "tokens",
    ]
    for name in (f"tokens.tmp-{dead}", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").write_bytes(b"ids")
    (tmp_path / f"tokens.tmp-{dead}" / f"manifest.json.tmp-{dead}").write_text("{")
    sweep_beside(tmp_path / "tokens", {"train.bin", "manifest.json"})
    assert {p.name for p in tmp_path.iterdir()} == {"somewhere", *kept}


@pytest.mark.parametrize("kind", ["more", "link", "file"])
def test_a_file_that_no_writer_leaves_is_not_swept(kind: str, tmp_path: Path) -> None:
    mine, stray = tmp_path / "mine", tmp_path / f"tokens.tmp-{dead_process()}"
    mine.mkdir()
    match kind:
        case "more":
            stray.mkdir()
            (stray / "notes.txt").write_text("mine")
        case "link":
            (mine / "train.bin").write_text("mine")
            stray.symlink_to(mine)
        case "file":
            stray.write_text("mine")
    sweep_beside(tmp_path / "tokens", {"train.bin"})
    assert stray.exists()
    assert kind != "link" or (mine / "train.bin").exists()


@pytest.mark.needs_posix("locked folders")
def test_a_folder_is_not_taken_while_its_writer_holds_it_though_its_process_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another container: its process has no number here."""
    monkeypatch.setattr(files.SYSTEM, "process_exists", lambda _: False)
    with committed(tmp_path / "tokens", {}) as fresh:
        (fresh / "train.bin").write_bytes(b"ids")
        sweep_beside(tmp_path / "tokens", {"train.bin"})
        assert fresh.is_dir()
    verify(tmp_path / "tokens")
    stray = tmp_path / fresh.name
    stray.mkdir()  # the same once nobody holds it
    sweep_beside(tmp_path / "tokens", {"train.bin"})
    assert not stray.exists()


def test_an_intact_folder_gives_its_header_back(sealed: Path) -> None:
    manifest = verify(sealed)
    assert (manifest["kind"], manifest["step"]) == ("box", 5)
    assert manifest["files"]["empty"]["bytes"] == 0


def test_every_single_flipped_bit_is_found(sealed: Path) -> None:
    """All of them, not a sample: the folder is small."""
    for file in sealed.iterdir():
        whole = file.read_bytes()
        for bit in range(8 * len(whole)):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(Damaged, match=file.name):
                verify(sealed)
        file.write_bytes(whole)
    verify(sealed)


def test_a_hexadecimal_digit_in_another_case_is_found(tmp_path: Path) -> None:
    with committed(tmp_path / "box", {"source": "caf\u00e9"}):
        pass
    path = tmp_path / "box" / "manifest.json"
    path.write_text(path.read_text().replace("\\u00e9", "\\u00E9"))  # the same to a JSON reader
    with pytest.raises(Damaged, match="not written as it was sealed"):
        verify(tmp_path / "box")


@pytest.mark.parametrize("name", ["a.txt", "manifest.json"])
def test_a_file_cut_anywhere_is_found(sealed: Path, name: str) -> None:
    size = (sealed / name).stat().st_size
    for length in (size - 1, size // 2, 1, 0):
        os.truncate(sealed / name, length)
        with pytest.raises(Damaged, match=name):
            verify(sealed)


def test_a_missing_an_added_and_an_exchanged_file_are_found(sealed: Path) -> None:
    (sealed / "more").touch()
    with pytest.raises(Damaged, match="holds more"):
        verify(sealed)
    (sealed / "a.txt").rename(sealed / "kept")
    (sealed / "more").rename(sealed / "a.txt")
    with pytest.raises(Damaged, match=r"a\.txt has 0 bytes"):
        verify(sealed)
    (sealed / "a.txt").unlink()
    with pytest.raises(Damaged, match=r"a\.txt is missing"):
        verify(sealed)


def test_a_link_is_not_followed_even_to_the_same_bytes(sealed: Path) -> None:
    (sealed / "a.txt").rename(sealed.parent / "outside")
    (sealed / "a.txt").symlink_to(sealed.parent / "outside")
    with pytest.raises(Damaged, match="not a plain file"):
        verify(sealed)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_a_broken_disk_is_damage_and_other_read_errors_are_themselves(
    sealed: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_: Path) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "sha256", fail)
    expected = Damaged if number == errno.EIO else OSError
    with pytest.raises(expected, match=os.strerror(number)) as refused:
        verify(sealed)
    assert number != errno.EIO or "Errno" not in str(refused.value)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "socket"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT])
def test_only_a_regular_file_is_opened_and_a_pipe_is_not_waited_for(
    tmp_path: Path, kind: str, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path, target = Path("entry"), Path("target")
    target.write_text("outside")
    match kind:
        case "link":
            path.symlink_to(target)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
    with pytest.raises(Damaged, match="entry is missing or not a plain file"):
        files.open_regular(path, flags)
    assert target.read_text() == "outside"


def test_a_file_with_two_names_is_read_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("shared with a backup")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert files.read_regular(tmp_path / "b", 100) == b"shared with a backup"
    with pytest.raises(Damaged, match="has a second name"):
        files.open_regular(tmp_path / "b", os.O_RDWR)


def test_an_atomic_write_does_not_go_through_a_link_under_its_temporary_name(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / f"f.tmp-{os.getpid()}").symlink_to(outside)
    files.write_atomic(tmp_path / "f", "new")
    assert outside.read_text() == "mine"
    assert not (tmp_path / "f").is_symlink()


def flips(data: bytes) -> Iterator[bytes]:
    """Every content that differs from ``data`` in one bit."""
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def test_every_single_flipped_bit_of_a_sealed_object_is_found_or_harmless(tmp_path: Path) -> None:
    """Harmless: the numbers and texts under the keys that were written are the same."""
    path = tmp_path / "summary.json"
    value = {"status": "finished", "loss": 1.25e-07, "text": "café", "best": None, "list": [1]}
    files.write_sealed_json(path, value)
    assert files.read_sealed_json(path) == value
    for content in flips(path.read_bytes()):
        path.write_bytes(content)
        try:
            read = files.read_sealed_json(path)
        except Damaged:
            continue
        assert {key: read.get(key, "gone") for key in value} == value, content


def test_every_single_flipped_bit_of_a_sealed_text_is_found_or_harmless() -> None:
    body = 'seed = 1\n\n[train]\nsource = "a"\n'
    sealed = files.seal_text(body).encode()
    assert files.is_sealed(sealed)
    for content in flips(sealed):
        if files.is_sealed(content) is None:  # the seal itself was hit, so the rest was not
            assert content[len(sealed) - len(body) :] == body.encode()
        else:
            assert not files.is_sealed(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("files"),
        lambda m: m.update(files=["a.txt"]),
        lambda m: m["files"].update(a=None),
        lambda m: m["files"].update(a={"bytes": "many", "sha256": ""}),
        lambda m: m["files"].update({"../outside": {"bytes": 0, "sha256": ""}}),
        lambda m: m["files"].update({"/etc/passwd": {"bytes": 0, "sha256": ""}}),
        lambda m: m["files"].update({"..": {"bytes": 0, "sha256": ""}}),
        lambda m: m["files"].update({"": {"bytes": 0, "sha256": ""}}),
        lambda m: m["files"].update({"nul\0": {"bytes": 0, "sha256": ""}}),
    ],
)
def test_a_manifest_forged_with_a_right_seal_is_refused(
    sealed: Path, change: Callable[[dict], object]
) -> None:
    reseal(sealed, lambda _: None)
    verify(sealed)
    reseal(sealed, change)
    with pytest.raises(Damaged):
        verify(sealed)


def test_a_file_outside_the_folder_is_not_read_though_its_bytes_are_right(sealed: Path) -> None:
    outside = sealed.parent / "outside"
    outside.write_text("secret")
    entry = {"bytes": 6, "sha256": files.sha256(outside)}
    for name in ("../outside", str(outside)):
        reseal(sealed, lambda m, name=name: m.update(files={name: entry}))
        with pytest.raises(Damaged, match="names a file outside its folder"):
            verify(sealed)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"[1]", "a list"),
        (b"null", "a NoneType"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": 1,}', "not JSON"),
    ],
)
def test_json_of_any_wrong_kind_is_refused_in_one_way(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(Damaged, match=says):
        read_json(path)


def test_json_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    with pytest.raises(Damaged, match="more than 4 is not read"):
        read_json(path, limit=4)


# --- one writer


def hold(folder: Path, taken: object, done: object) -> None:
    with locked(folder):
        taken.set()
        done.wait(30)


def test_a_second_writer_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    context = get_context("fork")
    taken, done = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(tmp_path, taken, done))
    holder.start()
    try:
        assert taken.wait(30)
        with pytest.raises(Busy, match=f"process {holder.pid} on "), locked(tmp_path):
            pass
    finally:
        done.set()
        holder.join()
    with locked(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_free_and_its_name_is_not_given(tmp_path: Path) -> None:
    context = get_context("fork")
    taken, done = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(tmp_path, taken, done))
    holder.start()
    assert taken.wait(30)
    holder.kill()
    holder.join()
    left = (tmp_path / "run.lock").read_text()
    assert str(holder.pid) in left
    with locked(tmp_path):
        signed = (tmp_path / "run.lock").read_text()
        assert str(os.getpid()) in signed
        (tmp_path / "run.lock").write_text(left)  # as if the new holder had not signed yet
        with (tmp_path / "run.lock").open() as file:
            assert files._lock_holder(file.fileno()) == "another process"


def test_a_lock_ends_with_its_block_however_that_ends(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trouble"), locked(tmp_path):
        raise ValueError("trouble")
    with locked(tmp_path):
        pass
    assert (tmp_path / "run.lock").read_text() == ""


def test_a_lock_on_a_folder_that_was_taken_away_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.SYSTEM, "lock", lambda *_: (tmp_path / "run.lock").unlink())
    with pytest.raises(Busy, match="taken away"), locked(tmp_path):
        pass


def test_a_folder_of_any_bytes_comes_back_as_it_was(tmp_path: Path) -> None:
    draw = random.Random(3)
    contents = {f"f{n}": draw.randbytes(draw.choice([0, 1, 1000, 70_000])) for n in range(5)}
    with committed(tmp_path / "box", {}) as folder:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    verify(tmp_path / "box")
    assert {n: (tmp_path / "box" / n).read_bytes() for n in contents} == contents
