"""Copy what is finished in one folder to another, here or in a store: caches, runs, heads, recordings.

A file appears at its new place when it is complete, and a shard of a cache is noted there as by its worker (`storage/shards.py`).
So an interrupted copy goes on where it was, and workers can continue a cache that was copied half-finished.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.errors import UserError
from specheads.storage.finished import Content, File, content_of, note_name, note_text, within
from specheads.storage.shards import FORMAT_VERSION, MANIFEST, Entry, fingerprint
from specheads.storage.stores import Advance, LocalStore, Store, checksum_of

LOT_BYTES = 2**30  # copied together, at most


def nothing(count: int) -> None:
    """Report no progress."""


@dataclass
class Sync:
    """A copy from one folder to another: what is to be copied, what is there already, and what has been copied so far.

    Attributes:
        verify: read back what was copied and what was there already, and compare its SHA-256; else sizes and manifests count.
        overwrite: replace files that have other content.
        damaged: places of shards at the source that are not what their worker wrote.
    """

    source: Store
    destination: Store
    verify: bool = True
    overwrite: bool = False
    content: Content = field(init=False)
    there: Content = field(init=False)
    to_copy: tuple[File, ...] = ()
    same: tuple[File, ...] = ()
    copied: list[File] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    _noted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Look at both sides.

        Raises:
            UserError: nothing to copy, one folder within the other, a side that cannot be read, another cache in a folder.
        """
        if isinstance(self.source, LocalStore) and isinstance(self.destination, LocalStore):
            _check_apart(self.source.folder, self.destination.folder)
        self.content = content_of(self.source)
        if not self.content.files and not self.content.caches and not self.content.left_out:
            raise UserError(f"there is nothing to copy in {self.source.place('')}; give a folder of a data set, a run or a head.")
        self.there = content_of(self.destination)
        for folder in self.content.caches:
            if folder in self.there.caches and not self._manifest_there(folder) and not self.overwrite:
                name = within(folder, MANIFEST)
                raise UserError(
                    f"{self.destination.place(name)} is of another cache than {self.source.place(name)}; give another folder, or "
                    "overwrite=true."
                )

    def bytes_to_compare(self) -> int:
        """Return the size of the files that are on both sides."""
        return sum(file.size for file in self.content.files if self.there.sizes.get(file.name) == file.size)

    def compare(self, advance: Advance = nothing) -> None:
        """Find out what is to be copied. Raises UserError if files have other content at the destination."""
        lists: dict[str, list[File]] = {"absent": [], "same": [], "other": []}
        for file in self.content.files:
            lists[self._state(file, advance)].append(file)
        if lists["other"] and not self.overwrite:
            first, more = lists["other"][0], len(lists["other"]) - 1
            raise UserError(
                f"{self.source.place(first.name)} and {self.destination.place(first.name)} have different content"
                f"{f', and so have {more} more files' if more else ''}; nothing was copied. Give another folder, or "
                "overwrite=true to replace what is there."
            )
        self.same = tuple(lists["same"])
        self.to_copy = tuple(file for file in self.content.files if file not in lists["same"])

    def _state(self, file: File, advance: Advance) -> str:
        if file.name not in self.there.sizes:
            return "absent"
        if self.there.sizes[file.name] != file.size:
            return "other"
        known = self._entry_there(file)
        if file.entry and known and not self.verify:
            advance(file.size)
            return "same" if known["sha256"] == file.entry["sha256"] else "other"
        return "same" if self.destination.checksum(file.name, advance) == self._checksum(file) else "other"

    def bytes_to_copy(self) -> int:
        """Return the size of the files that are copied, twice if they are read back."""
        return sum(file.size for file in self.to_copy) * (2 if self.verify else 1)

    def copy(self, advance: Advance = nothing) -> None:
        """Copy what `compare` found.

        Raises:
            UserError: a file that arrived with other content, or a side that cannot be reached; the same command goes on.
        """
        with tempfile.TemporaryDirectory(prefix="specheads-") as name:
            folder = Path(name)
            new = [cache for cache in self.content.caches if not self._manifest_there(cache)]
            self._put_texts(dict(self._manifest(cache, {}, complete=False) for cache in new), folder)
            for lot in _lots(self.to_copy, max(self.source.lot, self.destination.lot)):
                self._copy_lot(lot, folder, advance)
            self._note([file for file in self.same if file.entry and not self._is_listed(file)], folder)
            self._complete_caches(folder)

    def _copy_lot(self, lot: Sequence[File], folder: Path, advance: Advance) -> None:
        """Copy some files but for damaged shards, verify them, and note the checksums of shards."""
        source, destination = self.source, self.destination
        if isinstance(source, LocalStore) and not isinstance(destination, LocalStore):
            paths, advance_put = {file.name: source.path(file.name) for file in lot}, advance
        else:
            paths, advance_put = {file.name: destination.staging(file.name, folder) for file in lot}, nothing
            source.fetch(paths, advance)
        damaged = [file for file in lot if file.entry and checksum_of(paths[file.name], nothing) != file.entry["sha256"]]
        for file in damaged:
            self.damaged.append(source.place(file.name))
            if advance_put is nothing:
                paths[file.name].unlink()
        whole = [file for file in lot if file not in damaged]
        destination.put({file.name: paths[file.name] for file in whole}, advance_put)
        for file in whole if self.verify else ():
            self._check_arrived(file, advance)
        self._note([file for file in whole if file.entry], folder)
        self.copied += whole

    def _check_arrived(self, file: File, advance: Advance) -> None:
        if self.destination.checksum(file.name, advance) != self._checksum(file):
            self.destination.remove([file.name])
            raise UserError(
                f"{self.destination.place(file.name)} was not what {self.source.place(file.name)} is, and was removed; the same "
                "command copies it again."
            )

    def _checksum(self, file: File) -> str:
        return file.entry["sha256"] if file.entry else self.source.checksum(file.name, nothing)

    def _manifest_there(self, cache: str) -> Mapping[str, Any]:
        """Return the manifest of a cache at the destination, empty if there is none yet, or that of another cache."""
        manifest = self.there.caches.get(cache, {})
        return manifest if manifest.get("provenance") == self.content.caches.get(cache, {}).get("provenance") else {}

    def _entry_there(self, file: File) -> Entry | None:
        return self._manifest_there(file.folder).get("shards", {}).get(file.name.rpartition("/")[2])

    def _is_listed(self, file: File) -> bool:
        entry = self._entry_there(file)
        return entry is not None and entry["sha256"] == self._checksum(file)

    def _note(self, shards: Sequence[File], folder: Path) -> None:
        """Note the checksums of shards at the destination, like their worker."""
        texts = {}
        for file in shards:
            assert file.entry is not None
            of = fingerprint(self.content.caches[file.folder]["provenance"])
            texts[note_name(file.name)] = note_text(file.entry, of)
        self._put_texts(texts, folder)
        self._noted |= texts.keys()

    def _complete_caches(self, folder: Path) -> None:
        """Write the manifests of caches that are complete at the destination by now, and remove what is noted there."""
        manifests, notes = {}, {note_name(file.name) for file in (*self.same, *self.copied) if file.entry}
        for cache, manifest in self.content.caches.items():
            arrived = {file.name for file in (*self.same, *self.copied) if file.folder == cache}
            ours = {name: entry for name, entry in manifest["shards"].items() if within(cache, name) in arrived}
            there = self._manifest_there(cache) or {"shards": {}}
            changed = any(there["shards"].get(name, {}).get("sha256") != entry["sha256"] for name, entry in ours.items())
            is_complete = there.get("complete") or (manifest.get("complete") and len(ours) == len(manifest["shards"]))
            if not is_complete:
                notes -= {note_name(name) for name in arrived}  # they stay
            elif changed or not there.get("complete"):
                name, text = self._manifest(cache, {**there["shards"], **ours}, complete=True)
                manifests[name] = text
        self._put_texts(manifests, folder)
        self.destination.remove(sorted(notes & (self._noted | set(self.there.sizes))))

    def _manifest(self, cache: str, shards: Mapping[str, Entry], complete: bool) -> tuple[str, str]:
        """Return the name and the text of a manifest at the destination."""
        manifest = self.content.caches[cache]
        content = {
            "format_version": manifest.get("format_version", FORMAT_VERSION),
            "complete": complete,
            "provenance": manifest["provenance"],
            "shards": {name: {key: entry[key] for key in ("rows", "sha256")} for name, entry in sorted(shards.items())},
        }
        return within(cache, MANIFEST), json.dumps(content, indent=2) + "\n"

    def _put_texts(self, texts: Mapping[str, str], folder: Path) -> None:
        paths = {}
        for name, text in texts.items():
            paths[name] = self.destination.staging(name, folder)
            paths[name].write_text(text)
        if paths:
            self.destination.put(paths, nothing)


def _lots(files: Sequence[File], most: int) -> Iterator[list[File]]:
    """Yield files in lots of at most `most`, and of LOT_BYTES or one file; those that declare a folder complete come apart."""
    lot: list[File] = []
    for file in files:
        is_full = len(lot) == most or sum(each.size for each in lot) + file.size > LOT_BYTES
        if lot and (is_full or file.is_last != lot[-1].is_last):
            yield lot
            lot = []
        lot.append(file)
    if lot:
        yield lot


def _check_apart(source: Path, destination: Path) -> None:
    if source.is_relative_to(destination) or destination.is_relative_to(source):
        raise UserError(f"{source} and {destination} are the same folder, or one lies in the other; give another folder.")
