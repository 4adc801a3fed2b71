"""Experiments of papers: their settings, the outcome of claims, and every experiment of
conf/experiment on nano.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from random_recording import random_recording
from specheads.commands.papers import methods_of
from specheads.papers.claims import checked, is_measured, measured
from specheads.papers.reproduction import decoding
from specheads.papers.reproduction.settings import METRICS, Claim, Reproduction, samples
from specheads.papers.reproduction.settings import tally as tally_of

from specheads import AcceptanceHead, HeadConfig, UserError
from specheads.commands import papers
from specheads.commands.compose import command_config, plain, settings_of
from specheads.commands.help import REPRODUCE, check_experiment, experiments
from specheads.decoding.records import DecodeStats
from specheads.heads.head import save_head
from specheads.heads.metrics import auroc, binary_kl
from specheads.pair.config import config_folder
from specheads.replay.recording import GROUND_TRUTH
from specheads.replay.replay import RecordedHead, head_logits

ROOT = Path(__file__).parents[2]
ITEMS = {
    item["id"]
    for paper in yaml.safe_load((ROOT / "benchmarks/papers.yaml").read_text("utf-8"))
    for item in paper["items"]
}
NAMES = list(experiments(REPRODUCE))
TINY = [
    "model=nano",
    "num_prompts=2",
    "max_new_tokens=8",
    "speeds=false",
    "engine=eager",
]  # which compiles nothing


def composed(name, *overrides):
    return command_config("reproduce", [f"experiment={name}", *overrides])


def settings(name, *overrides):
    cfg = composed(name, *overrides)
    return settings_of(Reproduction, cfg, methods=methods_of(plain(cfg.methods)))


def tally(tokens, calls, drafted=0, nats=1.0, share=0.0, **marks):
    """The tally of a method by prompt, from tokens and target calls."""
    entries = []
    for number, call in zip(tokens, calls, strict=True):
        stats = DecodeStats(
            number,
            drafted,
            drafted // 2,
            drafted - drafted // 2,
            call,
            drafted,
            2.0,
            1.0,
            marks=marks,
        )
        entries.append([asdict(stats), nats * number, None])
    return tally_of(entries, 4.0, share)


def claim(**values):
    return Claim(
        **{
            "claims": ("block_table1",),
            "says": "More.",
            "metric": "tokens_per_round",
            "of": "a",
            "expected": "more",
        }
        | values
    )


EVEN = [8] * 20
UNEVEN = [4, 4, 12, 12] * 5


@pytest.mark.parametrize(
    ("values", "outcome", "ours"),
    [
        ({"over": "b"}, "held", "2.000 [2.000, 2.000]"),
        ({"over": "b", "expected": "less"}, "did not hold", "2.000 [2.000, 2.000]"),
        ({"over": "b", "than": 1.999}, "held", "2.000 [2.000, 2.000]"),
        ({"over": "b", "than": 2}, "did not hold", "2.000 [2.000, 2.000]"),
        ({}, "held", "4.000 [4.000, 4.000]"),
        ({"than": 4.5}, "did not hold", "4.000 [4.000, 4.000]"),
        ({"over": "b", "than": {"of": "b", "over": "a"}}, "held", "4.000 [4.000, 4.000]"),
        ({"of": ("a", "b"), "over": ("b",)}, "held", "2.000 [2.000, 2.000]"),
        (
            {"metric": "perplexity", "over": "b", "expected": "less"},
            "held",
            f"{np.exp(-1):.3f} [{np.exp(-1):.3f}, {np.exp(-1):.3f}]",
        ),
    ],
)
def test_a_claim_of_exact_counts_holds_or_not(values, outcome, ours):
    tallies = {"a": tally(EVEN, [2] * 20), "b": tally(EVEN, [4] * 20, nats=2.0)}
    result = checked(claim(**values), tallies, range(20))
    assert (result.outcome, result.ours, result.ratio) == (outcome, ours, None)
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
    together = checked(
        claim(over="b"), tallies, [(number // 4, number % 2) for number in range(20)]
    )
    apart = checked(claim(over="b"), tallies, range(20))
    assert together.ours == "1.000 [1.000, 1.000]" and apart.ours != together.ours


def test_metrics_are_those_of_the_counts():
    made = tally([6, 10], [2, 3], drafted=8, copy_rounds=1, merges=0)
    counts = np.array([[1.0, 1], [0, 2]])
    total = DecodeStats.total(
        [
            DecodeStats(number, 8, 4, 4, call, 8, 2.0, 1.0, marks={"copy_rounds": 1})
            for number, call in ((6, 2), (10, 3))
        ]
    )
    values = {name: samples(made, name, counts) for name in METRICS}
    assert values["joules_per_token"] is None  # of a meter
    assert {values[name][0] for name in ("tokens_per_round",)} == {total.block_efficiency}
    assert (
        values["acceptance_rate"][0] == total.acceptance_rate
        and values["discard_rate"][0] == total.discard_rate
    )
    assert (
        values["verification_rate"][0] == total.verification_rate
        and values["drafted_per_round"][0] == total.num_drafted / total.num_target_calls
    )
    assert (
        values["copied_rounds"][0] == total.marks["copy_rounds"] / total.num_target_calls == 2 / 5
    )
    assert (
        values["in_runs"] is None and values["merge_divergence"] is None
    )  # what was not counted, and what nothing happened to
    assert values["accepted_per_draft_step"][0] == 8 / 16 and values["drafted_per_token"][0] == 1
    assert values["tokens_per_second"][0] == total.tokens_per_second
    assert (
        values["perplexity"] == pytest.approx([np.e, np.e])
        and values["tokens_per_round"][1] == 10 / 3
    )
    assert values["tokens_per_draft_step"][0] == 16 / (16 + 4 * 5)
    assert samples(tally([6], [2]), "acceptance_rate", np.ones((1, 1))) is None
    assert is_measured(claim(), {"a": made}) and not is_measured(
        claim(metric="joules_per_token"), {"a": made}
    )


def test_a_target_that_drafts_for_itself_is_charged_for_its_layers():
    """Eight draft steps at two thirds of a target pass, and two target passes."""
    made = tally([8], [2], drafted=8, share=2 / 3)
    assert samples(made, "tokens_per_draft_step", np.ones((1, 1)))[0] == pytest.approx(
        8 / (4 * (8 * 2 / 3 + 2))
    )


def test_a_claim_has_a_ratio_of_its_own():
    tallies = {"a": tally(EVEN, [2] * 20, drafted=8), "b": tally(EVEN, [8] * 20)}
    values = [
        checked(
            claim(metric="tokens_per_draft_step", over="b", ratio=ratio), tallies, range(20)
        ).ours[:5]
        for ratio in (None, 1, 10)
    ]
    assert values == ["2.000", "0.800", "2.857"]  # 8 * ratio over 8 + 2 * ratio, at 4 if not said


def test_a_claim_on_what_a_method_does_not_have_is_a_message():
    with pytest.raises(UserError, match="acceptance_rate of a is not defined"):
        checked(claim(metric="acceptance_rate"), {"a": tally([8], [2])}, range(1))


# --- settings


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_and_its_claims_are_of_the_papers(name):
    made = settings(name, "model=nano")
    assert len(made.methods) > 1 and made.claims
    assert {item for each in made.claims for item in each.claims} <= ITEMS
    assert composed(name).command == f"reproduce/{name}" and experiments(REPRODUCE)[name].partition(
        "\n"
    )[0].endswith(".")
    used = {method for each in made.claims for method in each.methods}
    assert used <= {method.name for method in made.methods}


WRONG = {
    "an unknown name": (
        "[{name: a, drafting: chain}]",
        "a: drafting names 'chain', which is not in conf/drafting; use one of",
    ),
    "an unknown key": (
        "[{name: a, draft: b}]",
        "draft=b is not known; expected one of name, baseline",
    ),
    "a key that its file lacks": (
        "[{name: a, drafting: {name: beam, beams: 2}}]",
        "methods: a: drafting: beams=2 is not known; the keys of beam are num",
    ),
    "several values": (
        "[{name: a, stopping: confidence}]",
        "stopping=confidence leaves threshold open; give a value",
    ),
    "an open value": (
        "[{name: a, drafting: layer_skip}]",
        "drafting=layer_skip leaves skipped open",
    ),
    "a rule that is fitted": (
        "[{name: a, stopping: {name: head_threshold, threshold: auto}}]",
        "HeadThreshold has to be fitted",
    ),
    "a refused value": (
        "[{name: a, stopping: {name: fixed_length, num_tokens: 0}}]",
        "methods: a: stopping.num_tokens=0 must be",
    ),
    "a pairing": (
        "[{name: a, drafting: tree, verification: token}]",
        "does not take what Tree drafts",
    ),
    "a baseline with a draft": (
        "[{name: a, baseline: target, drafting: tree}]",
        "a baseline drafts nothing; leave out drafting",
    ),
    "no name": ("[{drafting: tree}]", "name is missing; it is its name in tables and claims"),
    "listed values under one name": (
        "[{name: a, stopping: {name: fixed_length, num_tokens: [2, 4]}}]",
        "methods names 'a' twice",
    ),
    "a name twice": ("[{name: a}, {name: a}]", "methods names 'a' twice"),
    "another baseline": ("[{name: a, baseline: none}]", "baseline=none must be one of"),
    "another warp": ("[{name: a, warp: {heat: 1}}]", "warp={'heat': 1} has the unknown key heat"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_method_is_a_message(case):
    entries, message = WRONG[case]
    with pytest.raises(UserError, match=re.escape(message)):
        Reproduction(methods=methods_of(yaml.safe_load(entries)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metric": "speed"}, "metric=speed must be one of tokens_per_round"),
        ({"over": "c"}, "names the method 'c'; use some of a, b"),
        ({"of": ("a", "b"), "over": "b", "expected": "less"}, "chooses the best of several"),
        ({"of": ("a", "b")}, "chooses the best of several"),
        ({"expected": "equal"}, "expected=equal must be one of 'more' or 'less'"),
    ],
)
def test_a_mistake_in_a_claim_is_a_message(values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Reproduction(methods=methods_of([{"name": "a"}, {"name": "b"}]), claims=(claim(**values),))


@pytest.mark.parametrize(
    ("command", "chosen", "message"),
    [
        (
            "reproduce",
            None,
            (
                r"experiment=null is nothing that specheads papers reproduce takes; use one of"
                r" block_\w+, "
            ),
        ),
        (
            "reproduce",
            "specdecpp",
            (
                r"experiment=specdecpp is nothing that specheads papers reproduce takes; use one of"
                r" block_"
            ),
        ),
        (
            "train",
            "gsd_results",
            r"experiment=gsd_results is nothing that specheads train takes; use one of specdecpp, ",
        ),
    ],
)
def test_an_experiment_of_another_command_is_a_message(command, chosen, message):
    with pytest.raises(UserError, match=message):
        check_experiment(command, chosen)


def test_commands_take_their_experiments():
    for command, chosen in [
        ("train", "thorough"),
        ("train", None),
        ("train", "of_the_user"),
        ("reproduce", NAMES[0]),
    ]:
        check_experiment(command, chosen)
    files = {path.stem for path in (config_folder() / "experiment").glob("*.yaml")}
    assert {*experiments("train"), *NAMES} == files and not {*experiments("train")} & {*NAMES}


def test_a_method_that_needs_a_head_says_how_to_train_it(tmp_path):
    with pytest.raises(
        UserError,
        match=(
            r"head=null, but .* decodes with a head; .*'specheads train model=nano"
            r" experiment=specdecpp'"
        ),
    ):
        papers.reproduce.run(composed("specdecpp_table1", "model=nano", f"paths.run={tmp_path}"))
    words = ["head=latest", f"paths.run={tmp_path}", f"paths.outputs={tmp_path}"]
    with pytest.raises(UserError, match="there is no head for draft"):
        papers.reproduce.run(composed("specdecpp_table1", "model=nano", *words))


# --- runs


@pytest.fixture(scope="module")
def heads(nano, tmp_path_factory):
    """The folder of the heads that experiments name."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads")
    named = {method.head for name in NAMES for method in settings(name).methods}
    for name in named - {None}:
        made = AcceptanceHead(
            HeadConfig(nano.draft_lm.hidden_size, int("-d3" in name), "input_token")
        ).eval()
        save_head(made.requires_grad_(False), folder / name)
    return folder


