"""docs/attentions.py: every call of the table runs, every map is where it stands."""

from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

import fenchel.attention
import fenchel.choice
from fenchel.choice import membership
from fenchel.model import ModelConfig, Transformer
from tests.test_reference import reference

VARIANTS = reference.attentions.VARIANTS
WITH_CODE = [row for row in VARIANTS if row.code]
WITH_MAP = [row for row in VARIANTS if row.map is not None]


def name(row: Any) -> str:
    return row.name


@pytest.mark.parametrize("row", WITH_CODE, ids=name)
def test_the_call_of_a_row_runs(row: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 6, 8, generator=draw) for _ in range(3))
    names: dict[str, Any] = {
        **vars(fenchel.attention),
        **{n: getattr(fenchel.choice, n) for n in fenchel.choice.__all__},
        "torch": torch,
        "logsigmoid": logsigmoid,
        "ModelConfig": ModelConfig,
        "q": q,
        "k": k,
        "v": v,
        "r": torch.randn(1, 4, 6, generator=draw),
        "positions": torch.arange(6),
    }
    found = eval(row.code, names)  # a table of ours
    if isinstance(found, ModelConfig):
        found = Transformer(found)(torch.arange(6)[None])
    assert found.shape[-2] == 6
    assert found.isfinite().all()


@pytest.mark.parametrize("row", WITH_MAP, ids=name)
def test_a_map_is_in_the_family_exactly_if_the_row_says_so(row: Any) -> None:
    assert row.map is not None
    found = membership(row.map, K=4, points=24)
    assert found.member == (row.verdict == "member")


def test_rows_outside_say_why_and_names_are_unique() -> None:
    assert len({row.name for row in VARIANTS}) == len(VARIANTS)
    assert all(row.note for row in VARIANTS if row.verdict != "member")
    assert all(row.code or row.map for row in VARIANTS if row.verdict == "member")
