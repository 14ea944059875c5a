"""See `pandas.py`."""

raise ImportError
