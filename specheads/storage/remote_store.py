"""Folders in fsspec's stores: S3, Google Storage, the Hub, and whatever else fsspec knows."""

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback
from fsspec.registry import known_implementations

from specheads.errors import FULL, UserError
from specheads.storage.stores import Advance, LocalStore, Store, checked_name, digest_of

OBJECT_STORES = {"abfs", "az", "gcs", "gs", "s3", "s3a"}  # an object is there once its upload has ended, and not before
HUB = "hf"
CONCURRENT = 32  # files of which an object store takes several at once, and a commit of the Hub all
BACK_ENDS = {
    "aiobotocore",
    "aiohttp",
    "botocore",
    "gcsfs",
    "google",
    "httpx",
    "huggingface_hub",
    "s3fs",
}  # raise their own errors


class RemoteStore:
    """A folder in one of fsspec's stores."""

    def __init__(self, url: str) -> None:
        """Find the store. Raises UserError for one that is not known, or whose package is not installed."""
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            self._fs, self._root = fsspec.url_to_fs(url)
        except ImportError as error:
            package = known_implementations.get(protocol, {}).get("class", protocol).partition(".")[0]
            raise UserError(f"{url}: {protocol}:// needs a package that is not installed: pip install {package}.") from error
        except ValueError as error:
            raise UserError(f"{url}: {error}; use s3://, gs://, hf:// or a folder of this machine.") from None
        self._root = self._root.rstrip("/")
        self._kinds = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self.lot = CONCURRENT if self._kinds & {*OBJECT_STORES, HUB} else 1

    def place(self, name: str) -> str:
        return f"{self.url}/{name}"

    def files(self) -> dict[str, int]:
        with self._errors():
            self._fs.invalidate_cache()
            try:
                listed = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                if HUB in self._kinds:  # of the repository
                    raise
                return {}
        if self._root in listed:
            raise UserError(f"{self.url} is a file; give its folder.")
        return {checked_name(self._relative(path), self.url): entry["size"] for path, entry in sorted(listed.items())}

    def read(self, names: Collection[str]) -> dict[str, bytes]:
        with self._errors():
            contents = self._fs.cat([self._path(name) for name in names]) if names else {}
        return {self._relative(path): content for path, content in contents.items()}

    def staging(self, name: str, folder: Path) -> Path:
        descriptor, path = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        return Path(path)

    def fetch(self, files: Mapping[str, Path], advance: Advance) -> None:
        moved = _Moved(advance)
        with self._errors():
            if self.lot > 1 and self._fs.async_impl:
                self._fs.get([self._path(name) for name in files], [str(path) for path in files.values()], callback=_All(moved))
            else:
                for name, path in files.items():
                    self._fs.get_file(self._path(name), str(path), callback=moved)
        moved.up_to(sum(path.stat().st_size for path in files.values()))

    def put(self, files: Mapping[str, Path], advance: Advance) -> None:
        moved = _Moved(advance)
        size = sum(path.stat().st_size for path in files.values())
        with self._errors():
            if HUB in self._kinds:
                self._commit(files)
            elif self.lot > 1:
                self._fs.put([str(path) for path in files.values()], [self._path(name) for name in files], callback=_All(moved))
            else:
                for name, path in files.items():
                    self._put_whole(name, path, moved)
            self._fs.invalidate_cache()
        moved.up_to(size)

    def _put_whole(self, name: str, path: Path, moved: "_Moved") -> None:
        """Write a file where one that is being written could be seen."""
        final = self._path(name)
        folder, _, last = final.rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        self._fs.put_file(str(path), f"{folder}/.{last}.tmp", callback=moved)
        self._fs.mv(f"{folder}/.{last}.tmp", final)

    def _commit(self, files: Mapping[str, Path], removed: Collection[str] = ()) -> None:
        """Change a repository of the Hub by one commit: an hour has only so many, and fsspec would make one per file."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api, root = HfApi(endpoint=self._fs.endpoint, token=self._fs.token), self._fs.resolve_path(self._root)
        inside = {name: f"{root.path}/{name}".lstrip("/") for name in [*files, *removed]}
        if hasattr(root, "bucket_id"):
            added: list[tuple[str | Path | bytes, str]] = [(path, inside[name]) for name, path in files.items()]
            api.batch_bucket_files(root.bucket_id, add=added, delete=[inside[name] for name in removed])
        else:
            operations: list[Any] = [CommitOperationAdd(inside[name], path) for name, path in files.items()]
            operations += [CommitOperationDelete(inside[name]) for name in removed]
            api.create_commit(
                root.repo_id, operations, commit_message="specheads sync", repo_type=root.repo_type, revision=root.revision
            )

    def checksum(self, name: str, advance: Advance) -> str:
        with self._errors(), self._fs.open(self._path(name), "rb") as stream:
            return digest_of(stream, advance)

    def remove(self, names: Collection[str]) -> None:
        if not names:
            return
        with self._errors():
            if HUB in self._kinds:
                self._commit({}, names)
            else:
                self._fs.rm([self._path(name) for name in names])
            self._fs.invalidate_cache()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _relative(self, path: str) -> str:
        prefix = f"{self._root}/"
        if not path.startswith(prefix):
            raise UserError(f"{self.url} lists {path}, which lies outside of it; nothing is copied.")
        return path.removeprefix(prefix)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what a store raises into one message; a disk of this machine that is full keeps its own."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            ours = isinstance(error, OSError) and error.errno in FULL
            if ours or not (isinstance(error, OSError) or type(error).__module__.partition(".")[0] in BACK_ENDS):
                raise
            reason = (str(error).splitlines() or [""])[0] or type(error).__name__
            raise UserError(
                f"{self.url}: {reason}; check that it exists and that this machine may use it. The same command then goes on."
            ) from error


class _Moved(Callback):
    """Passes on the bytes that have been moved; not every store reports them."""

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self._advance, self._done = advance, 0

    def relative_update(self, inc: int = 1) -> None:
        self._done += inc
        self._advance(inc)

    def up_to(self, num_bytes: int) -> None:
        """Pass on what was not reported of so many bytes that have been moved in all."""
        if num_bytes > self._done:
            self.relative_update(num_bytes - self._done)


class _All(Callback):
    """Passes on the bytes of several files; its own count is that of files."""

    def __init__(self, moved: _Moved) -> None:
        super().__init__()
        self._moved = moved

    def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Callback:
        return self._moved


def store_at(place: str) -> Store:
    """Return the folder at a path or URL. Raises UserError for a store that is not known, or whose package is missing."""
    if place.startswith("file://"):
        return LocalStore(Path(place.removeprefix("file://")))
    return RemoteStore(place) if "://" in place else LocalStore(Path(place))
