"""Empty base classes with the names of Grain's dataset classes.

Keras takes an object for a dataset of Grain if a class in its `__mro__` has such a name, and a
module that starts with `grain._src.python`. The classes that users see keep the module that they
are defined in, which pickles refer to.
"""


class MapDataset:
    """See the module."""

    __module__ = "grain._src.python.dataset.dataset"
    __slots__ = ()


class IterDataset:
    """See the module."""

    __module__ = "grain._src.python.dataset.dataset"
    __slots__ = ()
