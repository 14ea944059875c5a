"""Waits for what other threads and processes do, instead of assuming that they have done it."""

import time


def becomes(condition, limit_s=60):
    """Whether `condition()` holds within the time; a busy machine may need much of it."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True
