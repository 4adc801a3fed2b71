"""Copies of caches, runs and heads: there and back equal, in order after an interruption, never of damaged or foreign files."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from specheads.errors import UserError
from specheads.storage import remote_store, runs
from specheads.storage.files import lock
from specheads.storage.remote_store import RemoteStore, store_at
from specheads.storage.shards import ShardStore, fingerprint, read_manifest
from specheads.storage.sync import Sync

ROOT = Path(__file__).parents[2]
PROVENANCE = {"of": "a test", "seed": 3}
NAMES = [f"train-{number:05d}.parquet" for number in range(6)]


@pytest.fixture
def memory():
    """The address of an empty folder in fsspec's store in memory."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://bucket/there"
    MemoryFileSystem.store.clear()


def make_cache(root, names=NAMES, provenance=PROVENANCE, all_names=NAMES):
    """A cache with some of its shards, complete if they are all; their content depends on their names alone."""
    folder = root / fingerprint(provenance)
    store = ShardStore(folder, provenance)
    for name in names:
        content = random.Random(name).randbytes(2000)
        store.put(name, 5, lambda path, content=content: path.write_bytes(content))
    if list(names) == list(all_names):
        store.complete(list(names))
    return folder


def make_run(root):
    """The folder of a finished run with a head."""
    folder = root / "head" / "2026-01-01_00-00-00"
    head = folder / "heads" / "a-head"
    (head / "custom_generate").mkdir(parents=True)
    (folder / ".hydra").mkdir()
    for path in (head / "model.safetensors", head / "config.json", head / "custom_generate" / "generate.py"):
        path.write_bytes(path.name.encode() * 50)
    (folder / ".hydra" / "config.yaml").write_text("seed: 0\n")
    runs.begin(folder, "key")
    runs.finish(folder)
    runs.release()
    return folder


