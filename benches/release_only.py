"""Warns where the engine to be measured was not compiled as wheels are: a bench imports this."""

import sys

from grainmill import _native

if getattr(_native, "profile", "release") != "release":  # earlier versions had no other
    print(
        f"the engine was compiled with profile `{_native.profile}`, slower than a wheel's: "
        "measure after `make release`",
        file=sys.stderr,
    )
