"""docs/checkpoints.md names every family, and the commands that serve it."""

import re

from fenchel.model.families.registry import MODEL_TYPES
from tests.model.families.command_matrix import BEGIN, END, PAGE, matrix


def test_the_page_has_the_table_that_is_found_by_trying() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert table.strip() == matrix().strip(), "run python -m tests.model.families.command_matrix"


def test_the_page_describes_every_family() -> None:
    families = PAGE.read_text().partition("## Families\n")[2].partition(BEGIN)[0]
    named = set(re.findall(r"`([\w-]+)`", families))
    assert named >= MODEL_TYPES
