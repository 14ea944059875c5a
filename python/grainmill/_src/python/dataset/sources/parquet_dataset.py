"""Names of `grain._src.python.dataset.sources.parquet_dataset`."""

from grainmill._sources.parquet_dataset import ParquetIterDataset

__all__ = ["ParquetIterDataset"]
