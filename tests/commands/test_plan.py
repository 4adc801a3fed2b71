"""What a command will take, before it begins."""

import logging
from io import StringIO
from pathlib import Path

import pytest
import torch
from commands import ROOT
from rich.console import Console

from specheads.commands.compose import command_config
from specheads.commands.plan import (
    LONG,
    Plan,
    Rates,
    Stage,
    announce,
    plan_of,
    render,
)
from specheads.commands.verbs import VERBS

SMALL = ["model=nano", "data.num_train=8", "data.num_dev=4", "data.num_test=4"]


def planned(verb, *words):
    return plan_of(VERBS[verb], command_config(VERBS[verb].config, [*SMALL, *words]))


@pytest.mark.parametrize("verb", ["data", "train", "distill", "evaluate", "probe"])
def test_a_plan_is_printed_and_nothing_is_made(verb, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, _ = run(verb, *SMALL, "--plan")
    assert code == 0 and not list(tmp_path.iterdir())
    for heading in ("stage, at most", "prompts", "tokens", "time", "memory", "disk", "responses"):
        assert heading in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_mistake_is_told_before_a_plan(run):
    assert run("train", "trainer.max_epochs=abc", "--plan")[0] == 2


def test_tokens_are_those_of_the_prompts_and_the_longest_responses():
    responses, labels = planned("data", "data.max_new_tokens=10").stages
    assert (responses.prompts, responses.tokens) == (16, 160)
    assert labels.prompts == 16 and labels.tokens > 160  # prompts are read, too
    repeated, _ = planned(
        "data", "data.max_new_tokens=10", "generation.responses_per_prompt=3"
    ).stages
    assert repeated.tokens == (3 * 8 + 8) * 10


def test_more_of_anything_takes_more_disk():
    few = planned("data", "data.max_new_tokens=10")
    assert planned("data", "data.max_new_tokens=100").disk > few.disk
    assert planned("data", "generation.samples_per_position=9").disk > few.disk
    lookahead, specdecpp = planned("train", "mixing.num_mixes=3").stages[2:4]
    assert specdecpp.disk == 3 * lookahead.disk > 0  # the states of each mix
    unstored = planned("train", "features_budget=0").stages[2:4]
    assert [stage.disk for stage in unstored] == [0, 0]


def test_heads_of_a_draft_that_reads_its_target_take_that_as_well():
    """Labels need its distributions, too, and heads only the inputs of its layers."""
    words = ["features_budget=0", "data.num_train=1000"]
    draft = ROOT / "tests" / "fixtures" / "eagle3" / "llama"
    _, labels, *heads = planned("train", *words, f"model.draft={draft}").stages
    _, _, *others = planned("train", *words).stages
    for of_kind, other in zip(heads[:2], others[:2], strict=True):
        assert labels.memory > of_kind.memory > other.memory


def test_a_draft_with_fewer_tokens_takes_less_of_both():
    words = ["draft_kind=eagle3", "target_probs_budget=0"]
    whole = planned("distill", *words).stages[1]
    few = planned("distill", *words, "draft_vocabulary=48").stages[1]
    num_rows = 2_000 * 256  # of nano's output, which are trained by AdamW
    assert whole.memory - few.memory == 16 * num_rows
    assert whole.disk - few.disk == 18 * num_rows


def test_a_data_set_of_the_hub_is_not_loaded_for_a_plan():
    plan = planned("distill", "data=alpaca", "data.num_train=40000")
    assert plan.stages[0].prompts == 40_008 and plan.stages[1].prompts == 40_000


def test_responses_of_a_server_take_no_time_here():
    words = ["runner=server", "server.url=http://localhost:1", "model.dtype=float32"]
    responses, labels = planned("data", *words).stages
    assert responses.seconds == 0 < labels.seconds


def made(seconds):
    stage = Stage("responses", 10, 2e6, seconds, 3e9, 5e6)
    return Plan([stage, Stage("labels", 8, 1e6, 1.0, 1e9, 5e6)], 1e9, 10, Path())


def test_the_whole_has_the_sum_of_times_and_disk_and_the_peak_of_memory():
    plan = made(59.0)
    assert (plan.seconds, plan.memory, plan.disk) == (60.0, 4e9, 1e7)
    assert plan.short == ("10 prompts, at most 60 s, 4 GB of memory, 10 MB on disk")
    console = Console(width=80, file=StringIO())
    render(plan, console)
    assert "4 GB" in console.file.getvalue() and "60 s" in console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "level"), [(LONG / 2, logging.INFO), (LONG * 2, logging.WARNING)]
)
def test_more_than_an_hour_is_a_warning(caplog, seconds, level):
    with caplog.at_level(logging.INFO):
        announce(made(seconds))
    (record,) = caplog.records
    assert record.levelno == level and ("more than an hour" in record.message) == (seconds > LONG)


def test_rates_are_those_of_a_device():
    rates = Rates.measured(torch.device("cpu"), torch.float32)
    assert min(rates.flops, rates.bandwidth, rates.overhead) > 0
