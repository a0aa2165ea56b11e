"""fenchel serve: what is refused before a port is open."""

from pathlib import Path

import pytest

from fenchel.cli import main
from fenchel.cli.serve import read_key


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "99999"], "a port is a number from 0 to 65535"),
        (["--rows", "0"], "--rows 0 should be 1 to 4096"),
        (["--deadline", "0"], "--deadline 0.0 should be a number of seconds above 0"),
        (["--origin", "localhost"], "should be as in http://localhost:3000"),
        (["--host", "0.0.0.0", "--port", "0"], "--without-key"),
    ],
)
def test_wrong_flags_get_a_sentence(
    tmp_path: Path,
    flags: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FENCHEL_KEY", raising=False)
    assert main(["serve", str(tmp_path), *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert sentence in said


def test_without_the_extra_it_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenchel.cli.serve.find_spec", lambda _: None)
    assert main(["serve", str(tmp_path)]) == 2
    assert "pip install 'fenchel[serve]'" in capsys.readouterr().err


def test_a_key_is_one_word_of_a_file_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    monkeypatch.setenv("FENCHEL_KEY", "other")
    assert read_key(file) == "sesame"
    assert read_key(None) == "other"
    for wrong in ("", "two words", "schlüssel"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="one word"):
            read_key(file)