@pytest.fixture(autouse=True)
def same_pair(nano, monkeypatch):
    """The pair of all runs, so that it is loaded once."""
    monkeypatch.setattr(papers, "load_configured_pair", lambda cfg: nano)


def run(name, folder, *overrides):
    """Run an experiment in a folder; return its reproduction.json."""
    papers.reproduce.run(composed(name, *TINY, f"paths.run={folder}", *overrides))
    return json.loads((folder / "reproduction.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        name if number % 4 == 1 else pytest.param(name, marks=pytest.mark.full)
        for number, name in enumerate(NAMES)
    ],
)
def test_every_experiment_runs(name, heads, tmp_path, capsys):
    longer = (
        ["max_new_tokens=24"] if name == "gsd_ablations" else []
    )  # something has to repeat in the drafts of each prompt
    result = run(name, tmp_path, f"head={heads}", f"paths.data={tmp_path}", *longer)
    made = settings(name, "model=nano", "speeds=false")
    assert (
        result["experiment"] == name
        and result["prompts"]["split"] == "dev"
        and result["prompts"]["num_prompts"] == 2
    )
    assert set(result["methods"]) == {method.name for method in made.methods}
    for values in result["methods"].values():
        assert (
            values["tokens_per_round"]["value"] >= 0.2
            and ("perplexity" not in values) == made.replay
        )
        assert made.replay or values["perplexity"]["value"] > 1
        assert "tokens_per_second" not in values
    if name == "mjsd_results":  # the target decodes alone, sampled and greedily
        target, greedy = (result["methods"][each] for each in ("target", "target greedy"))
        assert target["tokens_per_round"]["value"] == 1 and "acceptance_rate" not in target
        assert greedy["perplexity"]["value"] <= target["perplexity"]["value"]
    assert [each["says"] for each in result["claims"]] == [
        each.says for each in made.claims if each.metric in made.metrics
    ]
    assert all(
        each["outcome"] in ("held", "held weakly", "did not hold") for each in result["claims"]
    )
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    assert "2 prompts decoded by" in printed and printed.splitlines()[-1] == str(
        tmp_path / "reproduction.json"
    )


