"""A head on vLLM's draft model, under a stand-in for vLLM's proposer that drafts in the same
loop.
"""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.heads.features import drafting_features
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.integrations.pace import BEGUN, KNOWN
from specheads.integrations.vllm import (
    DraftStopping,
    _check_asked,
    _check_supported,
    proposer_class,
)
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import right_padded
from specheads.pair.sampling import Warp

LONGEST = 6
THRESHOLD = 0.6
KINDS = {
    "look-ahead": {
        "predicts": "next_token",
        "depth": 2,
        "width": 24,
        "inputs": ("hidden", "embedding", "draft_prob", "second_prob"),
    },
    "SpecDec++": {"predicts": "input_token", "depth": 1},
}


@pytest.fixture(params=KINDS)
def folder(request, nano, tmp_path):
    torch.manual_seed(1)
    calibration = {"slope": [1.5, 1.0], "intercept": [1.5, 1.0]}
    who = {
        "draft": {"id": nano.draft_id, "revision": nano.draft_revision},
        "warp": asdict(Warp(0.0)),
    }
    head = AcceptanceHead(
        HeadConfig(hidden_size=160, calibration=calibration, **KINDS[request.param], **who)
    )
    torch.nn.init.normal_(head.readout.weight, std=0.3)
    return save_head(head, tmp_path / "head")


def vllm_object(**fields):
    """A config or other object of vLLM with some of its fields."""
    return SimpleNamespace(**fields)


class StandIn:
    """As much of vLLM's SpecDecodeBaseProposer as a subclass meets: a draft, and a loop over steps
    of all requests.
    """

    def __init__(self, vllm_config, device, runner=None):
        self.vllm_config = vllm_config
        self.speculative_config = vllm_config.speculative_config
        self.device = device
        self.num_speculative_tokens = self.speculative_config.num_speculative_tokens
        self._last_draft_probs = None
        self.steps = 0

    def load_model(self, target_model):
        lm: LanguageModel = self.speculative_config.pair.draft_lm
        self.lm = lm
        self.hidden_size = lm.hidden_size
        ends = vllm_object(eos_token_id=self.speculative_config.end)
        self.model = vllm_object(compute_logits=lm.logits, embed_input_ids=lm.embed, config=ends)

    def _sample_from_logits(self, logits, metadata):
        if metadata.all_greedy:
            return logits.argmax(dim=-1), None
        probs = logits.softmax(dim=-1)
        return torch.multinomial(probs, 1, generator=metadata.generator).squeeze(1), probs

    def _sample_draft_tokens(self, hidden, metadata):
        return self._sample_from_logits(self.model.compute_logits(hidden), metadata)

    @torch.no_grad()
    def propose(
        self,
        num_speculative_tokens,
        texts,
        common_attn_metadata,
        sampling_metadata,
        num_rejected_tokens_gpu=None,
    ):
        self.num_speculative_tokens = num_speculative_tokens
        tokens = []
        lengths = torch.tensor([len(text) for text in texts])
        read = torch.cat(
            [
                right_padded(texts),
                torch.zeros(len(texts), num_speculative_tokens, dtype=torch.long),
            ],
            dim=1,
        )
        for step in range(num_speculative_tokens):
            hidden = self.lm.hidden_states(read, use_cache=False)[
                torch.arange(len(texts)), lengths + step - 1
            ]
            self.steps += 1
            token, _ = self._sample_draft_tokens(hidden, sampling_metadata)
            read[torch.arange(len(texts)), lengths + step] = token
            tokens.append(token)
        return (
            torch.stack(tokens, dim=1) if tokens else torch.empty(len(texts), 0, dtype=torch.long)
        )


def made(pair, head=None, end=None, longest=LONGEST, temperature=None, **given):
    """Return a proposer with its draft loaded, and settings like vLLM's."""
    spec = vllm_object(num_speculative_tokens=longest, pair=pair, end=end)
    text = vllm_object(**({} if temperature is None else {"draft_temperature": temperature}))
    spec.draft_model_config = vllm_object(
        model="embedded:nano/draft", hf_config=vllm_object(get_text_config=lambda: text)
    )
    additional = (
        {} if head is None else {"specheads": {"head": str(head), "threshold": THRESHOLD, **given}}
    )
    vllm_config = vllm_object(
        speculative_config=spec,
        scheduler_config=vllm_object(async_scheduling=False),
        additional_config=additional,
    )
    proposer = proposer_class(StandIn)(vllm_config, torch.device("cpu"))
    proposer.load_model(None)
    return proposer


def proposed(proposer, texts, longest=LONGEST, **metadata):
    common = vllm_object(batch_size=lambda: len(texts))
    sampling = vllm_object(**{"all_greedy": True, **metadata})
    return proposer.propose(
        num_speculative_tokens=longest,
        texts=texts,
        common_attn_metadata=common,
        sampling_metadata=sampling,
    )


