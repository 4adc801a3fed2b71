"""What is finished in a folder: shards with a checksum, and the other files of caches, runs and heads.

Left out are hidden files (temporary ones, leases, locks, what `datasets` mapped), links, shards whose checksum is not noted yet,
and runs that a process works in.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from specheads.storage import runs
from specheads.storage.shards import MANIFEST, Entry, note_of, parse_manifest, parse_note
from specheads.storage.stores import LocalStore, Store

SHARDS = {".parquet", ".safetensors"}
SHOWN = {".hydra"}  # hidden, but the config of a run
LAST = {"config.json", runs.STATE}  # a head with the one, and a run with the other, counts as complete


@dataclass(frozen=True)
class File:
    """A finished file; of a shard, also what is noted about it."""

    name: str
    size: int
    entry: Entry | None = None

    @property
    def folder(self) -> str:
        """The name of its folder, empty at the top."""
        return folder_of(self.name)

    @property
    def is_last(self) -> bool:
        """Whether it declares its folder complete."""
        return PurePosixPath(self.name).name in LAST


@dataclass(frozen=True)
class Content:
    """The files of a folder that may be copied, the caches among its subfolders with their manifests, and what is left out."""

    sizes: Mapping[str, int]  # of all files
    caches: Mapping[str, dict[str, Any]]
    files: tuple[File, ...]
    left_out: tuple[str, ...]


def folder_of(name: str) -> str:
    """Return the name of a file's folder, empty at the top."""
    return name.rpartition("/")[0]


def within(folder: str, name: str) -> str:
    """Return the name of a file in a folder, which is empty at the top."""
    return f"{folder}/{name}" if folder else name


def content_of(store: Store) -> Content:
    """Return what is finished in a folder. Raises UserError for a manifest that is not valid, or that names other folders."""
    sizes = store.files()
    caches = dict(_caches(store, sizes))
    busy = _at_work(store, sizes)
    files, left_out = [], [f"{store.place(folder)}: a run is at work there" for folder in busy]
    for name, size in sizes.items():
        folder, _, last = name.rpartition("/")
        if _is_hidden(name) or any(name.startswith(f"{run}/") or not run for run in busy):
            continue
        if folder not in caches:
            files.append(File(name, size))
        elif PurePosixPath(last).suffix not in SHARDS:
            files += [] if last == MANIFEST else [File(name, size)]
        elif last in caches[folder]["shards"]:
            files.append(File(name, size, caches[folder]["shards"][last]))
        else:
            left_out.append(f"{store.place(name)}: its checksum is not noted yet")
    if isinstance(store, LocalStore):
        left_out += [f"{store.place(name)}: a link, which is not followed" for name in store.links() if not _is_hidden(name)]
    for folder, manifest in caches.items():
        gone = [within(folder, name) for name in manifest["shards"] if within(folder, name) not in sizes]
        left_out += [f"{store.place(name)}: missing, though {MANIFEST} lists it" for name in gone]
    files.sort(key=lambda file: (file.is_last, file.name))
    return Content(sizes, caches, tuple(files), tuple(left_out))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part not in SHOWN for part in name.split("/"))


def _at_work(store: Store, sizes: Mapping[str, int]) -> list[str]:
    """Return the folders of runs that a process works in, as far as locks show it."""
    if not isinstance(store, LocalStore):
        return []
    locks = [name for name in sizes if name.rpartition("/")[2] == runs.LOCK]
    return [folder_of(name) for name in locks if runs.is_at_work(store.folder / folder_of(name))]


def _caches(store: Store, sizes: Mapping[str, int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the subfolders that are caches, with their manifests, which also list the shards that were finished since."""
    names = [name for name in sizes if name.rpartition("/")[2] == MANIFEST and not _is_hidden(name)]
    for name, content in store.read(names).items():
        folder = folder_of(name)

        def noted(folder: str = folder) -> dict[str, Entry]:
            return _noted(store, sizes, folder)

        manifest = parse_manifest(content, store.place(name), noted)
        if "provenance" in manifest:  # other files may have that name, too
            yield folder, manifest


def _noted(store: Store, sizes: Mapping[str, int], folder: str) -> dict[str, Entry]:
    """Return what is noted next to the shards in a folder, by their names."""
    shards = [name for name in sizes if folder_of(name) == folder and PurePosixPath(name).suffix in SHARDS]
    notes = {note_name(name): name.rpartition("/")[2] for name in shards}
    entries = {}
    for note, content in store.read([note for note in notes if note in sizes]).items():
        try:
            entry = parse_note(content)
        except ValueError:
            continue
        if entry is not None:
            entries[notes[note]] = entry
    return entries


def note_name(name: str) -> str:
    """Return the name of the note about a shard."""
    return note_of(Path(name)).as_posix()


def note_text(entry: Entry, of: str) -> str:
    """Return the text of a note about a shard of the cache with the fingerprint `of`."""
    return json.dumps({"rows": entry["rows"], "sha256": entry["sha256"], "of": of}, indent=2) + "\n"