def test_replayed_rounds_are_those_that_are_decoded(tmp_path, heads):
    methods = (
        "methods=[{name: 'K={num_tokens}', stopping: {name: fixed_length, num_tokens: [2, 4]}},"
        " {name: '{head}', head: [input_token-d0-r1, input_token-d3-r1], stopping: {name:"
        " head_threshold, threshold: 0.5, max_tokens: 6}}]"
    )
    words = [methods, "claims=[]", f"head={heads}", f"paths.data={tmp_path}"]
    replayed = run("specdecpp_oracle", tmp_path / "a", *words)["methods"]
    decoded = run("specdecpp_oracle", tmp_path / "b", "replay=false", *words)["methods"]
    assert (
        set(decoded) == {"K=2", "K=4", "input_token-d0-r1", "input_token-d3-r1"}
        and "divergence" not in decoded["K=2"]
    )
    for name, values in decoded.items():
        for metric in ("tokens_per_round", "discard_rate", "verification_rate"):
            assert values[metric] == replayed[name][metric], (name, metric)
    free, charged = (
        replayed["input_token-d3-r1"][f"tokens_per_{kind}_step"]["value"]
        for kind in ("draft", "charged")
    )
    assert (
        charged < free
        and replayed["K=2"]["tokens_per_draft_step"] == replayed["K=2"]["tokens_per_charged_step"]
    )
    assert (
        0 <= replayed["input_token-d3-r1"]["auroc"]["value"] <= 1
        and replayed["input_token-d3-r1"]["divergence"]["value"] > 0
    )


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "name: a, verification: block",
            "a is more than a stopping rule, the target or the oracle alone",
        ),
        ("name: a, baseline: mjgd", "a is more than a stopping rule"),
        (
            "name: a, head: b, stopping: {name: head_threshold, threshold: 0.5}",
            "lacks the head b; it has input_token-d0-r1, ",
        ),
    ],
)
def test_what_cannot_be_replayed_is_a_message(method, message, heads, tmp_path):
    with pytest.raises(UserError, match=message):
        run("specdecpp_oracle", tmp_path, f"methods=[{{{method}}}]", "claims=[]", f"head={heads}")


