"""fenchel/choice/named.py: words to maps."""

import pytest

from fenchel.choice import Entmax, Hard, Softmax, Sparsemax, named


def test_each_name_gives_its_map() -> None:
    assert named("softmax", beta=2.0) == Softmax(2.0)
    assert named("entmax", alpha=1.2, beta=2.0) == Entmax(1.2, 2.0)
    assert named("sparsemax", beta=3.0) == Sparsemax(3.0)
    assert named("hard") == Hard()


def test_a_name_that_is_nearly_right_is_told_the_right_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'sparsemax'"):
        named("sparse-max")
    with pytest.raises(ValueError, match="known: softmax"):
        named("zzz")
