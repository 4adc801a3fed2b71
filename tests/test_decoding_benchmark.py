"""The benchmark of decoding: its processes decode as this project does, and the fastest setting of
each way is reported.
"""

import copy
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.decoding import (
    Setting,
    Timed,
    _same_tokens,
    _speed_table,
    all_settings,
    fastest,
    measure,
)
from benchmarks.peer_workers.processes import PeerCommand, PeerError, Workers
from specheads import Warp, generate_baseline
from specheads.pair.draft_vocabulary import keep_tokens

GREEDY = Warp(0)
SETUP = {"model": "nano", "threads": 1, "engine": "eager"}
SETUP |= {"warp": asdict(GREEDY), "head": None}


def arguments(**values):
    given = {"model": "nano", "head": None, "engine": "eager", "threads": 1}
    return Namespace(**given | {"vllm_python": "no-python"} | values)


def test_a_missing_peer_is_left_out(nano, tmp_path):
    made = all_settings(nano, arguments(), GREEDY, tmp_path)
    assert "vLLM" not in {setting.peer for setting in made}


def test_every_setting_of_vllm_is_a_process_with_its_options(nano, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\n")  # an interpreter that has every package
    (tmp_path / "python").chmod(0o755)
    given = arguments(head="outputs/head", vllm_python=str(tmp_path / "python"))
    for warp in (GREEDY, Warp()):
        made = all_settings(nano, given, warp, tmp_path)
        setups = {each.name: each.worker.setup for each in made if each.peer == "vLLM"}
        assert len({str(setup) for setup in setups.values()}) == len(setups) > 5
        assert setups["vLLM, alone"]["drafted"] == 0
        assert setups["vLLM, draft model, K=4"]["drafted"] == 4
        assert setups["vLLM, head on the draft model, threshold 0.5"]["threshold"] == 0.5
        for setup in setups.values():
            assert setup["head"].endswith("/outputs/head")
            assert setup["warp"] == asdict(warp)


def test_processes_decode_as_this_project_and_stand_still_between(nano, prompts):
    commands = {}
    for name in ("this decoder", "transformers"):
        commands[name] = PeerCommand(sys.executable, "local_worker.py", SETUP | {"peer": name})
    length = 12
    expected = []
    for prompt in prompts[:2]:
        out = generate_baseline(nano, prompt, length, warp=GREEDY, stop_tokens=())
        expected.append(out.tokens.tolist())
    assisted = {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    fixed = {"rule": "fixed", "value": 3}
    with Workers() as workers:
        for name, options in (
            ("this decoder", {"rule": "alone"}),
            ("this decoder", fixed),
            ("transformers", {}),
            ("transformers", assisted),
        ):
            request = {"options": options, "seed": 0, "length": length}
            for prompt, response in zip(prompts, expected, strict=False):
                answer = workers.ask(commands[name], request | {"prompt": prompt})
                assert answer["response"] == response and answer["seconds"] > 0
        if Path("/proc").is_dir():
            for worker in workers._running.values():
                status = Path(f"/proc/{worker._process.pid}/stat").read_text()
                assert status.rpartition(") ")[2][0] == "T"
        answerless = request | {"prompt": prompts[0], "options": {"rule": "none"}}
        with pytest.raises(PeerError, match="rule 'none' is not known"):
            workers.ask(commands["this decoder"], answerless)


def test_llama_cpp_decodes_the_same_models(nano, prompts, tmp_path):
    """Alone and with a draft that has an output over some tokens alone."""
    # Its library and this process's cannot be loaded together
    if not (find_spec("xllamacpp") and find_spec("gguf")):
        pytest.skip("there is no xllamacpp")
    draft = copy.deepcopy(nano.draft)
    keep_tokens(draft, torch.arange(0, nano.draft.config.vocab_size, 2))
    length = 12
    reference = generate_baseline(nano, prompts[0], length, warp=GREEDY, stop_tokens=())
    request = {"options": {}, "prompt": prompts[0], "length": length, "seed": 0}
    made = all_settings(replace(nano, draft=draft), arguments(), GREEDY, tmp_path)
    of_llama = {each.name: each for each in made if each.peer == "llama.cpp F16"}
    with Workers() as workers:
        for name in ("llama.cpp F16, alone", "llama.cpp F16, draft model, K=3"):
            answer = workers.ask(of_llama[name].worker, request)
            assert answer["response"] == reference.tokens.tolist() and answer["seconds"] > 0


class FakeWorkers:
    """Settings decode at the speed that their options name."""

    def __init__(self):
        self.asked = []

    def ask(self, name, request):
        self.asked.append((request["prompt"], request["seed"]))
        return {
            "response": [1] * request["length"],
            "seconds": request["length"] / request["options"]["speed"],
            "totals": {"rounds": 2, "tokens": 3, "draft": 0.25, "verify": 0.5, "commit": 0.0},
        }


def setting(peer, way, choice, speed):
    command = PeerCommand("python", "worker.py", {})
    return Setting(peer, way, choice, command, options={"speed": speed})


def test_the_fastest_setting_of_each_way_is_reported():
    settings = [
        setting("this decoder", "alone", "", 100),
        setting("transformers", "alone", "", 50),
        setting("this decoder", "draft", "K=1", 110),
        setting("this decoder", "draft", "K=2", 150),
        setting("this decoder", "draft", "K=3", 120),
    ]
    prompts = [[1], [2]]
    chosen = fastest(FakeWorkers(), settings, prompts, 8)
    assert [each.name for each in chosen] == [
        "this decoder, alone",
        "transformers, alone",
        "this decoder, draft, K=2",
    ]
    measured = measure(FakeWorkers(), chosen, prompts, 8, 3)
    table = _speed_table(chosen, measured, "greedy_nano", "Greedy")
    expected = [150, 150, 150, 3.0, 1.5, 1.0, 1.5, 0.125, 0.25, 0]
    assert table.rows[2][1:] == pytest.approx(expected)
    table = _speed_table(chosen, measured, "sampled_nano", "Sampled")
    assert table.title == "Sampled" and table.rows[2][6] is None
    assert _same_tokens(Timed([], [[1, 2, 3, 4]]), Timed([], [[1, 2, 4, 4]])) == 0.5


def test_prompts_are_asked_one_by_one_after_a_first_that_is_not_counted():
    workers = FakeWorkers()
    made = measure(workers, [setting("vLLM", "alone", "", 100)], [[1], [2]], 8, 2)["vLLM, alone"]
    asked = [([1], 0), ([1], 0), ([2], 1)]
    assert workers.asked == asked + [(prompt, 1000 + seed) for prompt, seed in asked]
    assert made.speeds == pytest.approx([100, 100]) and len(made.responses) == 2
