"""transformers' generate decodes with a head as the decoder here does: the same tokens, in the same
rounds.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fakes import tiny_pair
from head_kinds import KINDS, LOOK_AHEAD
from statistics_helper import chi_square_p_value
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from specheads import SpeculativeDecoder, Warp
from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.heads.portable.assisted import HeadCandidates
from specheads.heads.portable.loaders import CUSTOM_GENERATE, loader_source, write_loader
from specheads.integrations.transformers import assist
from specheads.pair.revisions import set_draft_temperature
from specheads.prompts.sources import NanoSource

BOUNDS = {"threshold": 0.6, "max_tokens": 7}
LONGEST_ROUND = 21  # without bounds: 20 drafted tokens and the target's own


def new_head(pair, folder, **kind):
    """A head with random weights and a spread of opinions, for the pair."""
    torch.manual_seed(1)
    who = {
        role: {"id": getattr(pair, f"{role}_id"), "revision": getattr(pair, f"{role}_revision")}
        for role in ("draft", "target")
    }
    calibration = {"slope": [1.5, 1.0], "intercept": [1.5, 1.0]}
    head = AcceptanceHead(
        HeadConfig(hidden_size=pair.draft_lm.hidden_size, calibration=calibration, **kind, **who)
    )
    torch.nn.init.normal_(head.readout.weight, std=0.3)
    return save_head(head, folder, torch.randn(32, head.config.input_size))


@pytest.fixture(params=KINDS)
def folder(request, nano, tmp_path):
    return new_head(nano, tmp_path / "head", **KINDS[request.param])


@pytest.fixture
def simple(nano, tmp_path):
    """The usual head: look-ahead, with the loader for transformers in its folder."""
    folder = new_head(nano, tmp_path / "head", **LOOK_AHEAD)
    write_loader(folder, CUSTOM_GENERATE)
    return folder


@pytest.fixture(scope="module")
def many(nano):
    return [nano.encode_instruction(prompt.text) for prompt in NanoSource(3, 0, 0).load(nano.chats)]


def inputs(prompt):
    ids = torch.tensor([prompt])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ours(pair, folder, prompt, count):
    """What the decoder here gives: tokens, and for each round how many were drafted and
    accepted.
    """
    decoder = SpeculativeDecoder(
        pair, stopping=HeadThreshold(load_head(folder), **BOUNDS), warp=Warp(0.0)
    )
    out = decoder.generate(prompt, count)
    return out.tokens.tolist(), [(each.num_drafted, each.num_accepted) for each in out.rounds]


def test_assisted_generation_decodes_as_the_decoder_here(nano, many, folder):
    lengths = set()
    with assist(nano.target, nano.draft, folder, **BOUNDS) as handle:
        for prompt in many:
            actual = nano.target.generate(
                **inputs(prompt), assistant_model=nano.draft, do_sample=False, max_new_tokens=24
            )
            tokens, rounds = ours(nano, folder, prompt, 24)
            assert actual[0, len(prompt) :].tolist() == tokens
            assert [drafted for drafted, _ in handle.rounds] == [drafted for drafted, _ in rounds]
            # transformers counts no token beyond the end of the text as accepted
            assert [accepted for _, accepted in handle.rounds[:-1]] == [
                accepted for _, accepted in rounds[:-1]
            ]
            lengths |= {drafted for drafted, _ in rounds}
    assert len(lengths) > 3  # the head is heard


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 0.8, "top_k": 20, "no_repeat_ngram_size": 3},
        {"do_sample": True, "min_new_tokens": 20},
        {"do_sample": False, "prefill_chunk_size": 4},
    ],
    ids=["greedy", "sampled", "at least so many", "a prompt in parts"],
)
def test_drafts_are_those_of_generate(nano, many, simple, settings, monkeypatch):
    def generated():
        made = []
        with assist(nano.target, nano.draft, simple, **BOUNDS) as handle:
            for prompt in many:
                torch.manual_seed(4)
                text = nano.target.generate(
                    **inputs(prompt), assistant_model=nano.draft, max_new_tokens=32, **settings
                )
                made.append((text[0].tolist(), handle.rounds))
        return made

    drafted_here = generated()
    monkeypatch.setattr(
        HeadCandidates, "_generate_candidates", AssistedCandidateGenerator._generate_candidates
    )
    assert generated() == drafted_here


@pytest.fixture
def heard(monkeypatch):
    """What drafts with a head, one for each generation."""
    generators = []
    before = AssistedCandidateGenerator.__init__

    def made(self, *arguments, **given):
        before(self, *arguments, **given)
        if type(self).__name__ == "HeadCandidates":
            generators.append(self)

    monkeypatch.setattr(AssistedCandidateGenerator, "__init__", made)
    return generators


def test_the_code_in_the_folder_decodes_the_same(nano, many, folder, heard):
    for prompt in many:
        actual = nano.target.generate(
            **inputs(prompt),
            custom_generate=str(folder),
            trust_remote_code=True,
            draft_model=nano.draft,
            do_sample=False,
            max_new_tokens=24,
            **BOUNDS,
        )
        tokens, rounds = ours(nano, folder, prompt, 24)
        assert actual[0, len(prompt) :].tolist() == tokens
        drafts = heard.pop()
        # The folder's copy, not this project's
        assert type(drafts).__module__.startswith("transformers_modules.")
        assert [drafted for drafted, _ in drafts._rounds] == [drafted for drafted, _ in rounds]


class NoMore(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Without(LogitsProcessor):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.token] = -float("inf")
        return scores


class Heard(TextStreamer):
    def on_finalized_text(self, text, stream_end=False):
        self.text = getattr(self, "text", "") + text


def test_what_users_of_generate_expect(nano, prompts, simple):
    """Streamers, criteria, processors and whole outputs, against plain greedy generation."""
    folder = {"custom_generate": str(simple), "trust_remote_code": True, "draft_model": nano.draft}
    for prompt in prompts[:1]:
        plain = nano.target.generate(**inputs(prompt), do_sample=False, max_new_tokens=24)
        streamer = Heard(nano.tokenizer, skip_prompt=True)
        given = inputs(prompt) | {"do_sample": False, "max_new_tokens": 24}
        assert torch.equal(nano.target.generate(**given, **folder, streamer=streamer), plain)
        assert streamer.text == nano.tokenizer.decode(plain[0, len(prompt) :])
        out = nano.target.generate(
            **given, **folder, return_dict_in_generate=True, output_scores=True, output_logits=True
        )
        assert torch.equal(out.sequences, plain)
        assert len(out.scores) == len(out.logits) == plain.shape[1] - len(prompt)
        assert torch.equal(torch.stack(out.scores).argmax(-1).T, plain[:, len(prompt) :])
        token = int(plain[0, len(prompt)])
        processors = LogitsProcessorList([Without(token)])
        expected = nano.target.generate(**given, logits_processor=processors)
        assert torch.equal(
            nano.target.generate(
                **given, **folder, logits_processor=LogitsProcessorList([Without(token)])
            ),
            expected,
        )
        words = nano.tokenizer.decode(plain[0, len(prompt) + 2 : len(prompt) + 4])
        ended = nano.target.generate(
            **given, **folder, stop_strings=[words], tokenizer=nano.tokenizer
        )
        assert words in nano.tokenizer.decode(ended[0, len(prompt) :]) and torch.equal(
            ended, plain[:, : ended.shape[1]]
        )
        assert nano.tokenizer.decode(ended[0, len(prompt) : -LONGEST_ROUND]).find(words) < 0
        enough = StoppingCriteriaList([NoMore(len(prompt) + 5)])
        cut = nano.target.generate(**given, **folder, stopping_criteria=enough)
        # Asked after each round, as transformers does
        assert torch.equal(cut, plain[:, : cut.shape[1]])
        assert (
            len(prompt) + 5 <= cut.shape[1] <= min(len(prompt) + 5 + LONGEST_ROUND, plain.shape[1])
        )


@pytest.mark.parametrize("temperature", [1.0, pytest.param(3.0, marks=pytest.mark.full)])
def test_samples_follow_the_targets_distribution(tmp_path, temperature):
    """Two tokens of a tiny pair, by a chi-square test with a false alarm in a million.

    The head stops after some tokens only.
    """
    pair = tiny_pair(vocab_size=5)
    set_draft_temperature(pair.draft, temperature)
    head = AcceptanceHead(
        HeadConfig(
            hidden_size=pair.draft_lm.hidden_size,
            depth=0,
            width=pair.draft_lm.hidden_size,
            inputs=("draft_prob",),
        )
    )
    torch.nn.init.constant_(head.readout.weight, 2.0)
    prompt = torch.tensor([[1, 2]])
    count = 300
    with torch.no_grad():
        first = pair.target(prompt).logits[0, -1].double().softmax(-1)
        pairs = torch.stack(
            [
                pair.target(torch.tensor([[1, 2, token]])).logits[0, -1].double().softmax(-1)
                for token in range(5)
            ]
        )
    distribution = (first[:, None] * pairs).flatten()
    lengths = set()
    torch.manual_seed(0)
    counts = torch.zeros(25, dtype=torch.float64)
    with assist(
        pair.target, pair.draft, head, threshold=0.5, max_tokens=3, any_draft=True
    ) as handle:
        for _ in range(count):
            tokens = pair.target.generate(
                prompt,
                assistant_model=pair.draft,
                do_sample=True,
                top_k=0,
                max_new_tokens=4,
                eos_token_id=None,
            )
            counts[5 * tokens[0, 2] + tokens[0, 3]] += 1
            lengths |= {drafted for drafted, _ in handle.rounds}
    assert len(lengths) > 2
    assert chi_square_p_value(counts, distribution) > 1e-6


def test_threads_do_not_disturb_each_other(nano, prompts, simple):
    folder = {"custom_generate": str(simple), "trust_remote_code": True, "draft_model": nano.draft}

    def generated(number):
        bounds = {"threshold": (0.2, 0.6, 1.0)[number % 3], "max_tokens": 5}
        given = inputs(prompts[number % 4]) | {"do_sample": False, "max_new_tokens": 12}
        return nano.target.generate(**given, **folder, **bounds).tolist()

    alone = [generated(number) for number in range(6)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(generated, range(6))) == alone
    assert "_get_candidate_generator" not in vars(nano.target)


def test_heads_are_taken_away_in_any_order(nano, prompts, simple):
    given = inputs(prompts[0]) | {
        "assistant_model": nano.draft,
        "do_sample": False,
        "max_new_tokens": 12,
    }
    first, second = (
        assist(nano.target, nano.draft, simple, threshold=threshold, max_tokens=5)
        for threshold in (0.3, 1.0)
    )
    first.remove()
    nano.target.generate(**given)
    assert second.rounds and not first.rounds
    second.remove()
    second.remove()
    assert "_get_candidate_generator" not in vars(nano.target)


def test_a_head_that_was_never_used_is_a_warning(nano, prompts, simple):
    with (
        pytest.warns(UserWarning, match="the head was never used"),
        assist(nano.target, nano.draft, simple),
    ):
        nano.target.generate(**inputs(prompts[0]), do_sample=False, max_new_tokens=2)


def test_padded_logits_count_for_nothing(nano, many, tmp_path):
    """A draft with more logits than tokens, as embeddings padded to a round number have."""
    kind = {"inputs": ("draft_prob", "max_prob", "entropy"), "depth": 1, "width": 8}
    folder = new_head(nano, tmp_path / "head", **kind, vocab_size=nano.vocab_size)
    padded = {}
    num_padded = 640
    for role in ("draft", "target"):
        getattr(nano, role).save_pretrained(tmp_path / role)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / role)
        model.resize_token_embeddings(nano.vocab_size + num_padded, mean_resizing=False)
        with torch.no_grad():  # with the logits of the first tokens, many times over
            weight = model.get_output_embeddings().weight
            weight[nano.vocab_size :] = weight[:64].repeat(num_padded // 64, 1)
        padded[role] = model.eval()
    different = []
    for head in (folder, new_head(nano, tmp_path / "other", **kind)):
        with assist(padded["target"], padded["draft"], head, any_draft=True, **BOUNDS) as handle:
            for prompt in many:
                actual = padded["target"].generate(
                    **inputs(prompt),
                    assistant_model=padded["draft"],
                    do_sample=False,
                    max_new_tokens=12,
                    suppress_tokens=list(range(nano.vocab_size, nano.vocab_size + num_padded)),
                )
                tokens, rounds = ours(nano, folder, prompt, 12)
                assert actual[0, len(prompt) :].tolist() == tokens
                different.append(
                    [drafted for drafted, _ in handle.rounds] != [drafted for drafted, _ in rounds]
                )
    assert not any(different[: len(many)]) and any(different[len(many) :])


def test_mistakes_are_named(nano, prompts, simple, tmp_path):
    given = inputs(prompts[0]) | {"do_sample": False, "max_new_tokens": 4}
    folder = {"custom_generate": str(simple), "trust_remote_code": True}
    with pytest.raises(ValueError, match="draft_model= is missing"):
        nano.target.generate(**given, **folder)
    with pytest.raises(ValueError, match="trust_remote_code"):
        nano.target.generate(
            **given, custom_generate=str(simple), draft_model=nano.draft, trust_remote_code=False
        )
    with pytest.raises(
        ValueError, match=r"hidden states of size 160 of .*, but those of .* have 256"
    ):
        nano.target.generate(**given, **folder, draft_model=nano.target)
    with pytest.raises(ValueError, match="threshold=1.5 must be a number from 0 to 1"):
        nano.target.generate(**given, **folder, draft_model=nano.draft, threshold=1.5)
    with pytest.raises(ValueError, match="batch_size = 1"):
        nano.target.generate(
            input_ids=torch.tensor([prompts[0]] * 2),
            **folder,
            draft_model=nano.draft,
            max_new_tokens=4,
        )
    for wrong in ({"threshold": 1.5}, {"threshold": "auto"}, {"max_tokens": 0}):
        with pytest.raises(
            ValueError, match="must be a number from 0 to 1|must be a positive integer of at most"
        ):
            assist(nano.target, nano.draft, simple, **wrong)
    unlike = tiny_pair(vocab_size=7).target
    with pytest.raises(
        ValueError,
        match="the draft has 2048 logits and the target 7",
    ):
        assist(unlike, nano.draft, simple)
    with pytest.raises(UserError, match=r"there is no head folder"):
        assist(nano.target, nano.draft, tmp_path / "nothing")
    nano.draft.save_pretrained(tmp_path / "changed")
    changed = type(nano.draft).from_pretrained(tmp_path / "changed")
    torch.nn.init.zeros_(changed.lm_head.weight)
    changed.save_pretrained(tmp_path / "changed")
    changed = type(nano.draft).from_pretrained(tmp_path / "changed")
    with pytest.raises(
        UserError, match="the head was trained for draft embedded:nano/draft at revision"
    ):
        assist(nano.target, changed, simple)
    with assist(nano.target, changed, simple, any_draft=True):
        nano.target.generate(**given, assistant_model=changed)
    assert "_get_candidate_generator" not in vars(nano.target)


def test_another_commit_of_the_draft_is_refused(nano, prompts, tmp_path, monkeypatch):
    folder = new_head(nano, tmp_path / "head", **LOOK_AHEAD)
    config = json.loads((folder / "config.json").read_text())
    config["draft"] = {"id": "somebody/draft", "revision": "0" * 16, "commit": "a" * 40}
    (folder / "config.json").write_text(json.dumps(config))
    given = inputs(prompts[0]) | {
        "do_sample": False,
        "max_new_tokens": 4,
        "draft_model": nano.draft,
    }
    given |= {"custom_generate": str(folder), "trust_remote_code": True}
    nano.target.generate(**given)  # nano is no commit
    monkeypatch.setattr(nano.draft.config, "_commit_hash", "b" * 40, raising=False)
    with pytest.raises(
        ValueError,
        match=f"for somebody/draft at commit {'a' * 40}, but the draft is .* at {'b' * 40}",
    ):
        nano.target.generate(**given)
    nano.target.generate(**given, any_draft=True)


def test_the_loader_names_no_part_of_this_project(simple):
    source = loader_source(CUSTOM_GENERATE)
    assert (simple / CUSTOM_GENERATE).read_text() == source
    assert "import specheads" not in source and "from specheads" not in source
