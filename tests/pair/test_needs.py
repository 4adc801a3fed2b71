"""What is said of a pair before it is loaded, and of models that the hub does not hand out yet."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import architectures
import pytest
import torch
from commands import run
from fakes import tiny_pair

from specheads.decoding.engine import EagerEngine
from specheads.pair import needs
from specheads.pair.needs import memory_of, memory_parts


def test_the_parts_of_memory_are_those_of_the_model():
    lm = tiny_pair(7).target_lm
    memory = EagerEngine(lm, 10, num_rows=3)
    read = torch.zeros(2, 5, dtype=torch.long)
    width = lm.model.base_model.layers[0].mlp.up_proj(lm.hidden_states(read)).nbytes
    assert memory_parts(lm, positions=3 * 10, tokens=2 * 5, rows=4) == {
        "keys and values": memory.memory_bytes,
        "activations": 4 * (width + lm.hidden_states(read).nbytes),
        "distributions": 6 * lm.logits(torch.zeros(4, lm.hidden_size, dtype=lm.model.dtype)).nbytes,
    }
    assert memory_parts(lm, rows=4, most=20)["distributions"] == 6 * 20 * lm.probs_dtype.itemsize


def test_memory_is_announced_with_its_parts(monkeypatch, caplog):
    lm = tiny_pair(7).target_lm
    monkeypatch.setattr(needs, "memory_in_use", lambda: 2e9)
    monkeypatch.setattr(needs, "available_memory", lambda: 3.5e9)
    said = memory_of("work", lm, {"logits": 1e9, "little": 1e5}, {"logits": 2e9, "copies": 3e8})
    assert (
        said == "about 5.3 GB of memory (weights and all in use 2 GB, logits 3 GB, copies 300 MB)"
        and not caplog.records
    )
    memory_of("work", lm, {"logits": 4e9})
    assert caplog.messages == [
        (
            "work: about 4 GB more memory is needed, but 3.5 GB are available; take smaller"
            " batches, shorter texts or smaller models"
        )
    ]


@pytest.fixture
def gate():
    """The address of a hub on which every model is gated, as huggingface.co answers to an account
    without access.
    """

    class Gate(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(401)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header(
                "X-Error-Message", "Access to this model is restricted. Please log in."
            )
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Gate) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            ["evaluate.py", "model=llama2-7b", "head=null"],
            "pair llama2-7b: draft meta-llama/Llama-2-7b-chat-hf for target",
            marks=pytest.mark.full,
        ),
        (
            [
                "specheads",
                "distill",
                "model=mine",
                "model.draft=someone/draft",
                "model.target=someone/target",
            ],
            "pair mine: draft someone/draft for target someone/target",
        ),
    ],
)
def test_a_gated_model_is_an_error_that_says_how_to_get_access(gate, tmp_path, words, said):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instruction": f"{n}"}) + "\n" for n in range(20)))
    hub = {
        "HF_ENDPOINT": gate,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "",
    }
    done = run(tmp_path, *words, "data=alpaca", f"data.path={rows}", **hub)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    error = next(line for line in done.stderr.splitlines() if "is gated" in line)
    assert (
        "is gated, so: accept the licence at https://huggingface.co/" in error
        and "hf auth login" in error
    )
    logs = [path.read_text() for path in tmp_path.glob("outputs/**/*.log")]
    assert "".join([done.stdout, done.stderr, *logs]).count(said) == 1


# Whose layers have keys of different sizes
@pytest.mark.parametrize("name", ["llama", "gemma4_text"])
def test_keys_and_values_are_those_of_all_layers(name):
    lm = architectures.tiny_pair(name).target_lm
    cache = lm.model(torch.arange(5)[None], use_cache=True).past_key_values
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert memory_parts(lm, positions=5)["keys and values"] == held
