"""The command line: `python -m grainmill`, or `grainmill`."""

import sys

from grainmill._tools.main import main

if __name__ == "__main__":
    sys.exit(main())
