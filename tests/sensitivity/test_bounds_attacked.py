"""tests/fuzz/bounds.py in a small form: every function that promises a bound is attacked."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fenchel.sensitivity import bounds
from tests.fuzz.bounds import ATTACKS, DTYPES, Draw, Tally, activations, at_a_point, run

NAME = re.compile(r"(^|_)(upper|lower|bound|bounds|ceiling|lipschitz|sensitivity|exact)(_|$)")
PROMISE = re.compile(
    r"(upper|lower) (bound|end)|never (more|less|exceed|fall)|from (above|below)|[Aa]n? bound "
)
PACKAGES = ("choice", "attention", "sensitivity", "optim", "evaluate")

NOT_A_BOUND = {
    "sensitivity.token_lipschitz.token_bound": "attacked in test_token_lipschitz.py",
    "sensitivity.token_lipschitz.logit_bound": "attacked in test_token_lipschitz.py",
    "choice.base.Choice.ceiling": "infinite; Capped has a finite one",
    "choice.hard.Hard.lipschitz": "infinite: an argmax jumps",
    "choice.hard.Hard.sensitivity": "0 where it is defined",
    "choice.hard.Hard.sensitivity_bounds": "0, and infinite at a tie",
    "choice.hypothesis_test.sample_size_lower": "of first order, by Stein's lemma",
    "evaluate.attention.attention_sensitivity": "spectral_norm per layer, attacked there",
    "optim.score.exact_step.exact": "the name of a solver",
    "optim.score.stacked_pairs.stacked_bounds": "clipping bounds of an optimiser's state",
    "optim.score.stacked_pairs.store_bounds": "clipping bounds of an optimiser's state",
    "sensitivity.attention_ball.bounded": "whether a map has bounds",
    "sensitivity.bounds.attention.penalty": "the mean of the logarithms of row",
    "sensitivity.bounds.attention.distance_attention": "the function that l2_attention bounds",
    "sensitivity.operator.Operator.ceiling": "None; every subclass with one is attacked",
    "sensitivity.operator.Operator.single": "a conversion",
    "sensitivity.perturbation.TokenLayer.ball_bound": "abstract; every layer is attacked",
    "sensitivity.rounding.round_up": "tests/sensitivity/test_rounding.py, against fractions",
    "sensitivity.rounding.outward": "tests/sensitivity/test_rounding.py, against fractions",
    "sensitivity.rounding.above": "tests/sensitivity/test_rounding.py, against fractions",
    "sensitivity.rounding.bound_dtype": "a dtype",
}


def functions() -> Iterator[tuple[str, Any]]:
    """Every public function and method of the packages, by its name below fenchel."""
    for package in PACKAGES:
        root = importlib.import_module(f"fenchel.{package}")
        for found in pkgutil.walk_packages(root.__path__, f"fenchel.{package}."):
            module = importlib.import_module(found.name)
            below = found.name.removeprefix("fenchel.")
            for name, value in vars(module).items():
                if name.startswith("_") or getattr(value, "__module__", None) != found.name:
                    continue
                if inspect.isfunction(value):
                    yield f"{below}.{name}", value
                elif inspect.isclass(value):
                    for method, code in vars(value).items():
                        code = code.fget if isinstance(code, property) else code
                        if not method.startswith("_") and inspect.isfunction(code):
                            yield f"{below}.{name}.{method}", code


def promises(name: str, value: Any) -> bool:
    last = name.rpartition(".")[2]
    summary = (inspect.getdoc(value) or "").partition("\n")[0]
    own = name.startswith("sensitivity.bounds.") and last in bounds.__all__
    return bool(own or NAME.search(last) or PROMISE.search(summary))


def test_every_function_that_promises_a_bound_is_attacked() -> None:
    promised = {name for name, value in functions() if promises(name, value)}
    attacked = {name for one in ATTACKS for name in one.names}
    assert not promised - attacked - NOT_A_BOUND.keys()


def test_what_is_attacked_or_excused_is_still_there() -> None:
    listed = {name for one in ATTACKS for name in one.names} | NOT_A_BOUND.keys()
    assert not listed - {name for name, _ in functions()}


def test_a_bound_that_is_too_small_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    covariance, activation = bounds.covariance, bounds.activation
    monkeypatch.setattr(bounds, "covariance", lambda *a, **k: (1 - 1e-6) * covariance(*a, **k))
    monkeypatch.setattr(bounds, "activation", lambda *a, **k: (1 - 1e-9) * activation(*a, **k))
    tally = Tally()
    for seed in range(10):
        for dtype in DTYPES:
            tally.add(at_a_point(Draw(seed, dtype, 40)), dtype, seed)
            tally.add(activations(Draw(seed, dtype, 40)), dtype, seed)
    seen = {row["bound"].partition(" ")[0] for row in tally.rows.values() if row["violations"]}
    broken = {"bounds.covariance.covariance", "bounds.feedforward.activation"}
    assert seen == {f"sensitivity.{name}" for name in broken}
    assert all("seed" in row for row in tally.rows.values() if row["violations"])


def test_a_run_attacks_every_bound_in_both_dtypes() -> None:
    tally = run(2000, batch=10)
    assert tally.total("attempts") >= 2000
    assert tally.total("violations") == 0
    assert {row["dtype"] for row in tally.rows.values()} == {"float32", "float64"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("one", ATTACKS, ids=[one.run.__name__ for one in ATTACKS])
def test_no_bound_is_violated(one: Any, dtype: torch.dtype) -> None:
    tally = Tally()

    @settings(max_examples=20 if one.share >= 0.2 else 4)
    @given(st.integers(0, 2**31))
    def attacked(seed: int) -> None:
        tally.add(one.run(Draw(seed, dtype, min(60, one.batch))), dtype, seed)

    attacked()
    wrong = [row for row in tally.rows.values() if row["violations"]]
    assert not wrong
