"""The proposer for vLLM, under a stand-in that keeps its documented contract: rows without names, that move and are reused.

vLLM itself needs a GPU; this has not been run on it.
"""

import importlib
import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from specheads import SpeculativeDecoder, Warp
from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.heads.checkpoint import load_head, save_head
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.integrations import vllm as module
from specheads.prompts.nano_source import NanoSource

WINDOW, LONGEST = 384, 6
KINDS = {
    "look-ahead": {
        "predicts": "next_token",
        "depth": 2,
        "width": 24,
        "inputs": ("hidden", "embedding", "draft_prob", "second_prob"),
    },
    "the paper's": {"predicts": "input_token", "depth": 1},
}


def config(head, draft="embedded:nano/draft", **given):
    """What vLLM's constructor of proposers is given, as far as the contract goes."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=LONGEST),
        model_config=SimpleNamespace(max_model_len=WINDOW),
        additional_config={"specheads": {"draft": draft, "head": str(head), "threshold": 0.6, **given}},
    )


@pytest.fixture(params=KINDS)
def folder(request, nano, tmp_path):
    torch.manual_seed(1)
    calibration = {"slope": [1.5, 1.0], "intercept": [1.5, 1.0]}
    who = {"draft": {"id": nano.draft_id, "revision": nano.draft_revision}, "warp": asdict(Warp(0.0))}
    head = AcceptanceHead(HeadConfig(hidden_size=160, calibration=calibration, **KINDS[request.param], **who))
    torch.nn.init.normal_(head.readout.weight, std=0.3)
    return save_head(head, tmp_path / "head")


class Server:
    """As much of vLLM's runner as a proposer meets: a batch of requests whose rows are packed again whenever one ends."""

    def __init__(self, pair, vllm_config, rows=4):
        path = "specheads.integrations.vllm.HeadProposer"  # imported by name, as there
        name = path.rpartition(".")
        self.proposer = getattr(importlib.import_module(name[0]), name[2])(vllm_config)
        self.proposer.load_model(None)
        self.pair, self.running, self.accepted = pair, [], 0
        self.token_ids_cpu, self.num_tokens_no_spec = np.zeros((rows, WINDOW), np.int32), np.zeros(rows, np.int32)

    def add(self, prompt, count):
        row = len(self.running)
        self.token_ids_cpu[row, : len(prompt)], self.num_tokens_no_spec[row] = prompt, len(prompt)
        self.running.append(SimpleNamespace(prompt=prompt, count=count, drafted=[], lengths=[], reading=row % 2))
        return self.running[-1]

    def step(self):
        """Verify what was drafted, greedily; ask for new drafts; then let requests that are complete go."""
        sampled = []
        for row, request in enumerate(self.running):
            if request.reading:  # a prompt that is read in two parts
                request.reading -= 1
                sampled.append([])
                continue
            length = self.num_tokens_no_spec[row]
            text = torch.tensor([[*self.token_ids_cpu[row, :length].tolist(), *request.drafted]])
            with torch.no_grad():
                best = self.pair.target(text).logits[0, length - 1 :].argmax(-1).tolist()
            agreed = next((i for i, token in enumerate(request.drafted) if token != best[i]), len(request.drafted))
            new = best[: agreed + 1]
            self.accepted += agreed
            self.token_ids_cpu[row, length : length + len(new)] = new
            self.num_tokens_no_spec[row] += len(new)
            sampled.append(new)
        count = len(self.running)
        drafts = self.proposer.propose(
            sampled_token_ids=sampled,
            num_tokens_no_spec=self.num_tokens_no_spec[:count],
            token_ids_cpu=self.token_ids_cpu,
            slot_mappings=None,
        )
        assert len(drafts) == count
        for request, drafted, new in zip(self.running, drafts, sampled, strict=True):
            assert all(isinstance(token, int) for token in drafted) and (drafted == [] or new != [])
            request.drafted = drafted
            if new:
                request.lengths.append(len(drafted))
        for row in reversed(range(count)):
            request, length = self.running[row], self.num_tokens_no_spec[row]
            if length - len(request.prompt) >= request.count:
                request.text = self.token_ids_cpu[row, len(request.prompt) : length].tolist()
                last = len(self.running) - 1  # takes the place that gets free
                self.token_ids_cpu[row], self.num_tokens_no_spec[row] = self.token_ids_cpu[last], self.num_tokens_no_spec[last]
                self.running[row] = self.running[last]
                self.running.pop()


