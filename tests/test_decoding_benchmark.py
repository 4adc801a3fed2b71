"""The benchmark of decoding: the file for llama.cpp holds the model, and its processes decode as
this project does.
"""

import json
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from benchmarks.decoding import (
    PEERS,
    Setting,
    Timed,
    _all_peers,
    _same_tokens,
    _source,
    _speed_table,
    fastest,
    measure,
)
from benchmarks.gguf_file import (
    complete_output,
    file_type,
    gguf_tensors,
    interleaved,
    obstacle,
    write_gguf,
)
from benchmarks.peer_workers.processes import PeerCommand, PeerError, Workers
from specheads import Warp, generate_baseline, load_pair
from specheads.pair.draft_vocabulary import keep_tokens, kept_tokens

GREEDY = Warp(0)
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SETUP = {"model": "nano", "pair_keys": {"device": "cpu"}, "threads": 1, "engine": "eager"}
SETUP |= {"warp": asdict(GREEDY), "head": None, "rate": None}


def small_llama(dtype=torch.float32, **keys):
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, **keys)).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_holds_the_weights(dtype, tied, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = small_llama(dtype, tie_word_embeddings=tied)
    assert obstacle(model) is None
    write_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    read = {
        each.name: torch.tensor(gguf.quants.dequantize(each.data, each.tensor_type))
        for each in reader.tensors
    }
    state = model.state_dict()
    assert len(read) == len(state) - tied and ("output.weight" in read) == (not tied)
    torch.testing.assert_close(
        read["token_embd.weight"], state["model.embed_tokens.weight"].float(), rtol=0, atol=0
    )
    torch.testing.assert_close(
        read["blk.1.ffn_down.weight"],
        state["model.layers.1.mlp.down_proj.weight"].float(),
        rtol=0,
        atol=0,
    )
    for name, weight in gguf_tensors(model):
        torch.testing.assert_close(read[name], weight.float(), rtol=0, atol=0)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (
        fields["llama.attention.head_count_kv"] == 2 and fields["llama.rope.dimension_count"] == 16
    )
    assert (
        len(fields["tokenizer.ggml.tokens"]) == 40 and "tokenizer.ggml.eos_token_id" not in fields
    )


def test_tensors_of_a_quantised_file_are_written_as_they_are(tmp_path):
    gguf = pytest.importorskip("gguf")
    source = tmp_path / "source.gguf"
    written = tmp_path / "written.gguf"
    write_gguf(small_llama(), source, stored="Q8_0")
    write_gguf(small_llama(), written, source=source)
    given, read = (
        {each.name: each for each in gguf.GGUFReader(path).tensors} for path in (source, written)
    )
    assert given.keys() == read.keys() and file_type(written) == "Q8_0"
    assert all(
        each.tensor_type == read[name].tensor_type and (each.data == read[name].data).all()
        for name, each in given.items()
    )


@pytest.fixture
def cut():
    """Nano with a draft whose output has two thirds of the tokens."""
    pair = load_pair("nano", dtype="float32")
    keep_tokens(pair.draft, torch.arange(2048)[torch.arange(2048) % 3 > 0])
    return replace(pair)


def test_a_completed_output_proposes_as_the_draft_did(cut, prompts):
    tokens = torch.tensor([(prompt * 30)[:100] for prompt in prompts[:4]])
    kept = kept_tokens(cut.draft)
    before = cut.draft_lm.logits(cut.draft_lm.hidden_states(tokens))
    complete_output(cut.draft)
    after = cut.draft(tokens).logits
    assert after.shape == before.shape and torch.equal(after.argmax(-1), before.argmax(-1))
    torch.testing.assert_close(after[..., kept], before[..., kept])
    torch.testing.assert_close(after.softmax(-1), before.softmax(-1))
    assert obstacle(cut.draft) is None and kept_tokens(cut.draft) is None


def test_rows_are_rotated_as_neighbours():
    """llama.cpp rotates neighbouring rows of a head, transformers its two halves: both give the
    same scores.
    """
    config = LlamaConfig(**SMALL, **HEADS)
    matrix = torch.randn(4 * 16, 32)
    hidden = torch.randn(1, 5, 32)
    cos, sin = LlamaRotaryEmbedding(config)(hidden, torch.arange(5)[None])
    halves = (hidden @ matrix.T).view(1, 5, 4, 16)
    rotated = halves * cos[:, :, None] + rotate_half(halves) * sin[:, :, None]
    pairs = (hidden @ interleaved(matrix, 4).T).view(1, 5, 4, 8, 2)
    turn = torch.complex(cos[..., :8], sin[..., :8])[:, :, None]
    neighbours = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    torch.testing.assert_close(neighbours[..., 0], rotated[..., :8])
    torch.testing.assert_close(neighbours[..., 1], rotated[..., 8:])


def test_models_that_cannot_be_written_have_a_reason():
    other = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2))
    assert "architecture is gpt2" in obstacle(other)
    assert "float16" in obstacle(small_llama(torch.float16))
    assert "rope type is yarn" in obstacle(small_llama(rope_parameters=yarn()))
    assert "biases" in obstacle(small_llama(attention_bias=True))