def content(folder):
    """The files of a folder that are not hidden, but for the config of a run."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        if not any(part.startswith(".") and part != ".hydra" for part in name.split("/"))
    }


def sync(source, destination, **options):
    task = Sync(store_at(str(source)), store_at(str(destination)), **options)
    task.compare()
    task.copy()
    return task


def names(files):
    return sorted(file.name.rpartition("/")[2] for file in files)


# --- there and back


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("store", ["memory", "file", "local"])
def test_there_and_back_the_files_are_equal(tmp_path, memory, store, verify):
    cache, run = make_cache(tmp_path / "here"), make_run(tmp_path / "here")
    make_cache(cache / "features", provenance={"of": "a store in a cache"})
    (cache / ".arrow").mkdir()
    (cache / ".arrow" / "mapped").write_text("of datasets")
    (cache / f".{NAMES[0]}.tmp").write_text("half")
    (cache / ".train-00009.parquet.lease").write_text("a lease")
    there = memory if store == "memory" else f"{store}://{tmp_path}/there"  # local: by fsspec
    assert sync(tmp_path / "here", there, verify=verify).content.left_out == ()
    sync(there, tmp_path / "back", verify=verify)
    assert content(tmp_path / "back") == content(tmp_path / "here")
    hidden = [path for path in (tmp_path / "back").rglob(".*") if path.name != ".hydra"]
    assert not hidden and len(content(run)) == 5
    again = sync(tmp_path / "here", there, verify=verify)
    assert not again.copied and len(again.same) == len(content(tmp_path / "here")) - 2  # manifests


def test_progress_is_that_of_the_bytes(tmp_path, memory):
    make_cache(tmp_path / "here")
    local, back = f"local://{tmp_path}/there", tmp_path / "back"  # of which fsspec reports nothing
    for source, destination in ((tmp_path / "here", memory), (tmp_path / "here", local), (local, back)):
        seen, task = [], Sync(store_at(str(source)), store_at(str(destination)))
        task.compare()
        task.copy(seen.append)
        assert sum(seen) == task.bytes_to_copy() == 2 * 6 * 2000  # copied, and read back
    task = Sync(store_at(str(tmp_path / "here")), store_at(memory))
    task.compare(seen.append)
    assert sum(seen[-6:]) == task.bytes_to_compare() == 6 * 2000 and task.bytes_to_copy() == 0


def test_a_half_finished_cache_is_continued_elsewhere(tmp_path, memory):
    half = make_cache(tmp_path / "here", NAMES[:3])
    sync(tmp_path / "here", memory)
    sync(memory, tmp_path / "there")
    continued = tmp_path / "there" / half.name
    store = ShardStore(continued, PROVENANCE)
    assert [name for name in NAMES if store.has(name)] == NAMES[:3] and not store.is_complete()
    assert read_manifest(continued)["shards"].keys() == set(NAMES[:3])
    make_cache(tmp_path / "other", NAMES[2:5])
    sync(tmp_path / "other", tmp_path / "there")  # what another place has made in the meantime
    assert read_manifest(continued)["shards"].keys() == set(NAMES[:5])
    make_cache(tmp_path / "rest")
    assert names(sync(tmp_path / "rest", tmp_path / "there").copied) == NAMES[5:]
    assert content(continued) == content(tmp_path / "rest" / half.name)
    assert ShardStore(continued, PROVENANCE).is_complete() and not list(continued.glob(".*"))


def test_a_complete_cache_stays_complete_if_a_part_is_copied_to_it(tmp_path):
    make_cache(tmp_path / "part", NAMES[:2])
    complete = make_cache(tmp_path / "complete")
    before = content(complete)
    assert not sync(tmp_path / "part", tmp_path / "complete").copied
    assert content(complete) == before and not list(complete.glob(".*"))


# --- interruptions


class Interruption(BaseException):
    """Like Ctrl-C, no Exception."""


@pytest.mark.parametrize("count", range(1, 9))
def test_an_interrupted_copy_has_whole_files_only_and_goes_on(tmp_path, memory, monkeypatch, count):
    """It ends in the middle of a file, after so many bytes as `count` says: of the manifest, or of a shard."""
    cache = make_cache(tmp_path / "here")
    real, calls = MemoryFileSystem.put_file, []

    def put_half(self, lpath, rpath, **options):
        calls.append(rpath)
        if len(calls) == count:
            self.pipe_file(rpath, Path(lpath).read_bytes()[:-1])
            raise Interruption
        return real(self, lpath, rpath, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put_half)
        with pytest.raises(Interruption):
            sync(tmp_path / "here", memory)
    there = {name: size for name, size in RemoteStore(memory).files().items() if not name.rpartition("/")[2].startswith(".")}
    assert all(size == 2000 for name, size in there.items() if name.endswith(".parquet"))
    task = sync(tmp_path / "here", memory)
    assert len(task.copied) + len(task.same) == len(NAMES) and len(task.same) == sum(n.endswith(".parquet") for n in there)
    sync(memory, tmp_path / "back")
    assert content(tmp_path / "back") == content(tmp_path / "here") and ShardStore(cache, PROVENANCE).is_complete()


SLOW = """
import sys, time
from specheads.storage import stores
from specheads.storage.remote_store import store_at
from specheads.storage.sync import Sync

def slow(stream, advance):
    while block := stream.read(100):
        yield block
        print("block", flush=True)
        time.sleep(0.01)

