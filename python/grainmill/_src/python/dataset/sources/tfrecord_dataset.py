"""Names of `grain._src.python.dataset.sources.tfrecord_dataset`."""

from grainmill._sources.tfrecord_dataset import (
    TFRecordIterDataset,
    _TFRecordDatasetIterator,
    _TFRecordReader,
)

__all__ = ["TFRecordIterDataset", "_TFRecordDatasetIterator", "_TFRecordReader"]
