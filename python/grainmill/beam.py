"""Apache Beam transforms: reads and writes ArrayRecord, converts TFRecord, runs pipelines.

`pip install 'grainmill[beam]'` installs what this module needs. The transforms run on every
runner of Beam; workers need grainmill, too.
"""

from grainmill._beam.convert import ConvertTFRecordToArrayRecord
from grainmill._beam.materialize import MaterializeDataset
from grainmill._beam.pipelines import (
    convert_tf_to_arrayrecord_disk,
    convert_tf_to_arrayrecord_disk_match_shards,
    convert_tf_to_arrayrecord_gcs,
)
from grainmill._beam.read import (
    ReadAllFromArrayRecord,
    ReadFromArrayRecord,
    ReadFromTFRecordIndexed,
)
from grainmill._beam.write import WriteToArrayRecord
from grainmill.transforms import to_example

__all__ = [
    "ConvertTFRecordToArrayRecord",
    "MaterializeDataset",
    "ReadAllFromArrayRecord",
    "ReadFromArrayRecord",
    "ReadFromTFRecordIndexed",
    "WriteToArrayRecord",
    "convert_tf_to_arrayrecord_disk",
    "convert_tf_to_arrayrecord_disk_match_shards",
    "convert_tf_to_arrayrecord_gcs",
    "to_example",
]


def __dir__() -> list[str]:
    return sorted(__all__)
