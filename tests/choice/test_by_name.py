"""fenchel/choice/by_name.py: words to maps."""

import pytest

from fenchel.choice import Entmax, Hard, Softmax, Sparsemax, by_name


def test_each_name_gives_its_map() -> None:
    assert by_name("softmax", beta=2.0) == Softmax(2.0)
    assert by_name("entmax", alpha=1.2, beta=2.0) == Entmax(1.2, 2.0)
    assert by_name("sparsemax", beta=3.0) == Sparsemax(3.0)
    assert by_name("hard") == Hard()


def test_a_name_that_is_nearly_right_is_told_the_right_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'sparsemax'"):
        by_name("sparse-max")
    with pytest.raises(ValueError, match="known: softmax"):
        by_name("zzz")