@pytest.fixture
def texts(nano):
    return [
        nano.encode_instruction(text)
        for text in ("def read(path):\n", "import os\n\n", "class Stack:\n    def", "x = [1, 2,")
    ]


@torch.no_grad()
def by_the_rule(pair, folder, texts):
    """Return the greedy draft of each text alone, and the survival of the whole draft after each of
    its tokens.
    """
    rule = HeadThreshold(load_head(folder), THRESHOLD, max_tokens=LONGEST)
    drafts = []
    survivals = []
    for text in texts:
        state = rule.start_round(rule.start_prompt(1, torch.device("cpu")))
        stop = False
        drafted = []
        survival = []
        while not stop and len(drafted) < LONGEST:
            hidden = pair.draft_lm.hidden_states(torch.tensor([text + drafted]), use_cache=False)[
                :, -1
            ]
            logits = pair.draft_lm.logits(hidden)
            token = logits.argmax(dim=-1)
            state, stop = rule.step(
                state, drafting_features(rule.needs, logits, token, hidden, pair.draft_lm.embed)
            )
            drafted.append(int(token))
            survival.append(float(state.survival))
        drafts.append(drafted)
        survivals.append(survival)
    return drafts, survivals


def test_drafts_of_one_request_are_those_of_the_rule(nano, folder, texts):
    proposer = made(nano, folder)
    expected, _ = by_the_rule(nano, folder, texts)
    for text, draft in zip(texts, expected, strict=True):
        proposer.steps = 0
        assert proposed(proposer, [text]) == [draft] and proposer.steps == len(draft)
    if load_head(folder).config.predicts == "next_token":
        assert len(set(map(len, expected))) > 1


@pytest.mark.parametrize("count", [2, 3, 4])
def test_requests_stop_drafting_together_where_a_step_pays_no_more(nano, folder, texts, count):
    proposer = made(nano, folder)
    drafts, survivals = by_the_rule(nano, folder, texts)
    drafts = drafts[-count:]
    survivals = survivals[-count:]
    least = proposer.stopping.rule.min_tokens

    def pays(length):
        left = [
            each[length - 1]
            for each in survivals
            if len(each) > length or (len(each) == length == LONGEST)
        ]
        return left and (sum(left) / count >= 1 - THRESHOLD or length < least)

    steps = next(
        length for length in range(1, LONGEST + 1) if length == LONGEST or not pays(length)
    )
    assert proposed(proposer, texts[-count:]) == [draft[:steps] for draft in drafts]
    assert proposer.steps == steps


@pytest.fixture
def uncompiled(monkeypatch):
    """Where nothing can be compiled."""

    def broken(*arguments):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("specheads.integrations.vllm.CompiledProgram.compile", broken)


@pytest.mark.usefixtures("uncompiled")
def test_a_draft_ends_with_the_response(nano, folder, texts):
    free = proposed(made(nano, folder, threshold=1.0), texts)
    end = free[0][2]
    ended = proposed(made(nano, folder, end=end, threshold=1.0), texts)
    for before, after in zip(free, ended, strict=True):
        assert after == (before[: before.index(end) + 1] if end in before else before)


def test_sampled_drafts_come_with_their_probabilities(nano, folder, texts):
    proposer = made(nano, folder)
    drafts = proposed(proposer, texts, all_greedy=False, generator=torch.Generator().manual_seed(0))
    probs = proposer._last_draft_probs
    assert probs.shape == (len(texts), max(map(len, drafts)), nano.vocab_size)
    first = Warp(1.0)(
        nano.draft_lm.logits(
            nano.draft_lm.hidden_states(torch.tensor([texts[0]]), use_cache=False)[:, -1]
        )
    )
    assert torch.allclose(probs[0, 0], first[0].float(), atol=1e-5)
    again = proposed(proposer, texts)  # greedy drafts have none
    assert proposer._last_draft_probs is None and again != drafts


def test_a_draft_with_a_temperature_is_seen_as_in_training(nano, folder, texts):
    """A head reads probabilities of logits over the temperature, and drafts are sampled from
    them.
    """
    proposer = made(nano, folder, temperature=0.5)
    seen = []
    step = proposer.stopping.step
    proposer.stopping.step = lambda logits, *rest: seen.append(logits) or step(logits, *rest)
    proposed(proposer, texts[:1], all_greedy=False, generator=torch.Generator().manual_seed(0))
    hidden = nano.draft_lm.hidden_states(torch.tensor([texts[0]]), use_cache=False)[:, -1]
    expected = nano.draft_lm.logits(hidden) / 0.5
    assert torch.allclose(seen[0], expected, atol=1e-4)
    assert torch.allclose(proposer._last_draft_probs[0, 0], expected[0].softmax(dim=-1), atol=1e-5)


