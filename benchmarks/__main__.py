"""python -m benchmarks [NAME ...] [--OPTION ...]: run the benchmarks named, or all of them.

A benchmark is a file of this folder with a function ``main``; it prints a table and writes
results/NAME.json. What follows the first word that begins with a hyphen goes to the one benchmark
that was named, if its ``main`` takes options.
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


def main(asked: list[str]) -> int:
    """Run them one after another."""
    cut = next((i for i, word in enumerate(asked) if word.startswith("-")), len(asked))
    asked, options = asked[:cut], asked[cut:]
    for name in asked:
        if name not in NAMES:
            print(
                f"there is no benchmark {name!r}; there are: {', '.join(NAMES)}.", file=sys.stderr
            )
            return 2
    if options:
        run = import_module(f"benchmarks.{asked[0]}").main if len(asked) == 1 else None
        if run is None or not inspect.signature(run).parameters:
            print(f"{' '.join(asked) or 'all'} takes no options: {options}.", file=sys.stderr)
            return 2
        run(options)
        return 0
    for name in asked or NAMES:
        print(f"\n{name}")
        import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
