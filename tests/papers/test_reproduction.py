"""Experiments of papers: what is measured, whether a claim held, and every experiment on nano."""

import re

import numpy as np
import pytest
import torch
import yaml

from benchmarks.papers import reproduce
from benchmarks.papers.measures import METRICS, Claim, checked, measured, priced, samples
from benchmarks.papers.page import PAPERS
from benchmarks.papers.reproduce import EXPERIMENTS, Experiment, Method
from specheads import AcceptanceHead, HeadConfig, UserError, Warp, generate_baseline
from specheads.heads.head import save_head

ITEMS = {item["id"] for paper in yaml.safe_load(PAPERS.read_text()) for item in paper["items"]}
NAMES = sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))
TINY = ["model=nano", "num_prompts=2", "max_new_tokens=8", "speeds=false", "engine=eager"]
EVEN = [8] * 20
UNEVEN = [4, 4, 12, 12] * 5


def tally(tokens, calls, drafted=0, nats=1.0, **more):
    """The tally of a method by prompt, at a ratio of 4."""
    row = {
        "num_tokens": np.array(tokens, float),
        "num_target_calls": np.array(calls, float),
        "target_passes": np.array(calls, float),
        "nats": nats * np.array(tokens),
    }
    named = ("num_drafted", "num_draft_calls", "draft_steps")
    row |= {name: np.full(len(tokens), float(drafted)) for name in named}
    for name in ("num_kept", "num_accepted", "num_discarded"):
        row[name] = row["num_drafted"] / 2
    row["head_steps"] = 0 * row["num_tokens"]
    return priced(row | more, 4.0)


def claim(**values):
    known = {"metric": "tokens_per_round", "of": "a", "expected": "more"}
    return Claim(**({"claims": ["block_table1"], "says": "More."} | known | values))


@pytest.mark.parametrize(
    ("values", "outcome", "ours"),
    [
        ({"over": "b"}, "held", 2),
        ({"over": "b", "expected": "less"}, "did not hold", 2),
        ({"over": "b", "than": 1.999}, "held", 2),
        ({"over": "b", "than": 2}, "did not hold", 2),
        ({}, "held", 4),
        ({"than": 4.5}, "did not hold", 4),
        ({"over": "b", "than": {"of": "b", "over": "a"}}, "held", 4),
        ({"of": ["a", "b"], "over": ["b"]}, "held", 2),
        ({"metric": "perplexity", "over": "b", "expected": "less"}, "held", np.exp(-1)),
        ({"metric": "tokens_per_draft_step", "over": "b", "ratio": 1}, "did not hold", 0.8),
        ({"metric": "tokens_per_draft_step", "over": "b", "ratio": 10}, "held", 20 / 7),
    ],
)
def test_a_claim_of_exact_counts_holds_or_not(values, outcome, ours):
    """With 8 drafted tokens and 2 calls against none and 4 calls."""
    tallies = {"a": tally(EVEN, [2] * 20, drafted=8), "b": tally(EVEN, [4] * 20, nats=2.0)}
    if "ratio" in values:
        tallies["b"] = tally(EVEN, [8] * 20)
    result = checked(claim(**values), tallies, range(20))
    assert result.outcome == outcome
    assert result.ours == f"{ours:.3f} [{ours:.3f}, {ours:.3f}]"
    assert bool(result.why) == (outcome != "held")


def test_a_claim_holds_weakly_where_the_interval_includes_the_opposite():
    tallies = {"a": tally(UNEVEN, [2] * 20), "b": tally([7, 8] * 10, [2] * 20)}
    result = checked(claim(over="b", published=1.0, note="few prompts"), tallies, range(20))
    low, high = map(float, re.findall(r"[\d.]+", result.ours)[1:])
    assert result.outcome == "held weakly" and low < 1 < high
    assert result.ratio == pytest.approx(16 / 15) and result.published == "1"
    assert result.why == "expected more than 1; few prompts"


