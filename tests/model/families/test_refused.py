"""What the refusal of an unknown family names, reads it."""

from pathlib import Path
from typing import Any

import pytest

from tests.model.families.refused import make, named, reason

ALL = ["inspect", "lens", "ablate", "patch", "attach"]
ALTUP = {"altup_num_inputs": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("olmo", {}, ALL),
        ("deepseek_v3", {}, ALL),
        ("camembert", {"kind": "MaskedLM"}, ["inspect", "attach"]),
        ("bart", {}, ALL[:4]),
        ("bart", {"kind": "Seq2SeqLM", "encoder_layers": 1, "encoder_ffn_dim": 8}, []),
        ("diffllama", {}, ["attach"]),
        ("deepseek_v32", {}, []),
        ("gemma3n_text", ALTUP, []),
        ("jamba", {}, []),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_a_refusal_names_reads_the_directory(
    family: str, changes: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    make(family, tmp_path, **changes)
    assert named(tmp_path) == expected
    assert {command: reason(command, tmp_path) for command in expected} == dict.fromkeys(expected)
