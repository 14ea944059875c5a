"""Names of `grain._src.python.testing.experimental`."""

from grainmill.experimental import assert_equal_output_after_checkpoint

__all__ = ["assert_equal_output_after_checkpoint"]
