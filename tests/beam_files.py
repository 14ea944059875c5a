"""A file system of Beam that is not the local one: what it stores is below a local folder.

As elsewhere, files are reached by its interface only, and renaming does not replace a file.
"""

from pathlib import Path

from apache_beam.io.filesystem import (
    BeamIOError,
    CompressedFile,
    CompressionTypes,
    FileMetadata,
    FileSystem,
)

PREFIX = "far://"


class FarFiles(FileSystem):
    """Files with paths such as `far:///tmp/name`."""

    @classmethod
    def scheme(cls):
        return "far"

    @staticmethod
    def local(path):
        assert path.startswith(PREFIX), path
        return Path(path.removeprefix(PREFIX))

    def join(self, basepath, *paths):
        return "/".join([basepath.rstrip("/"), *paths])

    def split(self, path):
        folder, _, name = path.rpartition("/")
        return folder, name

    def mkdirs(self, path):
        if self.local(path).exists():
            raise BeamIOError(f"{path} exists")
        self.local(path).mkdir(parents=True)

    def has_dirs(self):
        return True

    def _list(self, dir_or_prefix):
        folder = self.local(dir_or_prefix.rpartition("/")[0])
        for path in sorted(folder.rglob("*")) if folder.exists() else []:
            if path.is_file():
                yield self.metadata(f"{PREFIX}{path}")

    def create(self, path, mime_type="", compression_type="auto"):  # noqa: ARG002
        return self.local(path).open("wb")

    def open(self, path, mime_type="", compression_type="auto"):  # noqa: ARG002
        file = self.local(path).open("rb")
        plain = compression_type in {CompressionTypes.UNCOMPRESSED, CompressionTypes.AUTO}
        return file if plain else CompressedFile(file, compression_type)

    def copy(self, source_file_names, destination_file_names):
        raise NotImplementedError

    def rename(self, source_file_names, destination_file_names):
        for source, destination in zip(source_file_names, destination_file_names, strict=True):
            if self.local(destination).exists() or not self.local(source).exists():
                raise BeamIOError(f"cannot rename {source} to {destination}")
            self.local(source).rename(self.local(destination))

    def exists(self, path):
        return self.local(path).exists()

    def size(self, path):
        return self.local(path).stat().st_size

    def last_updated(self, path):
        return self.local(path).stat().st_mtime

    def checksum(self, path):
        return str(self.size(path))

    def metadata(self, path):
        return FileMetadata(path, self.size(path), self.last_updated(path))

    def delete(self, paths):
        for path in paths:
            local = self.local(path)
            if local.is_dir():
                for inner in local.iterdir():
                    inner.unlink()
                local.rmdir()
            else:
                local.unlink()
