"""What a store gives in place of an element that it does not have."""

from typing import Final

MISSING: Final = object()
