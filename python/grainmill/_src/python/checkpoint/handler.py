"""Names of `grain._src.python.checkpoint.handler`."""

from grainmill.checkpoint import CheckpointHandler, CheckpointRestore, CheckpointSave

__all__ = ["CheckpointHandler", "CheckpointRestore", "CheckpointSave"]
