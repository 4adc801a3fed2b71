"""Caches on disk: `<fingerprint>/` with shards and a manifest of their checksums.

A shard appears by rename, then a note with its checksum, `.<shard>.json`. The manifest is first
written without shards. Once all exist it lists them, with a checksum of the list, and the notes go:
a cache whose manifest lists shards is complete.
"""

import contextlib
import glob
import hashlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specheads.errors import UserError
from specheads.storage.files import checksum, locked, read_json, space_of, write_json, write_whole

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
FILE_BYTES = 8192  # of a Parquet file of many columns, without its rows

# `rows` and `sha256` of a shard; in a note also `of`, the fingerprint of its cache.
Entry = dict[str, Any]


def fingerprint(provenance: Mapping[str, object]) -> str:
    """Return the name of the cache with this provenance: JSON values of everything that decides its
    content.
    """
    return hashlib.sha256(
        json.dumps({**provenance, "format_version": FORMAT_VERSION}, sort_keys=True).encode()
    ).hexdigest()[:16]


class ShardStore:
    """One cache folder, opened for writing. Raises UserError if its manifest cannot be used."""

    def __init__(
        self, folder: Path, provenance: Mapping[str, object], schema: pa.Schema | None = None
    ) -> None:
        self.folder = folder
        self.schema = schema
        # As JSON returns it: tuples become lists.
        self.provenance = json.loads(json.dumps(dict(provenance)))
        folder.mkdir(parents=True, exist_ok=True)
        # Time, size and number tell whether a file is the same.
        self._checksum = cache(lambda path, *status: checksum(path))
        self._announced: tuple[str, Sequence[int]] | None = None
        self._writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._read()

    def _read(self) -> None:
        manifest = read_manifest(self.folder)
        if manifest and manifest.get("provenance") != self.provenance:
            logger.warning(
                "data: %s belongs to another cache; its shards will be made again",
                self.folder / MANIFEST,
            )
            manifest = {}
        self.shards: dict[str, Entry] = manifest.get("shards", {})
        self._is_known = bool(manifest)
        self._is_listed = manifest.get("listed", False)

    def has(self, name: str) -> bool:
        """Return whether a shard exists with the checksum that was noted.

        A damaged or foreign one counts as missing.
        """
        path = self.folder / name
        entry = self.shards.get(name)
        if entry is None or not path.is_file():
            return False
        status = path.stat()
        return (
            self._checksum(path, status.st_mtime_ns, status.st_size, status.st_ino)
            == entry["sha256"]
        )

    def is_complete(self) -> bool:
        """Return whether an earlier run finished this cache and no shard has changed.

        The log names those that have.
        """
        damaged = [name for name in self.shards if not self.has(name)]
        if damaged:
            logger.warning(
                "data: %s in %s is missing or damaged and will be made again",
                ", ".join(damaged),
                self.folder,
            )
        return self._is_listed and not damaged

    @contextlib.contextmanager
    def missing(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Lock the cache, as soon as no other process has it.

        Give the shards among `names` that do not exist.
        """
        with locked(self.folder):
            yield self.still_missing(names)

    def still_missing(self, names: Sequence[str]) -> list[str]:
        """Return the shards among `names` that do not exist by now, whoever has made the others."""
        self._read()
        return [name for name in names if not self.has(name)]

    def announce(self, what: str, counts: Sequence[int]) -> None:
        """Log the size of shards with so many rows, as soon as one of them tells how many bytes a
        row takes.
        """
        self._announced = what, counts

    def write(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        table = pa.Table.from_pylist(list(rows), schema=self.schema)
        self.put(
            name, len(rows), lambda temporary: pq.write_table(table, temporary, compression="zstd")
        )

    def put(self, name: str, num_rows: int, write: Callable[[Path], object]) -> None:
        """Let `write` make the file of a shard, and note its checksum next to it."""
        if not self._is_known:
            self._write_manifest({})
        path = self.folder / name
        entry = {"rows": num_rows, "sha256": "", "of": fingerprint(self.provenance)}
        for of_shard in (name, _note_of(path).name):
            # A worker that was killed left them.
            for left in self.folder.glob(f".{glob.escape(of_shard)}*.tmp"):
                left.unlink(missing_ok=True)

        def write_summed(temporary: Path) -> None:
            write(temporary)
            entry["sha256"] = checksum(temporary)

        write_whole(path, write_summed, self._writer)
        write_json(_note_of(path), entry, self._writer)
        self.shards[name] = entry
        self.journal(name).unlink(missing_ok=True)
        if self._announced:
            (what, counts) = self._announced
            self._announced = None
            size = path.stat().st_size
            fixed = min(FILE_BYTES, size)
            total = sum(counts)
            needed = fixed * len(counts) + (size - fixed) / max(1, num_rows) * total
            logger.info("%s: %s for %d rows", what, space_of(what, needed, self.folder), total)

    def journal(self, name: str) -> Path:
        """Return the file of what a shard needs that has been made already.

        It is removed once the shard is written.
        """
        return self.folder / f".{name}.jsonl"

    def complete(self, names: Sequence[str], left_out: int = 0) -> None:
        """Declare the cache complete with exactly these shards.

        The manifest says how many rows were `left_out` of them.
        """
        self.shards = {name: self.shards[name] for name in names}
        self._write_manifest(self.shards, left_out)
        for name in names:
            _note_of(self.folder / name).unlink(missing_ok=True)
            # A process was killed right after it had written the shard.
            self.journal(name).unlink(missing_ok=True)

    def _write_manifest(self, shards: Mapping[str, Entry], left_out: int = 0) -> None:
        content: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "provenance": self.provenance,
            "shards": {},
        }
        for name, entry in sorted(shards.items()):
            content["shards"][name] = {key: entry[key] for key in ("rows", "sha256")}
        if left_out:
            content["left_out"] = left_out
        content["sha256"] = _sum_of(content)
        write_json(self.folder / MANIFEST, content, self._writer)
        self._is_known = True


def _sum_of(manifest: Mapping[str, object]) -> str:
    """Return the SHA-256 of the content of a manifest."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _note_of(path: Path) -> Path:
    """Return the file with what is noted about a shard until the manifest lists it."""
    return path.with_name(f".{path.name}.json")


def _noted(folder: Path, provenance: Mapping[str, object]) -> Iterator[tuple[str, Entry]]:
    """Yield the names of shards of this cache that were finished since its manifest was written,
    and what is noted about them.
    """
    for note in sorted(folder.glob(".*.json")):
        with contextlib.suppress(OSError, ValueError):
            entry = read_json(note)
            if (
                isinstance(entry, dict)
                and entry.keys() >= {"rows", "sha256"}
                and entry.get("of") == fingerprint(provenance)
            ):
                yield note.name[1:].removesuffix(".json"), entry


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a cache's manifest with the shards that were finished since, empty if there is none;
    `listed`: whether it lists shards itself, so the cache is complete.

    Raises UserError for others.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path) if path.is_file() else {}
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON ({error}); delete it, and its shards will be made again."
        ) from None
    if not isinstance(manifest, dict) or not manifest:
        return {}
    if manifest.get("sha256", _sum_of(manifest)) != _sum_of(manifest):
        raise UserError(
            f"{path} was changed since it was written; delete it, and its shards will be made"
            " again."
        )
    provenance = manifest.setdefault("provenance", {})
    shards = manifest.setdefault("shards", {})
    if not (isinstance(provenance, dict) and isinstance(shards, dict)) or not all(
        isinstance(entry, dict) and entry.keys() >= {"rows", "sha256"} for entry in shards.values()
    ):
        raise UserError(
            f"{path} does not list shards with their checksums; delete it, and its shards will be"
            " made again."
        )
    manifest["listed"] = bool(shards)
    shards |= _noted(folder, provenance)
    for name in shards:  # someone else's cache must not name files elsewhere
        if (
            name in ("", ".", "..")
            or "\0" in name
            or Path(name).name != name
            or (folder / name).is_symlink()
        ):
            raise UserError(
                f"{path} names {name!r}, which must be a file in that folder, not a path or a link;"
                " delete the folder if you did not make it, and its shards will be made again."
            )
    return manifest


def made_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a cache folder that was made before.

    Raises UserError if there is none.
    """
    manifest = read_manifest(folder)
    if not manifest:
        raise UserError(
            f"{folder / MANIFEST} is gone or empty; run the same command again, which makes its"
            " shards again."
        )
    return manifest
