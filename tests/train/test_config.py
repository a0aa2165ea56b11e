"""fenchel/train/config.py: what a run may be asked."""

import pytest

from fenchel.config import from_mapping, to_mapping
from fenchel.train.config import TrainConfig, seconds


@pytest.mark.parametrize(
    ("budget", "length"),
    [
        ("90s", 90.0),
        ("3m", 180.0),
        ("1h", 3600.0),
        ("1.5h", 5400.0),
        ("45", 45.0),
        (" 2 m ", 120.0),
        (30, 30.0),
        (0.5, 0.5),
    ],
)
def test_a_budget_may_be_written_in_many_ways(budget: str | float, length: float) -> None:
    assert seconds(budget) == length


@pytest.mark.parametrize(
    "budget", ["", "soon", "3 minutes", "-3m", "0", "0.0h", "1e3", "3m 2s", "nan", "9" * 400]
)
def test_a_budget_that_is_no_time_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match="90s, 3m or 1h"):
        TrainConfig(budget=budget)


def test_a_budget_in_seconds_may_come_from_a_settings_file() -> None:
    assert from_mapping(TrainConfig, {"budget": 90}).budget == 90.0


@pytest.mark.parametrize(
    "name",
    "batch accumulate log_every keep max_nonfinite_steps evaluate_tokens steps threads "
    "evaluate_every save_every".split(),
)
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 should be at least 1"):
        TrainConfig(**{name: 0})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"budget": None}, "either steps or budget"),
        ({"batch": 6, "accumulate": 4}, "accumulate=4 does not divide batch=6"),
        ({"batch": 6, "cells": 4}, "cells=4 does not divide batch=6"),
        ({"cells": 0}, "cells=0 does not divide"),
        ({"batch": 6, "accumulate": 2, "cells": 2}, "cells=2 divides a step already"),
        ({"shard": "half"}, "shard='half'"),
        ({"gather_dtype": "float16"}, "gather_dtype='float16'"),
        ({"shard": "none", "gather_dtype": "bfloat16"}, "gather_dtype"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"smoothing": 1.0}, "smoothing=1.0"),
        ({"precision": "float8"}, "precision='float8'"),
        ({"qk_clip": 0.0}, "qk_clip=0.0"),
        ({"entropy_floor": -1.0}, "entropy_floor=-1.0"),
        ({"entropy_weight": float("inf")}, "entropy_weight=inf"),
        ({"compile": True, "qk_clip": 30.0}, "compile=true hides queries and keys"),
        ({"compile": True, "entropy_floor": 1.0}, "compile=true hides queries and keys"),
        ({"log": ("papyrus",)}, "log='papyrus'"),
        ({"loss": "softmax"}, r"loss='softmax' should be one of \('cross_entropy', 'entmax'"),
        ({"loss": "entmax", "loss_alpha": 0.5}, "alpha=0.5"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainConfig(**settings)


def test_settings_come_back_from_plain_values() -> None:
    config = TrainConfig(steps=7, log=("tensorboard",), budget=90.0)
    assert from_mapping(TrainConfig, to_mapping(config)) == config