def yarn():
    return {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    }


def arguments(**values):
    given = {
        "model": "nano",
        "dtype": None,
        "device": "cpu",
        "head": None,
        "rate": None,
        "engine": "eager",
    }
    given |= {"threads": 1, "window": 256, "at_once": [1], "vllm_python": "no-python"}
    return Namespace(**given | {"vllm_eager": False, "peers": PEERS} | values)


def test_missing_peers_are_left_out_with_a_line(nano, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.decoding.can_import", lambda python, package: False)
    made = _all_peers(nano, arguments(), GREEDY, tmp_path)
    assert set(made.commands) == {"transformers", "this decoder"} and list(tmp_path.iterdir()) == []
    left_out = "\n".join(made.left_out)
    assert "vLLM is left out" in left_out and "the head is left out" in left_out
    assert 'llama.cpp is left out: pip install "specheads[bench]"' in left_out


def test_every_setting_of_vllm_is_a_process_of_its_own_with_its_options(
    nano, tmp_path, monkeypatch
):
    monkeypatch.setattr("benchmarks.decoding.can_import", lambda python, package: package == "vllm")
    given = arguments(head="outputs/head", at_once=[1, 4])
    for warp in (GREEDY, Warp()):
        made = _all_peers(nano, given, warp, tmp_path)
        settings = [setting for setting in made.settings if setting.peer == "vLLM"]
        assert len({setting.worker for setting in settings}) == len(settings) > 5
        setups = {setting.name: made.commands[setting.worker].setup for setting in settings}
        assert (
            setups["vLLM, alone"]["drafted"] == 0
            and setups["vLLM, draft model, K=4"]["drafted"] == 4
        )
        assert setups["vLLM, head on the draft model, threshold 0.5"]["threshold"] == 0.5
        assert all(each["head"].endswith("/outputs/head") for each in setups.values())
        assert all(
            each["requests"] == 4 and each["warp"] == asdict(warp) for each in setups.values()
        )


def test_processes_decode_as_this_project_and_stand_still_between(nano, prompts):
    names = ("this decoder", "transformers")
    commands = {
        name: PeerCommand(sys.executable, "local_worker.py", SETUP | {"peer": name})
        for name in names
    }
    length = 12
    expected = [
        generate_baseline(nano, p, length, warp=Warp(temperature=0), stop_tokens=()).tokens.tolist()
        for p in prompts[:2]
    ]
    assisted = {
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    with Workers(commands) as workers:
        for name, options in (
            ("this decoder", {"rule": "alone"}),
            ("this decoder", {"rule": "fixed", "value": 3}),
            ("transformers", {}),
            ("transformers", assisted),
            ("transformers", {"prompt_lookup_num_tokens": 3}),
        ):
            request = {"options": options, "seeds": [0], "length": length}
            for prompt, response in zip(prompts, expected, strict=False):
                answer = workers.ask(name, request | {"prompts": [prompt]})
                assert answer["responses"] == [response] and answer["seconds"] > 0
        together = {
            "options": {"rule": "fixed", "value": 3},
            "prompts": prompts[:2],
            "seeds": [0, 1],
            "length": length,
            "at_once": 2,
        }
        assert workers.ask("this decoder", together)["responses"] == expected
        processes = [worker._process.pid for worker in workers._running.values()]
        if Path("/proc").is_dir():
            assert [
                Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] for pid in processes
            ] == ["T", "T"]
        with pytest.raises(PeerError, match="rule 'none' is not known"):
            workers.ask("this decoder", together | {"options": {"rule": "none"}})


def needs_llama_cpp():
    if not (
        find_spec("gguf") and find_spec("xllamacpp")
    ):  # not imported: its threads are not for this process
        pytest.skip("needs the extra bench")


def test_llama_cpp_decodes_as_this_project(cut, prompts, tmp_path):
    needs_llama_cpp()
    made = _all_peers(cut, arguments(), GREEDY, tmp_path)
    command = made.commands["llama.cpp, float32, alone"]
    of_draft = replace(command, setup={**command.setup, "file": command.setup["draft_file"]})
    # Top-p of the distribution at the temperature, half of all tokens; at temperature 1 it would
    # keep few.
    hot = replace(command, setup={**command.setup, "warp": asdict(Warp(100.0, top_p=0.5))})
    request = {"options": {}, "prompts": [prompts[0]], "seeds": [0], "length": 24}
    with Workers(made.commands | {"draft": of_draft, "hot": hot}) as workers:
        names = (
            "llama.cpp, float32, alone",
            "llama.cpp, float32, draft model, K=3",
            "draft",
            "hot",
        )
        *responses, drafted, random = [workers.ask(name, request)["responses"][0] for name in names]
    plain = generate_baseline(cut, prompts[0], 24, warp=GREEDY, stop_tokens=()).tokens.tolist()
    assert responses == [plain, plain] and len(set(random)) > 15
    out = cut.draft.generate(
        torch.tensor([prompts[0]]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert drafted == out[0, -24:].tolist()


def test_llama_cpp_runs_a_gguf_file_in_float16_and_with_its_own_tensors(
    cut, prompts, tmp_path, monkeypatch
):
    needs_llama_cpp()
    write_gguf(cut.target, tmp_path / "target.gguf", stored="Q8_0")
    monkeypatch.setattr("benchmarks.decoding.gguf_file", lambda location: tmp_path / "target.gguf")
    made = _all_peers(cut, arguments(), Warp(top_p=1e-6), tmp_path)  # greedy by another way
    request = {"options": {}, "prompts": [prompts[0]], "seeds": [0], "length": 8}
    names = [
        f"llama.cpp, {kind}, {way}"
        for kind in ("float16", "Q8_0")
        for way in ("alone", "draft model, K=2, sampled")
    ]
    with Workers(made.commands) as workers:
        responses = [workers.ask(name, request)["responses"][0] for name in names]
    assert responses == 4 * [
        generate_baseline(cut, prompts[0], 8, warp=GREEDY, stop_tokens=()).tokens.tolist()
    ]


def test_prompts_of_a_file_are_instructions_questions_or_prompts(tmp_path):
    rows = [
        {"instruction": "add", "input": "1, 2"},
        {"instruction": "rest", "input": ""},
        {"instruction": "go", "input": ""},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loaded = {prompt.text for prompt in _source(str(tmp_path / "rows.jsonl"), 2).load(True)}
    assert loaded == {"add\nInput: 1, 2", "rest", "go"}


class FakeWorkers:
    """Settings decode at the speed that their options name."""

    def __init__(self):
        self.asked = []

    def ask(self, name, request):
        count = len(request["prompts"])
        self.asked.append((count, request["seeds"]))
        seconds = count * request["length"] / request["options"]["speed"]
        return {
            "responses": [[1] * request["length"]] * count,
            "seconds": seconds,
            "totals": [2, 3, 0.25, 0.5, 0.0],
        }


def speed(value):
    return {"speed": value}


def test_the_fastest_setting_of_each_way_is_reported():
    settings = [
        Setting("this decoder", "alone", options=speed(100)),
        Setting("transformers", "alone", options=speed(50)),
    ]
    settings += [
        Setting("this decoder", "draft", f"K={k}", options=speed(value))
        for k, value in ((1, 110), (2, 150), (3, 120))
    ]
    how = ([[1], [2]], 8, 3)
    chosen = fastest(FakeWorkers(), settings, *how)
    assert [setting.name for setting in chosen] == [
        "this decoder, alone",
        "transformers, alone",
        "this decoder, draft, K=2",
    ]
    table = _speed_table(chosen, measure(FakeWorkers(), chosen, *how), "greedy")
    expected = [150, 150, 150, 3.0, 1.5, 1.0, 1.5, 0.125, 0.25, 0]
    assert [round(value, 6) for value in table.rows[2][1:]] == expected
    table = _speed_table(chosen, measure(FakeWorkers(), chosen, *how), "cool", 4)
    assert (
        table.title == "Sampled at temperature 0.2, top-p 0.9, 4 prompts under way"
        and table.rows[2][6] is None
    )
    assert _same_tokens(Timed([], [[1, 2, 3, 4]]), Timed([], [[1, 2, 4, 4]])) == 0.5


def test_a_worker_gets_all_prompts_after_a_first_that_is_not_counted():
    workers = FakeWorkers()
    measured = measure(
        workers, [Setting("vLLM", "alone", options=speed(100))], [[1]] * 5, 8, 2, at_once=2
    )
    assert workers.asked == [
        (2, [0, 1]),
        (5, [0, 1, 2, 3, 4]),
        (2, [1000, 1001]),
        (5, [1000, 1001, 1002, 1003, 1004]),
    ]
    assert (
        measured["vLLM, alone"].speeds == pytest.approx([100, 100])
        and len(measured["vLLM, alone"].responses) == 5
    )
    workers = FakeWorkers()
    measure(workers, [Setting("vLLM", "alone", options=speed(100))], [[1]] * 3, 8, 1)
    assert workers.asked == [(1, [0]), (1, [0]), (1, [1]), (1, [2])]


def test_only_the_peers_that_are_asked_for_are_compared(nano, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.decoding.can_import", lambda python, package: package == "vllm")
    for peer in ("transformers", "this decoder", "vLLM"):
        made = _all_peers(nano, arguments(peers=[peer]), GREEDY, tmp_path / peer)
        assert {setting.peer for setting in made.settings} == {peer}
