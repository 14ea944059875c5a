"""Manifests: what files have contained, to compare them with later."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grainmill import _atomic_file
from grainmill._url import identified, is_url

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMAT = "grainmill manifest of files"
_SAID = ("bytes", "records", "sha256")


class Manifest:
    """What a manifest says: the number of records, the length and the SHA-256 of files.

    It names them relative to its directory, so that all can be moved together.

    Args:
        path: The manifest, a local file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no manifest.

    Example:
        >>> from grainmill import files
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}')
        >>> before = files.verify("words.jsonl", with_sha256=True)
        >>> files.Manifest.write("words.manifest", [before])
        >>> manifest = files.Manifest("words.manifest")
        >>> manifest.differences(before), manifest.missing([])
        ([], [])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = Path(path).parent
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            is_manifest = content["format"] == _FORMAT and content["version"] == 1
            self._entries = {str(entry["path"]): entry for entry in content["files"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            is_manifest = False
        if not is_manifest:
            raise ValueError(f"{os.fspath(path)}: not a manifest of `grainmill verify`")

    @staticmethod
    def write(path: str | os.PathLike[str], reports: Sequence[dict[str, Any]]) -> None:
        """Writes a manifest, in place of one that is there.

        Args:
            path: The manifest, a local file.
            reports: What `verify` has returned for each file, with its SHA-256.

        Raises:
            OSError: It cannot be written; what was there is there still.
        """
        place = Path(path)
        found = [
            {"path": _key(report["path"], place.parent)} | {name: report[name] for name in _SAID}
            for report in reports
        ]
        content = {"format": _FORMAT, "version": 1, "files": found}
        _atomic_file.write(place, json.dumps(content, indent=1).encode() + b"\n")

    def differences(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns what differs from the manifest, in the form of the `problems` of a report.

        Args:
            report: What `verify` has returned, with the SHA-256.
        """
        entry = self._entries.get(_key(report["path"], self._directory))
        if entry is None:
            return [{"problem": "not in the manifest"}]
        return [
            {"problem": f"the manifest states {name} {entry.get(name)}, found {report[name]}"}
            for name in _SAID
            if entry.get(name) != report[name]
        ]

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Returns the local files in the manifest that are neither given nor there.

        Args:
            paths: Files that are known to be there.
        """
        given = {_key(path, self._directory) for path in paths}
        return sorted(
            path
            for path in self._entries
            if path not in given and not is_url(path) and not (self._directory / path).exists()
        )


def _key(path: str, directory: Path) -> str:
    return identified(path) if is_url(path) else Path(os.path.relpath(path, directory)).as_posix()
