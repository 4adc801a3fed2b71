"""Responses by a running server: a stand-in that answers, fails and lies as servers do, and
llama-server where it is there.
"""

import contextlib
import copy
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pyarrow.parquet as pq
import pytest
import torch
from fakes import tiny_pair
from warm_processes import run

from specheads.data_gen import server_runner
from specheads.data_gen.run import cache_provenance, generate_data
from specheads.data_gen.server_runner import Completion, Server, at_once, check_target, response_of
from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.shard_rows import label_responses, uniforms_of
from specheads.errors import UserError
from specheads.pair.sampling import Warp
from specheads.prompts.sources import NanoSource

SIZES = {"max_new_tokens": 12, "rows_per_shard": 3, "responses_per_prompt": 2}
LLAMA_SERVER = """
import socket, sys, xllamacpp

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 1024
params.n_parallel = 2
params.port = port
params.warmup = False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
COUNT = 9  # responses: two to each of four prompts, and one


class StandIn:
    """A server of a pair's target. By default it answers as vLLM does.

    `broken` changes or refuses an answer.
    """

    def __init__(self, pair):
        self.pair = pair
        self.asked = []
        self.headers = []
        self.paths = []
        self.models = ["target"]
        self.lock = threading.Lock()
        self.broken = lambda number, body, answer: (200, answer)
        self.num_under_way = self.most_under_way = 0

    @torch.no_grad()
    def answer(self, body):
        """Greedy tokens at temperature 0.

        Else tokens that count on from the seed, every third response ends by itself.
        """
        ids = list(body["prompt"])
        seed = body["seed"]
        lm = self.pair.target_lm
        logits = lm.logits(lm.hidden_states(torch.tensor([ids])))[0, -1]
        if body["temperature"] == 0:
            made = [int(logits.argmax())]
            return self.as_vllm(ids, made, "length", [float(logits.log_softmax(-1)[made[0]])])
        made = [
            (seed + place) % 500 + 10 for place in range(3 if seed % 3 == 0 else body["max_tokens"])
        ]
        made += [body["stop_token_ids"][0]] if seed % 3 == 0 else []
        return self.as_vllm(ids, made, "length" if seed % 3 else "stop", [-1.0] * len(made))

    @staticmethod
    def as_vllm(ids, made, reason, logprobs):
        choice = {
            "text": "x",
            "token_ids": made,
            "finish_reason": reason,
            "logprobs": {"token_logprobs": logprobs},
        }
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}

    def post(self, body, headers):
        with self.lock:
            self.num_under_way += 1
            self.most_under_way = max(self.most_under_way, self.num_under_way)
            self.asked.append(body)
            self.headers.append(headers)
            number = len(self.asked)
        time.sleep(0.01)
        try:
            return self.broken(number, body, self.answer(body))
        finally:
            with self.lock:
                self.num_under_way -= 1

    @property
    def sampled(self):
        return [body for body in self.asked if body["temperature"]]


def as_llama(answer):
    """Return an answer in the form of llama-server's."""
    (choice,) = answer["choices"]
    numbers = choice["logprobs"]["token_logprobs"]
    content = [
        {"id": token, "logprob": number}
        for token, number in zip(choice.pop("token_ids"), numbers, strict=True)
    ]
    return {**answer, "choices": [{**choice, "logprobs": {"content": content}}]}


