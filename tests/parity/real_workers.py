"""Runs pipelines of `worker_cases` with Grain's worker processes; prints what they give as JSON.

The argument is a file with `{case: state}`: states of grainmill, from which Grain continues.
"""

import json
import sys
from pathlib import Path

import grain
from absl import flags
from worker_cases import CASES, remaining, run


def main():
    # Grain's workers cannot be started otherwise.
    flags.FLAGS.mark_as_parsed()
    ours = json.loads(Path(sys.argv[1]).read_text())
    found = {
        name: [*run(grain, name), remaining(grain, name, ours[name]) if name in ours else None]
        for name in CASES
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
