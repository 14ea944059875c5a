"""A user's own dataset that passes on the elements and states of its parent."""

from under_test import grain


class PassingIterator(grain.DatasetIterator):
    """Its iterator."""

    def __next__(self):
        return next(self._parent)

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


class Passing(grain.IterDataset):
    """See the module."""

    def __iter__(self):
        return PassingIterator(self._parent.__iter__())