@contextlib.contextmanager
def served(stand_in):
    class Handler(BaseHTTPRequestHandler):
        def reply(self, status, content):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if 300 <= status < 400:
                self.send_header("Location", content.decode())
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

        def do_GET(self):
            stand_in.paths.append(self.path)
            self.reply(200, {"data": [{"id": name} for name in stand_in.models]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*stand_in.post(body, dict(self.headers)))

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()


@pytest.fixture
def stand_in(nano):
    return StandIn(nano)


@pytest.fixture
def url(stand_in):
    with served(stand_in) as address:
        yield address


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch):
    monkeypatch.setattr(server_runner, "_DELAYS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(Server._ask, "__defaults__", (None, (0.0, 0.0, 0.0)))


@pytest.fixture(scope="module")
def prompts(nano):
    return list(NanoSource(4, 1, 0).load(nano.chats))


def settings(url, **more):
    return DataGeneration(
        **{**SIZES, "warp": Warp(1.0, top_k=50), "runner": "server", "server_url": url, **more}
    )


def rows(folder):
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize("form", ["vllm", "llama"])
def test_responses_are_the_servers_and_labels_are_ours(
    nano, prompts, stand_in, url, tmp_path, form
):
    if form == "llama":
        stand_in.broken = lambda number, body, answer: (200, as_llama(answer))
    chosen = settings(url, server_concurrency=4)
    made = rows(generate_data(nano, prompts, chosen, tmp_path))
    asked = {body["seed"]: body for body in stand_in.sampled}
    assert len(made) == len(asked) == len(stand_in.sampled) == COUNT
    for row in made:
        seed = int(uniforms_of(chosen, row["prompt_id"], row["sample"])[0, 0] * 2**31)
        body = asked.pop(seed)
        expected = [(seed + place) % 500 + 10 for place in range(3 if seed % 3 == 0 else 12)]
        expected += [body["stop_token_ids"][0]] if seed % 3 == 0 else []
        cut = next(
            (place + 1 for place, token in enumerate(expected) if token in nano.stop_tokens),
            len(expected),
        )
        assert (row["prompt_ids"], row["response_ids"]) == (body["prompt"], expected[:cut])
        assert row["finished"] == (expected[cut - 1] in nano.stop_tokens)
        assert (body["temperature"], body["top_k"], body["top_p"], body["min_p"]) == (
            1.0,
            50,
            1.0,
            0.0,
        )
        assert (body["model"], body["max_tokens"], body["repetition_penalty"]) == (
            "target",
            12,
            1.0,
        )
    assert not asked and 1 < stand_in.most_under_way <= 4
    row = made[0]
    uniform = uniforms_of(chosen, row["prompt_id"], 0)[None, 1:]
    (labels,) = label_responses(
        nano, [row["prompt_ids"]], [row["response_ids"]], uniform, chosen.warp
    )
    assert row["draft_ids"] == labels["draft_ids"] and row["accept_prob"] == pytest.approx(
        labels["accept_prob"]
    )


def test_what_had_ended_when_the_server_failed_is_kept(
    nano, prompts, stand_in, url, tmp_path, caplog
):
    whole = rows(generate_data(nano, prompts, settings(url), tmp_path / "whole"))
    first = len(stand_in.asked)
    chosen = settings(url, server_concurrency=1)
    stand_in.broken = lambda number, body, answer: (
        (200, answer) if len(stand_in.sampled) <= COUNT + 5 else (503, b"overloaded")
    )
    with pytest.raises(
        UserError,
        match=(
            r"no answer after 4 tries \(503: overloaded\).*run the command again: nothing is lost"
        ),
    ):
        generate_data(nano, prompts, chosen, tmp_path / "data")
    stand_in.broken, before = lambda number, body, answer: (200, answer), len(stand_in.sampled)
    assert before - COUNT == 5 + 4  # tries of the sixth
    caplog.set_level("INFO")
    assert rows(generate_data(nano, prompts, chosen, tmp_path / "data")) == whole
    assert (
        len(stand_in.sampled) - before == COUNT - 5
        and "are reused from an earlier run" in caplog.text
    )
    assert first and not list(tmp_path.glob("data/*/.*.jsonl"))


@pytest.mark.parametrize(
    "failure", [(429, b""), (500, b"{}"), (200, b"no JSON"), (200, b"[]")], ids=str
)
def test_a_failure_now_and_then_changes_nothing(nano, prompts, stand_in, url, tmp_path, failure):
    whole = rows(generate_data(nano, prompts, settings(url), tmp_path / "whole"))
    stand_in.broken = lambda number, body, answer: failure if number % 3 == 0 else (200, answer)
    assert rows(generate_data(nano, prompts, settings(url), tmp_path / "data")) == whole


def changed(**parts):
    def change(number, body, answer):
        choice = answer["choices"][0]
        return 200, {**answer, "choices": [{**choice, **parts}]}

    return change


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            lambda *_: (400, {"error": {"message": "max_tokens is too large"}}),
            r"refuses \(400: .*max_tokens is too large",
        ),
        (lambda *_: (401, {"error": "no key"}), "put its key into the variable OPENAI_API_KEY"),
        (
            lambda number, body, answer: (200, {**answer, "usage": {"prompt_tokens": 1}}),
            "read 1 tokens of a prompt of",
        ),
        (changed(token_ids=None, logprobs=None), "returns no token ids.*runner=local"),
        (changed(token_ids=[10**6]), "the largest is 1000000, .* asked for 1 to 12 of the"),
        (changed(token_ids=[10] * 13), "returned 13 tokens, .* asked for 1 to 12"),
        (changed(finish_reason="abort"), "with finish_reason=abort"),
    ],
)
def test_answers_that_cannot_be_taken(nano, prompts, stand_in, url, tmp_path, broken, message):
    stand_in.broken = lambda number, body, answer: (
        broken(number, body, answer) if body["temperature"] else (200, answer)
    )
    with pytest.raises(UserError, match=message):
        generate_data(nano, prompts, settings(url), tmp_path)