def test_a_server_returns_the_decoders_tokens_in_its_rounds(nano, folder):
    """Prompts of different lengths come and go four at a time."""
    waiting = [nano.encode_instruction(prompt.text) for prompt in NanoSource(10, 0, 0).load(nano.chats)]
    server, served = Server(nano, config(folder, dtype="float32")), []
    for number, prompt in enumerate(waiting):
        while len(server.running) == 4:
            server.step()
        served.append(server.add(prompt, 8 + 5 * (number % 4)))
    while server.running:
        server.step()
    decoder = SpeculativeDecoder(nano, stopping=HeadThreshold(load_head(folder), 0.6, max_tokens=LONGEST), warp=Warp(0.0))
    num_compared = 0
    for request in served:
        first = request.text[0]
        if first in nano.stop_tokens:
            continue
        out = decoder.generate([*request.prompt, first], 30)
        tokens = [first, *out.tokens.tolist()]
        shared = min(len(tokens), len(request.text))  # the server goes on beyond the end of a text
        assert request.text[:shared] == tokens[:shared]
        read = 1
        for length, each in zip(request.lengths, out.rounds, strict=False):
            if read + LONGEST > min(len(tokens), 30):
                break  # the decoder drafts no more than it may emit
            assert length == each.num_drafted
            read, num_compared = read + len(each.tokens), num_compared + 1
    assert num_compared > 20
    counted = server.proposer.stopping.drift
    if load_head(folder).config.predicts == "next_token":
        assert counted.accepted == server.accepted and counted.expected > 0
    else:  # the last token of a draft has no prediction then
        assert counted.rounds == 0


class Counted:
    """Counts what a draft reads."""

    def __init__(self, draft):
        self.count = 0
        self.hook = draft.model.base_model.register_forward_pre_hook(self.read, with_kwargs=True)

    def read(self, model, arguments, given):
        self.count += given["input_ids"].numel()


@pytest.mark.parametrize("warp", [{}, {"temperature": 1.0, "top_k": 50}])
def test_a_head_that_learned_from_sampled_tokens_is_not_judged_by_greedy_drafts(warp, nano, folder):
    content = json.loads((folder / "config.json").read_text()) | {"warp": warp}
    (folder / "config.json").write_text(json.dumps(content))
    server = Server(nano, config(folder, dtype="float32"))
    server.add(nano.encode_instruction("def f(x):"), 12)
    while server.running:
        server.step()
    assert server.accepted and server.proposer.stopping.drift.rounds == 0


def test_the_draft_reads_each_token_once(nano, prompts, folder):
    server = Server(nano, config(folder))
    counted = Counted(server.proposer._draft)
    for prompt in prompts[:3]:
        server.add(prompt, 30)
    requests = list(server.running)
    while server.running:
        server.step()
    num_tokens = sum(len(each.prompt) + len(each.text) for each in requests)
    num_drafted = sum(map(sum, (each.lengths for each in requests)))
    # Each round reads what is new and all that it drafts but the last; what was accepted is not read again.
    assert counted.count <= num_tokens + num_drafted


def test_memory_of_ended_requests_is_freed(nano, prompts, folder):
    server = Server(nano, config(folder))
    for prompt in prompts[:4]:
        server.add(prompt, 4)
    while server.running:
        server.step()
    server.add(prompts[4], 4)
    server.step()
    assert len(server.proposer._requests) == 1


