"""Tests that stop at each opcode of a function."""

import sys

import pytest

traced = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12),
    reason="CPython 3.12 traces no opcodes of a frame that asks for it in its first event",
)
