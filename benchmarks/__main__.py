"""python -m benchmarks [NAME ...] [--OPTION ...]: run the benchmarks named, or all of them.

A benchmark is a file of this folder with a function ``main``; it prints a table and writes
results/NAME.json. Words from the first that begins with a hyphen on are options of the one
benchmark that is named, if its ``main`` takes options.
"""

import inspect
import sys
from importlib import import_module
from pathlib import Path

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("__main__", "harness")
)


def main(words: list[str]) -> int:
    """Run the named benchmarks, or all, one after another; return the exit code."""
    cut = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    names, options = words[:cut], words[cut:]
    for name in names:
        if name not in NAMES:
            print(
                f"there is no benchmark {name!r}; there are: {', '.join(NAMES)}.", file=sys.stderr
            )
            return 2
    if options:
        run = import_module(f"benchmarks.{names[0]}").main if len(names) == 1 else None
        if run is None or not inspect.signature(run).parameters:
            print(f"{' '.join(names) or 'all'} takes no options: {options}.", file=sys.stderr)
            return 2
        run(options)
        return 0
    for name in names or NAMES:
        print(f"\n{name}")
        import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
