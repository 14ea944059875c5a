"""Replaces itself with grainmill when it is imported; see `grainmill._as_grain`."""

from grainmill._as_grain import register

register()