task = Sync(store_at(sys.argv[1]), store_at(sys.argv[2]), verify=False)
task.compare()
stores.blocks_of = slow
task.copy()
"""


@pytest.mark.parametrize("blocks", [1, 47, 90])
def test_a_killed_copy_goes_on(tmp_path, blocks):
    cache = make_cache(tmp_path / "here")
    command = [sys.executable, "-c", SLOW, str(tmp_path / "here"), str(tmp_path / "there")]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(blocks):
            assert process.stdout.readline() == "block\n"
        process.kill()
    there = tmp_path / "there" / cache.name
    whole = [path.name for path in there.glob("*.parquet")]
    assert all((there / name).read_bytes() == (cache / name).read_bytes() for name in whole) and len(whole) < len(NAMES)
    assert names(sync(tmp_path / "here", tmp_path / "there").same) == sorted(whole)
    assert content(tmp_path / "there") == content(tmp_path / "here") and not list(there.glob(".*"))


# --- what is not copied


@pytest.mark.parametrize("damage", ["changed", "cut"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_damaged_shard_is_never_copied(tmp_path, memory, damage, remote):
    cache = make_cache(tmp_path / "here")
    source = tmp_path / "here"
    spoilt = (cache / NAMES[2]).read_bytes()
    spoilt = spoilt[:-1] if damage == "cut" else bytes([spoilt[0] ^ 1]) + spoilt[1:]
    if remote:
        sync(source, memory)
        MemoryFileSystem().pipe_file(f"{memory}/{cache.name}/{NAMES[2]}", spoilt)
        source = memory
    else:
        (cache / NAMES[2]).write_bytes(spoilt)
    task = sync(source, tmp_path / "there", verify=False)
    there = tmp_path / "there" / cache.name
    assert len(task.damaged) == 1 and task.damaged[0].endswith(NAMES[2]) and names(task.copied) == [*NAMES[:2], *NAMES[3:]]
    store = ShardStore(there, PROVENANCE)
    assert not store.is_complete() and [name for name in NAMES if store.has(name)] == [*NAMES[:2], *NAMES[3:]]
    assert not (there / NAMES[2]).exists() and not list(there.glob("*.tmp"))


def test_a_shard_without_a_checksum_and_one_that_is_missing_are_left_out(tmp_path):
    cache = make_cache(tmp_path / "here")
    (cache / "train-00099.parquet").write_bytes(b"of a worker that has not noted its checksum")
    (cache / NAMES[0]).unlink()
    task = sync(tmp_path / "here", tmp_path / "there")
    assert names(task.copied) == NAMES[1:]
    assert [reason.rpartition(": ")[2] for reason in task.content.left_out] == [
        "its checksum is not noted yet",
        "missing, though manifest.json lists it",
    ]
    assert not ShardStore(tmp_path / "there" / cache.name, PROVENANCE).is_complete()


def test_a_run_at_work_is_left_out_until_it_has_ended(tmp_path):
    run = make_run(tmp_path / "here")
    with lock(run / ".lock"):
        task = sync(tmp_path / "here", tmp_path / "there")
        assert not task.copied and task.content.left_out == (f"{run}: a run is at work there",)
        assert lock(run / ".lock") is None  # it still has it
    assert len(sync(tmp_path / "here", tmp_path / "there").copied) == 5


def test_links_are_not_followed(tmp_path):
    cache = make_cache(tmp_path / "here")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.json").write_text("{}")
    (tmp_path / "here" / "a_link").symlink_to(tmp_path / "secret")
    (cache / "key.json").symlink_to(tmp_path / "secret" / "key.json")
    task = sync(tmp_path / "here", tmp_path / "there")
    assert (
        names(task.copied) == NAMES
        and [reason.rpartition(": ")[2] for reason in task.content.left_out] == ["a link, which is not followed"] * 2
    )
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / cache.name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=f"back/{cache.name} is a link, and links are not followed"):
        sync(tmp_path / "here", tmp_path / "back")
    assert [path.name for path in (tmp_path / "secret").iterdir()] == ["key.json"]


# --- the destination


def test_other_content_is_refused_with_both_names_unless_it_may_be_replaced(tmp_path, memory):
    run = make_run(tmp_path / "here")
    name = (run / "heads" / "a-head" / "config.json").relative_to(tmp_path / "here").as_posix()
    for other in (b"another head", (run / "heads" / "a-head" / "config.json").read_bytes()[::-1]):
        MemoryFileSystem().pipe_file(f"{memory}/{name}", other)
        with pytest.raises(UserError) as error:
            sync(tmp_path / "here", memory)
        assert f"{tmp_path}/here/{name} and {memory}/{name} have different content; nothing was copied" in str(error.value)
        assert list(RemoteStore(memory).files()) == [name]
    assert len(sync(tmp_path / "here", memory, overwrite=True).copied) == 5
    assert MemoryFileSystem().cat_file(f"{memory}/{name}") == (tmp_path / "here" / name).read_bytes()


def test_another_cache_in_the_folder_is_refused_unless_it_may_be_replaced(tmp_path):
    other = make_cache(tmp_path / "other", provenance={"of": "another"})
    cache = make_cache(tmp_path / "here", NAMES[:4])
    with pytest.raises(UserError, match=f"{other}/manifest.json is of another cache than {cache}/manifest.json"):
        sync(cache, other)
    sync(cache, other, overwrite=True)
    assert read_manifest(other)["provenance"] == PROVENANCE and read_manifest(other)["shards"].keys() == set(NAMES[:4])


def test_a_file_that_arrives_damaged_is_removed_and_refused(tmp_path, memory, monkeypatch):
    make_cache(tmp_path / "here")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", lambda self, lpath, rpath, **options: self.pipe_file(rpath, b"x" * 2000))
        with pytest.raises(UserError, match=f"{memory}/.*/{NAMES[0]} was not what .* is, and was removed; the same command"):
            sync(tmp_path / "here", memory)
    assert not [name for name in RemoteStore(memory).files() if name.endswith(".parquet")]


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ("here", "here", "are the same folder"),
        ("here", "here/there", "or one lies in the other"),
        ("empty", "there", "there is nothing to copy in"),
        ("absent", "there", "there is nothing to copy in"),
        ("memory://nothing", "there", "there is nothing to copy in memory://nothing"),
        ("nowhere://a/b", "there", "use s3://, gs://, hf:// or a folder of this machine"),
    ],
)
def test_folders_that_cannot_be_copied_are_refused(tmp_path, monkeypatch, source, destination, message):
    make_cache(tmp_path / "here")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        sync(source, destination)


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/data", "s3fs"), ("gs://bucket/data", "gcsfs")])
def test_a_store_without_its_package_says_what_to_install(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url[:2], raising=False)
    with pytest.raises(UserError, match=rf"{url}: {url[:2]}:// needs a package that is not installed: pip install {package}\."):
        store_at(url)


def test_a_store_that_cannot_be_reached_is_one_message(tmp_path, memory, monkeypatch):
    def refuse(self, *given, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "find", refuse)
    with pytest.raises(UserError, match=f"{memory}: Access Denied; check that it exists and that this machine may use it"):
        sync(memory, tmp_path)


# --- names that lead elsewhere


@pytest.mark.parametrize("name", ["../evil.json", "a/../../evil.json", "a//evil.json", "a\\..\\evil.json", "/etc/evil.json"])
def test_names_of_a_store_cannot_leave_the_folder(tmp_path, memory, monkeypatch, name):
    def find(self, path, detail):
        return {f"{path}/{name}": {"size": 4, "type": "file"}}

    monkeypatch.setattr(MemoryFileSystem, "find", find)
    with pytest.raises(UserError, match="which is not the name of a file in it; nothing is copied"):
        sync(memory, tmp_path / "there")
    monkeypatch.setattr(MemoryFileSystem, "find", lambda self, path, detail: {"/elsewhere/evil.json": {"size": 4}})
    with pytest.raises(UserError, match="lists /elsewhere/evil.json, which lies outside of it"):
        sync(memory, tmp_path / "there")
    assert not list(tmp_path.rglob("*evil*"))


def test_names_in_a_manifest_cannot_leave_the_folder(tmp_path, memory):
    shards = {"../evil.parquet": {"rows": 1, "sha256": "0"}}
    manifest = json.dumps({"provenance": PROVENANCE, "shards": shards, "complete": True}).encode()
    MemoryFileSystem().pipe_file(f"{memory}/manifest.json", manifest)
    with pytest.raises(UserError, match=r"memory://.*/manifest.json names '../evil.parquet', which must be a file in"):
        sync(memory, tmp_path / "there")


# --- an object store, by its own client


@pytest.fixture
def bucket(monkeypatch):
    """The address of a folder in S3, played by a server of this process."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("bucket")
    monkeypatch.setattr(remote_store.fsspec, "url_to_fs", lambda url: (files, url.removeprefix("s3://")))
    yield "s3://bucket/data"
    server.stop()


def test_there_and_back_by_s3(tmp_path, bucket):
    cache = make_cache(tmp_path / "here")
    make_run(tmp_path / "here")
    half = make_cache(tmp_path / "here" / "half", NAMES[:3])
    assert len(sync(tmp_path / "here", bucket).copied) == 6 + 5 + 3
    sync(bucket, tmp_path / "back")
    assert content(tmp_path / "back") == content(tmp_path / "here") and cache.name in os.listdir(tmp_path / "back")
    store = ShardStore(tmp_path / "back" / "half" / half.name, PROVENANCE)
    assert [name for name in NAMES if store.has(name)] == NAMES[:3]
    assert not sync(tmp_path / "here", bucket, verify=False).copied
