"""A target behind vLLM's HTTP interface: a stand-in for the server, and vLLM's own where there is one (see tests/vllm/run)."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from vllm_server import StandIn, serving

from specheads import UserError, load_pair
from specheads.integrations.served_target import Server, served_pair
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt, ResponseLimits, text_id
from specheads.replay.head_scores import add_predictions
from specheads.replay.recording import GROUND_TRUTH, _responder, load_recording, make_recording
from specheads.replay.response_batch import ResponseBatch
from specheads.replay.response_tree import RecordSettings

ROOT = Path(__file__).parents[2]
REAL = os.environ.get("SPECHEADS_VLLM_PYTHON") or str(ROOT / ".vllm" / "bin" / "python")
STARTS_WITHIN = 180  # seconds
WARPS = [Warp(0.0), Warp(1.0, 50), Warp(0.7, 20, 0.9)]


@contextlib.contextmanager
def real_server(folder):
    """Yield the address of a vLLM server for nano's target."""
    target = folder / "target"
    shutil.copytree(ROOT / "specheads" / "nano" / "target", target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "specheads" / "nano" / name, target)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"model": target, "port": port, "host": "127.0.0.1", "dtype": "float32", "max-logprobs": 50}
    options |= {"served-model-name": "nano-target", "max-model-len": 1024}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [REAL, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager", "--no-enable-chunked-prefill"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | settings | {"VLLM_NO_USAGE_STATS": "1"}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(STARTS_WITHIN):
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.fixture(scope="module", params=["stand-in", "vLLM"])
def url(request, nano, tmp_path_factory):
    if request.param == "vLLM" and not Path(REAL).is_file():
        pytest.skip("there is no environment with vLLM; tests/vllm/run makes one")
    with serving(StandIn(nano)) if request.param == "stand-in" else real_server(tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="module")
def weightless():
    return load_pair("nano", only_draft=True)


@pytest.mark.parametrize("warp", WARPS)
def test_distributions_along_texts_are_the_targets(url, weightless, nano, prompts, warp):
    pair = served_pair(weightless, Server(url), warp)
    batch = ResponseBatch.of(
        [torch.tensor(ids).numpy() for ids in prompts[:3]], [torch.arange(9).numpy()] * 3, torch.device("cpu")
    )
    with torch.no_grad():
        expected, served = (warp(lm.logits(batch.states(lm))) for lm in (nano.target_lm, pair.target_lm))
    torch.testing.assert_close(served, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_greedy_recording_is_that_of_the_pair(url, weightless, nano, prompts, samples, tmp_path):
    """Tokens, acceptances and branches are equal, and so are the target's probabilities of branches."""
    warp, limits = Warp(0.0), ResponseLimits(16, 256, 4)
    encoded = [(Prompt(text_id(str(ids)), "dev", str(ids)), ids) for ids in prompts[:3]]
    recordings = []
    for pair in (served_pair(weightless, Server(url), warp), nano):
        folder = make_recording(pair, encoded, warp, limits, RecordSettings(samples, 8, 16), 0, tmp_path)
        add_predictions(folder, pair, {}, ground_truth=True)
        recordings.append(load_recording(folder, [GROUND_TRUTH]))
    served, local = recordings
    for name in ("tokens", "accepted", "branch_first", "branch_length", "finished"):
        assert torch.equal(getattr(served, name), getattr(local, name)), name
    torch.testing.assert_close(served.features[GROUND_TRUTH], local.features[GROUND_TRUTH], atol=2e-5, rtol=0)


def test_a_sampled_recording_has_the_branches_of_its_responses(url, weightless, nano, prompts, tmp_path):
    warp = Warp(1.0, 50)
    encoded = [(Prompt(text_id(str(ids)), "dev", str(ids)), ids) for ids in prompts[:2]]
    served = served_pair(weightless, Server(url), warp)
    folder = make_recording(served, encoded, warp, ResponseLimits(24, 256, 4), RecordSettings(2, 8, 16), 0, tmp_path)
    add_predictions(folder, served, {}, ground_truth=True)
    theirs = load_recording(folder, [GROUND_TRUTH]).features[GROUND_TRUTH]
    shutil.rmtree(folder / "predictions")
    add_predictions(folder, nano, {}, ground_truth=True)
    torch.testing.assert_close(theirs, load_recording(folder, [GROUND_TRUTH]).features[GROUND_TRUTH], atol=1e-4, rtol=0)


def test_the_probability_of_unnamed_tokens_is_known(url, weightless, nano, prompts):
    few = served_pair(weightless, Server(url), Warp(1.0, 5)).target_lm
    text = torch.tensor([prompts[0]])
    probs = nano.target_lm.logits(nano.target_lm.hidden_states(text)[0]).softmax(dim=-1)
    left_out = few.left_out(few.hidden_states(text)[0])
    torch.testing.assert_close(left_out, 1 - probs.topk(5).values.sum(dim=-1), atol=2e-5, rtol=0)


def test_requests_ask_for_nothing_that_a_folder_recommends(nano, weightless, prompts):
    stand_in = StandIn(nano)
    with serving(stand_in) as url:
        pair = served_pair(weightless, Server(url), Warp(0.5, 20))
        encoded = [(Prompt("1", "dev", ""), prompts[0])]
        responder = _responder(pair, [len(prompts[0])], ResponseLimits(4, 256, 4))
        responder.respond([ids for _, ids in encoded], torch.rand(1, 4).double().numpy(), Warp(0.5, 20))
    asked = stand_in.asked[-1]
    assert asked["repetition_penalty"] == 1 and asked["min_p"] == 0 and asked["top_k"] == 20 and asked["temperature"] == 0.5


def test_mistakes_are_named(nano, weightless, prompts):
    with pytest.raises(UserError, match=r"remote.url=http://127.0.0.1:1: /v1/models gives no answer .* vllm serve <target>"):
        Server("http://127.0.0.1:1")
    with pytest.raises(UserError, match="remote.url=nonsense"):
        Server("nonsense")
    with serving(StandIn(nano, most=20)) as url:
        with pytest.raises(UserError, match="has nano-target, other; name one of them"):
            Server(url, "mine")
        served = served_pair(weightless, Server(url + "/v1/"), Warp(1.0, 50)).target_lm
        with pytest.raises(UserError, match="start it with --max-logprobs 50, or use warp.top_k=20"):
            served.states([prompts[0]])
    stranger = StandIn(nano)
    stranger.answer = lambda path, body: {"tokens": [1]} if path == "/tokenize" else StandIn.answer(stranger, path, body)
    with serving(stranger) as url, pytest.raises(UserError, match="another tokenizer than .*set model.target"):
        served_pair(weightless, Server(url), Warp())