def test_vllm_decides_how_many_tokens_are_drafted_at_most(nano, folder, texts):
    proposer = made(nano, folder, threshold=1.0)
    assert {len(draft) for draft in proposed(proposer, texts, longest=3)} == {3}
    assert torch.is_tensor(proposed(proposer, texts, longest=1)) is False
    shorter = made(nano, folder, threshold=1.0, max_tokens=2)
    assert {len(draft) for draft in proposed(shorter, texts)} == {2}


def test_a_head_of_another_draft_is_refused(nano, folder, tmp_path):
    head = load_head(folder)
    other = head.config.draft["revision"][:-1] + "0"
    object.__setattr__(head.config, "draft", {**head.config.draft, "revision": other})
    save_head(head, tmp_path / "other")
    with pytest.raises(UserError, match="revision"):
        made(nano, tmp_path / "other")
    assert made(nano, tmp_path / "other", any_draft=True).stopping is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threshold": 0.5}, "names no head"),
        ({"head": "x", "thresold": 0.5}, "'thresold', which is not known"),
        ("x", "names no head"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(UserError, match=message):
        DraftStopping(given, LONGEST)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_scheduling": True}, "async_scheduling=False"),
        ({"parallel_drafting": True}, "parallel_drafting=True"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab=True"),
        ({"draft_vocab_size": 60}, "an output over some tokens, which vLLM's draft models"),
    ],
)
def test_settings_under_which_no_head_can_draft_are_refused(settings, message):
    given = vllm_object(**settings, model="some/draft", hf_config=vllm_object(**settings))
    given.draft_model_config = given
    config = vllm_object(scheduler_config=given, speculative_config=given)
    with pytest.raises(UserError, match=message):
        _check_supported(config)


@pytest.mark.parametrize(
    ("method", "uses_v2", "message"),
    [
        (None, False, "speculative_config has the method None: it would be ignored"),
        ("ngram", False, "has the method ngram"),
        (
            "draft_model",
            True,
            "model runner V2, where it would be ignored; set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
    ],
)
def test_a_head_that_would_be_ignored_is_refused(method, uses_v2, message):
    spec = None if method is None else vllm_object(method=method)
    asked = vllm_object(additional_config={"specheads": {"head": "h"}}, speculative_config=spec)
    with pytest.raises(UserError, match=message):
        _check_asked(asked, uses_v2)
    # Nobody asks for a head
    _check_asked(vllm_object(additional_config={}, speculative_config=spec), uses_v2)
    _check_asked(
        vllm_object(
            additional_config=asked.additional_config,
            speculative_config=vllm_object(method="draft_model"),
        ),
        False,
    )


def test_where_nothing_can_be_compiled_the_head_runs_as_it_is(nano, folder, texts, request, caplog):
    expected = proposed(made(nano, folder), texts)
    request.getfixturevalue("uncompiled")
    assert proposed(made(nano, folder), texts) == expected
    assert "No working C++ compiler found" in caplog.text


def test_without_a_threshold_drafts_end_by_the_pace(nano, folder, texts, monkeypatch):
    """The rounds that are measured are those of the proposer, and what they taught decides the next
    ones.
    """
    proposer = made(nano, folder, threshold=None)
    pace = proposer.stopping.pace
    times = iter(range(10**6))
    monkeypatch.setattr(
        "specheads.integrations.vllm.time", vllm_object(perf_counter=lambda: float(next(times)))
    )
    drafts = [[]] * len(texts)
    drafted = []
    for _ in range(100):
        read = sum(map(len, drafts)) + len(texts)
        about = vllm_object(
            batch_size=lambda: len(texts), max_query_len=1 + LONGEST, num_actual_tokens=read
        )
        rejected = torch.tensor([len(draft) for draft in drafts])  # everything
        drafts = proposer.propose(
            num_speculative_tokens=LONGEST,
            texts=texts,
            common_attn_metadata=about,
            sampling_metadata=vllm_object(all_greedy=True),
            num_rejected_tokens_gpu=rejected,
        )
        assert all(len(draft) <= LONGEST for draft in drafts) and len(drafts) == len(texts)
        drafted.append([len(draft) for draft in drafts])
    load = pace._load(len(texts))
    assert (
        load.by_head.rounds + load.fixed.rounds == 98
        and min(load.by_head.rounds, load.fixed.rounds) >= KNOWN
    )
    assert [BEGUN] * len(texts) in drafted[:10]  # without the head
    # Nothing was ever accepted
    assert sum(map(sum, drafted[-30:])) <= 0.8 * sum(map(sum, drafted[:30]))
