"""Whole files of records: looked at, checked, converted; `grainmill.files` has its names."""