def test_the_oracle_does_not_decode(tmp_path):
    with pytest.raises(
        UserError, match="oracle knows every outcome, so it cannot decode; use replay=true"
    ):
        run("specdecpp_oracle", tmp_path, "replay=false")


def test_the_quality_of_a_head_is_summed_by_prompt():
    head = RecordedHead("head", "next_token")
    recording = random_recording()
    generator = torch.Generator().manual_seed(0)
    recording.features["head"] = torch.randn(len(recording.tokens), generator=generator)
    recording.features[GROUND_TRUTH] = torch.rand(len(recording.tokens), generator=generator)
    logits, _, _, node = head_logits(recording, head)
    truth = recording.features[GROUND_TRUTH][node].double()
    columns = decoding._quality(recording, head)
    assert columns["divergence"].sum() / columns["num_predicted"].sum() == pytest.approx(
        binary_kl(logits, truth).item()
    )
    own = recording.prompt_of(node) == 1
    assert columns["num_in_order"][1] / columns["num_pairs"][1] == pytest.approx(
        auroc(logits[own], truth[own])
    )


def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path, monkeypatch):
    whole = run("block_table1", tmp_path / "whole")
    real = decoding.response_nats
    calls = []

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(decoding, "response_nats", killed)
    with pytest.raises(KeyboardInterrupt):
        run("block_table1", tmp_path / "parts")
    assert (
        len((tmp_path / "parts/generations.jsonl").read_text().splitlines()) == 2
    )  # provenance, and a prompt
    monkeypatch.setattr("specheads.evaluation.setup.is_resumed", lambda folder: True)
    assert run("block_table1", tmp_path / "parts") == whole
    assert len(calls) == 5 + 3
    monkeypatch.setattr(
        decoding, "decoder_of", lambda *arguments: pytest.fail("nothing is left to decode")
    )
    assert run("block_table1", tmp_path / "parts") == whole


def test_speeds_are_reported_unless_they_are_left_out(tmp_path):
    result = run("block_table1", tmp_path, "speeds=true", "engine=auto")
    assert all("tokens_per_second" in values for values in result["methods"].values())
    assert [each["published"] for each in result["claims"]] == ["1.083", "1.0649", "1.0649"]


def test_the_command_does_not_name_folders(monkeypatch):
    given = ["experiment=block_table1", "paths.outputs=/tmp/mine", "resume=false", "seed=1"]
    config = OmegaConf.create({"overrides": {"task": given}})
    monkeypatch.setattr(papers.HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(papers.HydraConfig, "get", lambda: config)
    assert papers.command_line() == "specheads papers reproduce experiment=block_table1 seed=1"


def test_tables_leave_out_what_nothing_has(capsys):
    tallies = {"a": tally(EVEN, [2] * 20), "b [x]": tally(UNEVEN, [2] * 20)}
    papers.print_result(
        measured(tallies, list(METRICS), range(20)),
        [checked(claim(over="b [x]"), tallies, range(20))],
    )
    printed = capsys.readouterr().out
    assert "b [x]" in printed and "rounds with a copy" not in printed and "did not" in printed