def test_another_model_is_noticed_by_its_log_probabilities(
    nano, prompts, stand_in, url, tmp_path, caplog
):
    stand_in.pair = tiny_pair(nano.vocab_size)  # another target with as many tokens
    with pytest.raises(
        UserError,
        match=r"nats on average from those of .*another model, revision or tokenizer is served",
    ):
        generate_data(nano, prompts, settings(url), tmp_path)
    assert not stand_in.sampled


def test_how_far_log_probabilities_are_from_ours(nano, stand_in, url, caplog):
    texts = [[5, 6, 7], [8, 9]]
    server = Server(url)
    assert check_target(nano, server, texts) < 1e-5 and not [
        each for each in caplog.records if each.levelname == "WARNING"
    ]

    def rounded(number, body, answer):
        answer["choices"][0]["logprobs"]["token_logprobs"][0] -= 0.25
        return 200, answer

    stand_in.broken = rounded
    assert check_target(nano, server, texts) == pytest.approx(0.25, abs=1e-5)
    assert [each.levelname for each in caplog.records].count("WARNING") == 1
    stand_in.broken = changed(logprobs=None)
    assert check_target(nano, server, texts) == 0 and "returns no log-probabilities" in caplog.text


def test_which_model_is_asked(stand_in, url):
    stand_in.models = ["a", "b"]
    with pytest.raises(UserError, match=r"serves a, b; name the target: server\.model="):
        Server(url)
    with pytest.raises(UserError, match=r"server\.model=c is not served at .*; it serves a, b"):
        Server(url, "c")
    assert Server(f"{url}/v1/", "b").model == "b" and Server(f"{url}/v1/", "b").url == f"{url}/v1"


