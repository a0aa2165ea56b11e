"""checkpoints/generation_config.py: what a directory says about generating, or why it cannot
be so.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fenchel.checkpoints import GenerationConfig, read_generation_config

NAME = "generation_config.json"


def write(path: Path, name: str = NAME, **settings: Any) -> Path:
    (path / name).write_text(json.dumps(settings))
    return path


def test_a_config_without_fields_is_greedy_without_an_end_token(tmp_path: Path) -> None:
    assert read_generation_config(write(tmp_path)) == GenerationConfig()


def test_tokens_and_draws_are_read(tmp_path: Path) -> None:
    said = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
    drawn = {"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": None}
    assert read_generation_config(write(tmp_path, **said, **drawn)) == GenerationConfig(
        bos=1, eos=(2, 7), pad=0, temperature=0.6, top_k=50, top_p=0.9
    )


def test_what_filters_nothing_there_filters_nothing_here(tmp_path: Path) -> None:
    off = {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_p": 0.0}
    assert read_generation_config(write(tmp_path, **off)) == GenerationConfig(temperature=1.0)


def test_a_penalty_counts_without_drawing(tmp_path: Path) -> None:
    penalties = {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.2}
    assert read_generation_config(write(tmp_path, **penalties)) == GenerationConfig(**penalties)


def test_settings_of_draws_count_only_when_drawing(tmp_path: Path) -> None:
    found = read_generation_config(write(tmp_path, temperature=0.6, top_k=5, eos_token_id=2))
    assert found == GenerationConfig(eos=(2,))


def test_an_older_directory_has_the_fields_in_config_json(tmp_path: Path) -> None:
    write(tmp_path, "config.json", eos_token_id=3, decoder_start_token_id=0)
    assert read_generation_config(tmp_path) == GenerationConfig(eos=(3,), decoder_start=0)


@pytest.mark.parametrize(
    "said",
    [
        {"eos_token_id": -1},
        {"eos_token_id": "2"},
        {"eos_token_id": True},
        {"eos_token_id": [2, None]},
        {"eos_token_id": [2.0]},
        {"eos_token_id": list(range(65))},
        {"pad_token_id": 2**40},
        {"bos_token_id": {}},
        {"do_sample": "yes"},
        {"do_sample": True, "temperature": -1.0},
        {"do_sample": True, "temperature": float("nan")},
        {"do_sample": True, "top_p": 1.5},
        {"do_sample": True, "top_k": 1.5},
        {"do_sample": True, "min_p": [0.1]},
        {"repetition_penalty": -1.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(said: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{NAME}: ({'|'.join(said)})="):
        read_generation_config(write(tmp_path, **said))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    write(tmp_path / "there")
    (tmp_path / NAME).symlink_to(tmp_path / "there" / NAME)
    with pytest.raises(ValueError, match="symbolic link"):
        read_generation_config(tmp_path)
