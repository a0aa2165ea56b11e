"""python -m benchmarks [NAME ...]: run the benchmarks named, or all of them.

A benchmark is a file of this folder with a function ``main``; it prints a table and writes
results/NAME.json.
"""

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
    for name in asked:
        if name not in NAMES:
            print(
                f"there is no benchmark {name!r}; there are: {', '.join(NAMES)}.", file=sys.stderr
            )
            return 2
    for name in asked or NAMES:
        print(f"\n{name}")
        import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
