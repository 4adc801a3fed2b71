"""Folders that files are copied from and to; those of this machine are here, those of fsspec's stores in `remote_store.py`.

A file appears in either when it is complete. Names are relative to the folder, with slashes, and never lead out of it, whatever a
store lists, and whatever links there are on this machine.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from specheads.errors import UserError
from specheads.storage.files import temporary_of

Advance = Callable[[int], object]  # called with numbers of bytes

BLOCK = 2**20


class Store(Protocol):
    """A folder somewhere. Its methods raise UserError or OSError where it cannot be reached or its names are not allowed."""

    lot: int  # the number of files that are best copied together

    def place(self, name: str) -> str:
        """Return where a file is, for messages."""
        ...

    def files(self) -> dict[str, int]:
        """Return the sizes of all files in it by their names, links left out."""
        ...

    def read(self, names: Collection[str]) -> dict[str, bytes]:
        """Return the contents of small files."""
        ...

    def staging(self, name: str, folder: Path) -> Path:
        """Return a local path for a file that is to be `put`, in `folder` or near its place."""
        ...

    def fetch(self, files: Mapping[str, Path], advance: Advance) -> None:
        """Copy files to local paths."""
        ...

    def put(self, files: Mapping[str, Path], advance: Advance) -> None:
        """Copy local files into the store, or move them, if they lie where `staging` said."""
        ...

    def checksum(self, name: str, advance: Advance) -> str:
        """Return the SHA-256 of the content of a file."""
        ...

    def remove(self, names: Collection[str]) -> None:
        """Remove files."""
        ...


class LocalStore:
    """A folder of this machine."""

    lot = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def place(self, name: str) -> str:
        return str(self.folder / name)

    def path(self, name: str) -> Path:
        """Return the path of a file. Raises UserError if a link is in the way: the file would lie elsewhere."""
        path = self.folder / checked_name(name, str(self.folder))
        for part in (path, *path.parents):
            if part == self.folder:
                return path
            if part.is_symlink():
                raise UserError(f"{part} is a link, and links are not followed; move it away, or give another folder.")
        raise UserError(f"{path} lies outside of {self.folder}.")

    def files(self) -> dict[str, int]:
        if self.folder.is_file():
            raise UserError(f"{self.folder} is a file; give its folder.")
        sizes: dict[str, int] = {}
        for top, _, names in os.walk(self.folder):
            paths = [Path(top, name) for name in names]
            sizes |= {
                path.relative_to(self.folder).as_posix(): path.stat().st_size
                for path in paths
                if path.is_file() and not path.is_symlink()
            }
        return dict(sorted(sizes.items()))

    def links(self) -> list[str]:
        """Return the names of the links in it, which are not followed."""
        places = [Path(top, name) for top, folders, names in os.walk(self.folder) for name in (*folders, *names)]
        return sorted(path.relative_to(self.folder).as_posix() for path in places if path.is_symlink())

    def read(self, names: Collection[str]) -> dict[str, bytes]:
        return {name: self.path(name).read_bytes() for name in names}

    def staging(self, name: str, folder: Path) -> Path:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_of(path)
        temporary.unlink(missing_ok=True)  # a link would be written through
        return temporary

    def fetch(self, files: Mapping[str, Path], advance: Advance) -> None:
        for name, path in files.items():
            with self.path(name).open("rb") as source, path.open("wb") as copy:
                for block in blocks_of(source, advance):
                    copy.write(block)

    def put(self, files: Mapping[str, Path], advance: Advance) -> None:
        for name, path in files.items():
            os.replace(path, self.path(name))

    def checksum(self, name: str, advance: Advance) -> str:
        return checksum_of(self.path(name), advance)

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            self.path(name).unlink(missing_ok=True)


def checksum_of(path: Path, advance: Advance) -> str:
    """Return the SHA-256 of a file of this machine."""
    with path.open("rb") as stream:
        return digest_of(stream, advance)


def digest_of(stream: BinaryIO, advance: Advance) -> str:
    """Return the SHA-256 of what a stream still has."""
    digest = sha256()
    for block in blocks_of(stream, advance):
        digest.update(block)
    return digest.hexdigest()


def blocks_of(stream: BinaryIO, advance: Advance) -> Iterator[bytes]:
    """Yield the blocks of what a stream still has."""
    while block := stream.read(BLOCK):
        yield block
        advance(len(block))


def checked_name(name: str, where: str) -> str:
    """Return a name. Raises UserError if it leads out of its folder."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name or "\\" in name or "//" in name:
        raise UserError(f"{where} lists {name!r}, which is not the name of a file in it; nothing is copied.")
    return name