def test_a_full_window_gets_no_draft(nano, prompts, folder):
    proposer = module.HeadProposer(config(folder))
    rows = np.zeros((1, WINDOW), np.int32)
    for length in (WINDOW - 2, WINDOW):
        rows[0, :length] = np.resize(prompts[0], length)
        (drafted,) = proposer.propose([[1]], [length], rows)
        assert len(drafted) <= WINDOW - length


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": None}, "names no draft to draft with"),
        ({"color": 1}, "additional_config names 'color', which is not known"),
        ({"head": "./none"}, "there is no head folder './none'"),
        ({"draft": "embedded:nano/target"}, "size 160, but the draft embedded:nano/target has 256"),
        ({"threshold": 2}, r"threshold=2 must be a number from 0 to 1"),
        ({"device": "gpu9"}, "device='gpu9' cannot be used here"),
    ],
)
def test_mistakes_are_named(change, message, folder):
    given = config(folder)
    given.additional_config["specheads"].update(change)
    with pytest.raises((UserError, ValueError), match=message):
        module.HeadProposer(given).load_model()


def test_a_draft_that_knows_more_tokens_than_the_target_is_refused(folder):
    given = config(folder)
    given.model_config.get_vocab_size = lambda: 2000
    with pytest.raises(UserError, match="knows 2048 tokens, the target 2000"):
        module.HeadProposer(given).load_model()


def test_only_the_first_requests_get_drafts(prompts, folder):
    proposer = module.HeadProposer(config(folder, max_requests=2))
    rows = np.zeros((4, WINDOW), np.int32)
    for row, prompt in enumerate(prompts[:4]):
        rows[row, : len(prompt)] = prompt
    drafts = proposer.propose([[1]] * 4, [len(prompt) for prompt in prompts[:4]], rows)
    assert [bool(draft) for draft in drafts] == [True, True, False, False] and len(proposer._requests) == 2


def test_a_bound_of_one_token_per_step_holds(folder):
    given = config(folder)
    given.speculative_config.num_speculative_tokens = 1
    assert module.HeadProposer(given).stopping.rule.max_tokens == 1


def test_a_draft_with_a_sliding_window_is_rewound(tmp_path):
    """Beyond the window layers forget, and can be taken back only as far as they recorded."""
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(0)
    draft = MistralForCausalLM(MistralConfig(vocab_size=50, sliding_window=12, eos_token_id=None, **small)).eval()
    draft.save_pretrained(tmp_path / "draft")
    head = AcceptanceHead(HeadConfig(hidden_size=16, predicts="input_token", depth=1))
    proposer = module.HeadProposer(config(save_head(head, tmp_path / "head"), str(tmp_path / "draft"), threshold=1.0))
    proposer.load_model()
    rows, length = np.zeros((1, WINDOW), np.int32), 5
    rows[0] = torch.randint(50, (WINDOW,)).numpy()
    while length < 60:
        (drafted,) = proposer.propose([[1]], [length], rows)
        text, expected = rows[0, :length].tolist(), []
        for _ in range(len(drafted)):
            with torch.no_grad():
                expected.append(int(draft(torch.tensor([text + expected])).logits[0, -1].argmax()))
        assert drafted == expected and len(drafted) == LONGEST
        agreed = length % 3  # some of them are accepted, then the text goes on otherwise
        rows[0, length : length + agreed] = drafted[:agreed]
        length += agreed + 1


def test_a_head_that_reads_the_target_is_refused(tmp_path):
    head = AcceptanceHead(HeadConfig(hidden_size=160, inputs=("hidden", "target_hidden"), target_size=256))
    folder = save_head(head, tmp_path / "head")
    with pytest.raises(UserError, match="reads the target's hidden state, which vLLM does not pass"):
        module.HeadProposer(config(folder))
