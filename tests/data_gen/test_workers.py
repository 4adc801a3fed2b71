"""Several processes on one folder make a data set together: the same bytes, nothing twice, nothing lost with one that dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = """
import errno, logging, sys, time
from pathlib import Path
import torch
from fakes import tiny_pair
from data_gen import run
from data_gen.settings import Generation
from specheads.errors import user_error
from specheads.storage import shards
from specheads.prompts.prompt import Prompt
from specheads.sampling import Warp

torch.set_num_threads(1)
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
pair = tiny_pair(8, scale=2.0)
make_rows = run.make_rows

def slow(*arguments):
    print("making", *(prompt.text for prompt, _ in arguments[1].prompts), flush=True)
    time.sleep(float(sys.argv[2]))
    return make_rows(*arguments)

class Letters:
    def load(self, chats):
        for number in range(16):
            text = format(number, "04b").translate(str.maketrans("01", "ab"))
            yield Prompt(format(number, "016x"), ("train", "train", "dev", "test")[number % 4], text)

def full(table, path, compression):
    Path(path).write_bytes(b"as much as there was room for")
    raise OSError(errno.ENOSPC, "No space left on device", str(path))

run.make_rows = slow
if sys.argv[3:] == ["full"]:
    shards.pq.write_table = full
settings = Generation(warp=Warp(1.0, top_k=5), max_new_tokens=6, max_prompt_tokens=8, batch_size=2, rows_per_shard=2)
try:
    print("folder", run.generate_data(pair, Letters(), settings, Path(sys.argv[1])))
except Exception as error:
    print("error:", user_error(error))
    sys.exit(2)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
NUM_SHARDS = 8


def start(root, seconds_per_shard=0.2, *more):
    command = [sys.executable, "-c", WORKER, str(root), str(seconds_per_shard), *more]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def content(root):
    (folder,) = root.iterdir()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def made(output):
    return [line for line in output.splitlines() if line.startswith("making")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    assert len(made(output_of(start(root, 0.0)))) == NUM_SHARDS
    return content(root)


def test_two_processes_share_a_data_set_and_write_the_bytes_of_one(alone, tmp_path):
    outputs = [output_of(process) for process in [start(tmp_path), start(tmp_path)]]
    shards = [shard for output in outputs for shard in made(output)]
    assert len(set(shards)) == len(shards) == NUM_SHARDS
    assert content(tmp_path) == alone


def test_a_killed_process_costs_the_shard_that_it_was_making(alone, tmp_path):
    first = start(tmp_path, 600.0)
    while not (line := first.stdout.readline()).startswith("making"):
        pass
    second = start(tmp_path, 0.0)
    while "waiting for other workers" not in (waiting := second.stdout.readline()):
        assert waiting
    first.kill()
    first.communicate()
    rest = output_of(second)
    assert f"its worker, process {first.pid}, has ended" in rest and line.strip() in made(rest)
    assert content(tmp_path) == alone


def test_a_worker_with_a_full_disk_ends_with_a_message_and_the_others_go_on(alone, tmp_path):
    first, second = start(tmp_path, 0.2, "full"), start(tmp_path)
    text, _ = first.communicate(timeout=120)
    assert first.returncode == 2 and len(made(text)) == 1
    assert "No space left on device: the disk is full; free some space" in text.splitlines()[-1]
    assert len(made(output_of(second))) == NUM_SHARDS
    assert content(tmp_path) == alone