def test_the_key_is_sent(nano, stand_in, url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    Server(url).complete([5], {"temperature": 0, "seed": 0, "max_tokens": 1})
    assert stand_in.headers[-1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(nano, stand_in, url, monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    other = StandIn(nano)
    with served(other) as elsewhere:
        stand_in.broken = lambda number, body, answer: (status, f"{elsewhere}/v1/x".encode())
        server = Server(url)
        with pytest.raises(UserError, match=rf"names another address \({status}: {elsewhere}"):
            server.complete([5], {"temperature": 0, "seed": 0, "max_tokens": 1})
        assert not other.headers and not other.paths


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc", "ftp://localhost"])
def test_an_address_is_one_of_the_web(url):
    with pytest.raises(UserError, match="is no address; give one such as http"):
        Server(url)


@pytest.mark.parametrize(
    "address", ["http://me:secret@localhost:8000/v1", "http://localhost:8000/v1?of=secret"]
)
def test_a_password_in_an_address_is_refused_and_not_shown(address):
    with pytest.raises(UserError, match="holds a user, a password or a query") as refused:
        Server(address)
    assert "secret" not in str(refused.value)


def test_a_key_that_a_server_repeats_is_not_shown(stand_in, url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = Server(url)
    stand_in.broken = lambda number, body, answer: (401, b"Incorrect API key provided: sk-secret")
    with pytest.raises(UserError, match="Incorrect API key provided: <the key>"):
        server.complete([5], {"temperature": 0, "seed": 0, "max_tokens": 1})


def test_the_token_that_a_server_says_ended_a_response_ends_it(nano, stand_in, url):
    more = min(nano.stop_tokens) + 1
    pair = replace(nano, target=copy.copy(nano.target))
    pair.target.generation_config = copy.deepcopy(nano.target.generation_config)
    pair.target.generation_config.eos_token_id = [*nano.stop_tokens, more]
    stand_in.broken = changed(token_ids=[30, 40], finish_reason="stop", stop_reason=more)
    made = Server(url).complete([5], {"temperature": 0, "seed": 0, "max_tokens": 9})
    assert response_of(pair, made, 9).ids == [30, 40, more]
    with pytest.raises(UserError, match=rf"ended a response at the token {more}, but"):
        response_of(nano, made, 9)


def test_the_end_of_a_response(nano):
    end = min(nano.stop_tokens)
    assert response_of(nano, Completion([3, 4], "length", []), 2).finished is False
    # Its server does not know what ends a response
    cut = response_of(nano, Completion([3, end, 4], "length", []), 3)
    assert (cut.ids, cut.finished) == ([3, end], True)
    kept = response_of(nano, Completion([3, end], "stop", []), 5)
    # Its server keeps the token that ended it
    added = response_of(nano, Completion([3], "stop", []), 5)
    assert kept == added and added.finished and added.ids == [3, end]


def test_calls_are_made_at_once_and_the_first_error_ends_them():
    barrier = threading.Barrier(3, timeout=20)
    assert sorted(at_once(lambda item: barrier.wait() >= 0 and item + 1, range(6), 3)) == [
        (item, item + 1) for item in range(6)
    ]
    done = []

    def call(item):
        done.append(item)
        if item == 2:
            raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        list(at_once(call, range(100), 1))
    assert len(done) < 100


def test_the_address_is_not_in_the_key_of_the_cache(nano, prompts):
    def key(**more):
        return cache_provenance(nano, prompts, settings("http://a", **more), True)

    assert (
        key()["runner"] == ["server", None]
        and key(server_url="http://b", server_concurrency=2) == key()
    )
    assert key(server_model="x") != key() != key(runner="local")


def test_commands_take_the_runner(url, stand_in, tmp_path):
    words = [
        "data=nano",
        "data.num_train=3",
        "data.num_dev=1",
        "data.num_test=0",
        "data.max_new_tokens=8",
    ]
    done = run(tmp_path, "data_gen", "model=nano", "runner=server", f"server.url={url}", *words)
    assert (
        done.returncode == 0
        and f"specheads train model=nano runner=server server.url={url} {' '.join(words)}"
        in done.stdout
    )
    none = run(tmp_path, "data_gen", "model=nano", "runner=server", "data.num_train=4", *words[:1])
    assert none.returncode == 2 and "runner=server needs the address of a server" in none.stderr
    nowhere = run(
        tmp_path,
        "data_gen",
        "model=nano",
        "runner=server",
        "server.url=http://127.0.0.1:9",
        *words[:1],
    )
    assert nowhere.returncode == 2 and "gives no answer after 2 tries" in nowhere.stderr


def test_llama_server(nano, prompts, tmp_path):
    """Greedy responses are those that this process makes.

    Log-probabilities agree to the rounding of float32.
    """
    # Its library and this process's cannot be loaded together
    if not (find_spec("xllamacpp") and find_spec("gguf")):
        pytest.skip("there is no xllamacpp")
    from benchmarks.gguf_file import write_gguf

    write_gguf(nano.target, tmp_path / "nano.gguf")
    command = [sys.executable, "-c", LLAMA_SERVER, str(tmp_path / "nano.gguf")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        address = process.stdout.readline().strip()
        greedy = {"warp": Warp(0.0), "responses_per_prompt": 1, "max_new_tokens": 40}
        assert check_target(nano, Server(address), [[5, 6, 7], [8, 9]]) < 1e-3
        made = rows(generate_data(nano, prompts, settings(address, **greedy), tmp_path / "server"))
        ours = rows(
            generate_data(
                nano, prompts, settings(None, runner="local", **greedy), tmp_path / "ours"
            )
        )
        process.stdin.close()
    assert made == ours
