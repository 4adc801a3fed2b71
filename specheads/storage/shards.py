"""Caches on disk: `<fingerprint>/` with shards and a manifest of their checksums.

A shard appears by rename when it is complete. A restart verifies the existing shards and makes only the missing ones. One run
writes a cache at a time; a second one is refused.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.errors import UserError
from specheads.storage.files import lock, write_json, write_whole

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
MANIFEST = "manifest.json"


def fingerprint(provenance: Mapping[str, Any]) -> str:
    """Return the name of the cache with this provenance: JSON values of everything that decides its content."""
    return hashlib.sha256(json.dumps({**provenance, "format_version": FORMAT_VERSION}, sort_keys=True).encode()).hexdigest()[:16]


class ShardStore:
    """One cache folder, opened for writing. Raises UserError if its manifest cannot be used."""

    def __init__(self, folder: Path, provenance: Mapping[str, Any], schema: pa.Schema | None = None) -> None:
        self.folder, self.schema = folder, schema
        self.provenance = json.loads(json.dumps(dict(provenance)))
        folder.mkdir(parents=True, exist_ok=True)
        manifest = read_manifest(folder)
        if manifest and manifest.get("provenance") != self.provenance:
            logger.warning("data: %s belongs to another cache; its shards will be made again", folder / MANIFEST)
            manifest = {}
        self.shards: dict[str, dict[str, Any]] = manifest.get("shards", {})
        self._declared_complete = manifest.get("complete", False)

    def has(self, name: str) -> bool:
        """Return whether a shard exists with the checksum of the manifest; a damaged or foreign one counts as missing."""
        entry, path = self.shards.get(name), self.folder / name
        return entry is not None and path.is_file() and checksum(path) == entry["sha256"]

    def is_complete(self) -> bool:
        """Return whether an earlier run finished this cache and no shard has changed; the log names those that have."""
        damaged = [name for name in self.shards if not self.has(name)]
        if damaged:
            logger.warning("data: %s in %s is missing or damaged and will be made again", ", ".join(damaged), self.folder)
        return self._declared_complete and not damaged

    def write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a shard, then the manifest that names it."""
        table = pa.Table.from_pylist(list(rows), schema=self.schema)
        self.put(name, len(rows), lambda temporary: pq.write_table(table, temporary, compression="zstd"))

    def put(self, name: str, num_rows: int, write: Callable[[Path], Any]) -> None:
        """Let `write` make the file of a shard, then write the manifest that names it."""
        write_whole(self.folder / name, write)
        self.shards[name] = {"rows": num_rows, "sha256": checksum(self.folder / name)}
        self._write_manifest(complete=False)

    def complete(self, names: Sequence[str]) -> None:
        """Declare the cache complete with exactly these shards."""
        self.shards = {name: self.shards[name] for name in names}
        self._write_manifest(complete=True)

    def _write_manifest(self, complete: bool) -> None:
        content = {
            "format_version": FORMAT_VERSION,
            "complete": complete,
            "provenance": self.provenance,
            "shards": dict(sorted(self.shards.items())),
        }
        write_json(self.folder / MANIFEST, content)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a cache folder, empty if there is none yet.

    Raises:
        UserError: the manifest is not valid, or names a file outside the folder.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); delete it, and its shards will be made again.") from None
    if not isinstance(manifest, dict) or not manifest:
        return {}
    if "made_of" in manifest:  # the key of earlier versions
        manifest["provenance"] = manifest.pop("made_of")
    shards = manifest.setdefault("shards", {})
    if not isinstance(shards, dict) or not all(
        isinstance(entry, dict) and entry.keys() >= {"rows", "sha256"} for entry in shards.values()
    ):
        raise UserError(f"{path} does not list shards with their checksums; delete it, and its shards will be made again.")
    for name in shards:
        _check_inside(folder, name)
    return manifest


def _check_inside(folder: Path, name: str) -> None:
    """Raise UserError unless a shard is a file in the cache folder: someone else's cache must not name files elsewhere."""
    if name in ("", ".", "..") or "\0" in name or Path(name).name != name or (folder / name).is_symlink():
        raise UserError(
            f"{folder / MANIFEST} names {name!r}, which must be a file in that folder, not a path or a link; "
            "delete the folder if you did not make it, and its shards will be made again."
        )


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the cache's lock, which the system releases when the process ends. Raises UserError if another run holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    stream = lock(folder / ".lock")
    if stream is None:
        owner = (folder / ".lock").read_text().strip() or "unknown"
        raise UserError(
            f"another run (process {owner}) is writing the cache {folder}; wait until it has finished and start again, "
            "or use other data settings."
        )
    with stream:
        yield
