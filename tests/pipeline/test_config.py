"""pipeline/config.py: defaults that follow from other sections, and sections that are none."""

from types import SimpleNamespace
from typing import Any

import pytest

from fenchel.pipeline.config import change_settings, settings


@pytest.mark.parametrize(
    ("model", "optimiser", "qk_norm"),
    [
        ({}, "score", True),
        ({}, "muon", False),
        ({"qk_norm": False}, "score", False),
        ({"qk_norm": True}, "muon", True),
        ({"scores": "l2"}, "score", False),  # distances have no norm of queries and keys
    ],
)
def test_score_trains_with_a_norm_of_queries_and_keys_unless_it_is_set(
    model: dict[str, Any], optimiser: str, qk_norm: bool
) -> None:
    config = settings({"model": model, "optim": {"optimiser": optimiser}})
    assert config.model.qk_norm is qk_norm


@pytest.mark.parametrize("section", ["text", "model", "optim", "train"])
@pytest.mark.parametrize("value", [3, "sotu", [1, 2]])
def test_a_section_that_holds_no_settings_is_refused_in_one_sentence(
    section: str, value: object
) -> None:
    with pytest.raises(ValueError, match=section):
        settings({section: value})


@pytest.mark.parametrize("train", [{}, {"compile": True}, {"compile": True, "cells": 4}])
def test_recomputation_may_begin_in_a_run_and_changes_no_bits(train: dict[str, Any]) -> None:
    said: list[str] = []
    before = {"train": {"steps": 3, **train}}
    callback: Any = SimpleNamespace(message=said.append)
    config = change_settings(before, {"train": {"recompute": "block"}}, callback)
    assert config.train.recompute == "block"
    assert said == ["train.recompute is now block: the run goes on."]
