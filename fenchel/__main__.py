"""python -m fenchel: the console script, where that is not on the path."""

import sys

from fenchel.cli import main

if __name__ == "__main__":
    sys.exit(main())
