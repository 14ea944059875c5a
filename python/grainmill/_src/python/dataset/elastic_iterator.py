"""Names of `grain._src.python.dataset.elastic_iterator`."""

from grainmill.experimental import ElasticIterator

__all__ = ["ElasticIterator"]
