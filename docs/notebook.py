"""examples/quickstart.ipynb, a notebook of the Python of README.md, for Colab and the like.

python docs/notebook.py
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "quickstart.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = "%pip install --quiet fenchel  # before the release: a wheel of `make dist`"


def notebook() -> str:
    """The text of the notebook: a cell per block, under the paragraph that leads to it."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Use it in PyTorch\n")[1]
    cells = [markdown("# fenchel in PyTorch\n\nThe code of README.md."), code(INSTALL)]
    *parts, _ = BLOCK.split(section)  # words, code, words, code, ...
    for words, block in zip(parts[::2], parts[1::2], strict=True):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words.strip())
        cells += [markdown(plain), code(block.strip())]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, sort_keys=True) + "\n"


def markdown(text: str) -> dict[str, Any]:
    """A cell of text."""
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def code(text: str) -> dict[str, Any]:
    """A cell of Python that has not run."""
    source = text.splitlines(keepends=True)
    empty: dict[str, Any] = {"execution_count": None, "metadata": {}, "outputs": []}
    return {"cell_type": "code", **empty, "source": source}


if __name__ == "__main__":
    FILE.write_text(notebook(), encoding="utf-8")
