"""A transform that computes elements one by one, to compare with one that computes blocks."""

import grainmill as grain


class OneByOne(grain.transforms.Map):
    """The same as another transform, without its functions of blocks."""

    def __init__(self, transform):
        self._transform = transform

    def map(self, element):
        return self._transform.map(element)