def test_prompts_of_a_group_are_resampled_together():
    tallies = {"a": tally(UNEVEN, [2] * 20), "b": tally(EVEN, [2] * 20)}
    groups = [(number // 4, number % 2) for number in range(20)]
    assert checked(claim(over="b"), tallies, groups).ours == "1.000 [1.000, 1.000]"
    assert checked(claim(over="b"), tallies, range(20)).ours != "1.000 [1.000, 1.000]"


def test_metrics_are_ratios_of_sums():
    made = tally([6, 10], [2, 3], drafted=8)
    counts = np.array([[1.0, 1], [0, 2]])  # all prompts, and twice the second
    values = {name: samples(made, name, counts) for name in METRICS}
    expected = {
        "tokens_per_round": [16 / 5, 10 / 3],
        "acceptance_rate": [0.5, 0.5],
        "drafted_per_token": [1.0, 0.8],
        "perplexity": [np.e, np.e],
        "tokens_per_draft_step": [16 / 36, 10 / 20],
    }
    for name, numbers in expected.items():
        assert values[name] == pytest.approx(numbers)
    assert values["divergence"] is None  # not counted
    assert samples(tally([6], [2]), "acceptance_rate", np.ones((1, 1))) is None  # nothing drafted
    found = measured({"a": made}, list(METRICS), range(2))["a"]
    assert found["tokens_per_round"]["value"] == 16 / 5 and "divergence" not in found
    with pytest.raises(UserError, match="acceptance_rate of a is not defined"):
        checked(claim(metric="acceptance_rate"), {"a": tally([8], [2])}, range(1))


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_is_read_and_its_claims_are_of_the_papers(name):
    experiment = Experiment.read(name, ["model=nano", "ratio=7", "split=final"])
    assert experiment.ratio == 7 and {"model=nano", "split=final"} <= {*experiment.words}
    names = [method.name for method in Method.all_of(experiment.methods)]
    assert len({*names}) == len(names) > 1 and experiment.claims
    for each in experiment.claims:
        made = Claim(**each)
        assert {*made.claims} <= ITEMS and {*made.methods} <= {*names} and made.metric in METRICS


@pytest.fixture(scope="module")
def heads(nano, tmp_path_factory):
    """The folder of the heads that experiments name."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads")
    named = set()
    for name in NAMES:
        methods = Method.all_of(Experiment.read(name, []).methods)
        named |= {method.head for method in methods if method.head}
    for name in named:
        config = HeadConfig(nano.draft_lm.hidden_size, int("-d3" in name), "input_token")
        save_head(AcceptanceHead(config).eval().requires_grad_(False), folder / name)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        name if name == "block_table1" else pytest.param(name, marks=pytest.mark.full)
        for name in NAMES
    ],
)
def test_every_experiment_runs(name, heads, tmp_path):
    result = reproduce.run(name, [*TINY, f"head={heads}", f"paths.data={tmp_path}"])
    experiment = Experiment.read(name, [])
    assert result["methods"].keys() == {each.name for each in Method.all_of(experiment.methods)}
    for values in result["methods"].values():
        assert values["tokens_per_round"]["value"] >= 0.2 and "tokens_per_second" not in values
        assert ("perplexity" not in values) == experiment.replay
    assert len(result["claims"]) + len(result["not_run"]) == len(experiment.claims)
    if name == "mjsd_results":  # the target decodes alone, sampled and greedily
        target = result["methods"]["target"]
        greedy = result["methods"]["target greedy"]
        assert target["tokens_per_round"]["value"] == 1 and "acceptance_rate" not in target
        assert greedy["perplexity"]["value"] <= target["perplexity"]["value"]


def test_replayed_rounds_are_those_that_are_decoded(tmp_path, heads):
    methods = (
        "methods=[{name: 'K={num_tokens}', stopping: {name: fixed_length, num_tokens: [2, 4]}},"
        " {name: '{head}', head: [input_token-d0-r1, input_token-d3-r1], stopping: {name:"
        " head_threshold, threshold: 0.5, max_tokens: 6}}]"
    )
    words = [*TINY, methods, "claims=[]", f"head={heads}", f"paths.data={tmp_path}"]
    replayed = reproduce.run("specdecpp_oracle", words)["methods"]
    decoded = reproduce.run("specdecpp_oracle", [*words, "replay=false"])["methods"]
    assert set(decoded) == {"K=2", "K=4", "input_token-d0-r1", "input_token-d3-r1"}
    for name, values in decoded.items():
        for metric in ("tokens_per_round", "discard_rate", "verification_rate"):
            assert values[metric] == replayed[name][metric], (name, metric)
    with_head = {name: each["value"] for name, each in replayed["input_token-d3-r1"].items()}
    assert with_head["tokens_per_charged_step"] < with_head["tokens_per_draft_step"]
    assert 0 <= with_head["auroc"] <= 1 and with_head["divergence"] > 0
    fixed = replayed["K=2"]
    assert fixed["tokens_per_draft_step"] == fixed["tokens_per_charged_step"]


def test_nats_are_those_of_transformers_without_the_warp(nano, prompts):
    """A response that was sampled at a low temperature, token by token by transformers."""
    prompt = prompts[0]
    response = generate_baseline(nano, prompt, 9, warp=Warp(0.7, top_k=5)).tokens.tolist()
    expected = 0.0
    for place, token in enumerate(response):
        logits = nano.target(input_ids=torch.tensor([prompt + response[:place]])).logits[0, -1]
        expected -= logits.log_softmax(-1)[token].item()
    found = reproduce.response_nats(nano.target_lm, prompt, response)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["methods=[{name: a, verification: block}]"], "a is more than a stopping rule"),
        (["methods=[{name: a, baseline: mjgd}]"], "a is more than a stopping rule"),
        (["replay=false"], "oracle knows every outcome, so it cannot decode; use replay=true"),
        (
            ["methods=[{name: a, stopping: {name: head_threshold, threshold: 0.5}}]"],
            "a needs the head None; head= has ",
        ),
    ],
)
def test_what_cannot_be_repeated_is_a_message(words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        reproduce.run("specdecpp_oracle", [*TINY, f"paths.data={tmp_path}", "claims=[]", *words])
