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
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decoding import (
    PEERS,
    _all_peers,
    _source,
)
from benchmarks.gguf_file import (
    complete_output,
    file_type,
    gguf_tensors,
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


def test_prompts_of_a_file_are_instructions_questions_or_prompts(tmp_path):
    rows = [
        {"instruction": "add", "input": "1, 2"},
        {"instruction": "rest", "input": ""},
        {"instruction": "go", "input": ""},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loaded = {prompt.text for prompt in _source(str(tmp_path / "rows.jsonl"), 2).load(True)}
    assert loaded == {"add\nInput: 1, 2", "rest", "go"}
