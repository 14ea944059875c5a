"""The sequential stages of a running pipeline, one file each."""
