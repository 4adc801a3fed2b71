"""Heads of growing shares: equal steps, one cache and one store, a curve, and no work is done twice."""

import csv
import json
from io import StringIO

import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from safetensors.torch import load_file

from specheads.commands.data import data_cache
from specheads.evaluation import learning_curve as module
from specheads.evaluation.intervals import Interval
from specheads.evaluation.learning_curve import learning_curve, plans, settings_of
from specheads.evaluation.learning_curve_figure import figure_of
from specheads.evaluation.learning_curve_report import Curve, Point, conclusion, print_curve
from specheads.evaluation.report import Winner
from specheads.heads.checkpoint import load_head
from specheads.interrupts import Interrupted
from specheads.pair_config import config_folder
from specheads.storage.data_set import load_split
from specheads.storage.files import write_json

SMALL = [
    "model=nano",
    "data=alpaca",
    "data.path=rows.jsonl",
    "data.template='{question}'",
    "data.num_train=12",
    "trainer.max_epochs=6",
    "data.num_dev=3",
    "data.num_test=3",
    "data.max_new_tokens=8",
    "generation.responses_per_prompt=2",
    "loader.batch_size=4",
    "trainer.accelerator=cpu",
    "shares=[1,0.5]",
    "fixed_lengths=[1,2]",
    "thresholds=[0.3,0.6]",
    "ratios=[5,10]",
    "head.depth=0",
    "head.width=8",
]


def composed(*overrides):
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        return compose("learning_curve", [*SMALL, *overrides])


@pytest.fixture
def cfg(tmp_path, monkeypatch, nano):
    """A small curve's config; its run's folder is one of an interrupted run."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"question": f"def f{number}(x):\n"}) + "\n" for number in range(18)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    cfg = composed("paths.run=run")
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "run.json", {"identity": "", "finished": False, "resumed": True})
    monkeypatch.setattr(module, "load_configured_pair", lambda cfg: nano)
    return cfg


def test_every_head_takes_the_same_number_of_steps():
    ids = [f"{number}" for number in range(1596)]
    shares = [0.0625, 0.125, 0.25, 0.5, 1]
    planned = plans(composed("loader.batch_size=32", "trainer.max_epochs=12", "paths.run=run"), shares, ids)
    assert [plan.num_prompts for plan in planned] == [100, 200, 399, 798, 1596]
    assert {plan.num_steps for plan in planned} == {600}
    assert [plan.num_epochs for plan in planned] == [150, 86, 47, 24, 12]
    assert [plan.folder.name for plan in planned] == [f"share-{share}" for share in ("0.0625", "0.125", "0.25", "0.5", "1")]
    planned = plans(composed("+trainer.accumulate_grad_batches=3", "trainer.max_epochs=2", "paths.run=run"), [1, 0.5], ids[:20])
    assert {plan.num_steps for plan in planned} == {4} and [plan.num_epochs for plan in planned] == [4, 2]


def test_a_share_is_trained_as_train_would():
    cfg = composed("paths.run=run", "trainer.max_epochs=6")
    plan = plans(cfg, [1, 0.5], ["a", "b", "c", "d"] * 2)[0]
    changed = settings_of(cfg, plan)
    assert (changed.train_share, changed.paths.run) == (0.5, "run/share-0.5")
    assert (changed.trainer.max_epochs, changed.trainer.max_steps, changed.trainer.check_val_every_n_epoch) == (12, 12, 2)
    assert cfg.train_share == 1 and "max_steps" not in cfg.trainer


def test_a_curve_is_trained_once_resumed_after_a_kill_and_written(cfg, tmp_path, monkeypatch, capsys):
    trained, whole = [], module.train_configured_heads

    def stopped(share_cfg, make_data, pair):
        trained.append(share_cfg.train_share)
        if len(trained) == 2:
            raise Interrupted(2)
        return whole(share_cfg, make_data, pair)

    monkeypatch.setattr(module, "train_configured_heads", stopped)
    with pytest.raises(Interrupted):
        learning_curve(cfg)
    first = tmp_path / "run/share-0.5/heads/next_token-d0-r1/model.safetensors"
    before = first.stat().st_mtime_ns
    (curve,) = learning_curve(cfg)
    assert trained == [0.5, 1, 1] and first.stat().st_mtime_ns == before
    assert len(list(tmp_path.glob("data/*/features/*"))) == 1  # one store for all shares
    assert [point.num_prompts for point in curve.points] == [6, 12]
    assert [point.num_responses for point in curve.points] == [12, 24]
    assert {point.num_steps for point in curve.points} == {36}
    heads = [load_head(point.head) for point in curve.points]
    assert [(head.config.train["num_prompts"], head.config.train["num_responses"]) for head in heads] == [(6, 12), (12, 24)]
    for point in curve.points:
        assert set(point.winners) == {"5", "10"}
        assert point.auroc.low <= point.auroc.value <= point.auroc.high and point.kl.value > 0
        checkpoint = torch.load(tmp_path / "run" / f"share-{point.share:g}" / "checkpoints" / "last.ckpt", weights_only=True)
        assert checkpoint["global_step"] == 36 and checkpoint["provenance"]["train_share"] == point.share
    content = json.loads((tmp_path / "run/learning_curve.json").read_text())
    assert [point["share"] for point in content["curves"][0]["points"]] == [0.5, 1]
    assert content["curves"][0]["points"][0]["winners"]["10"]["speedup"]["value"] == curve.points[0].winners["10"].speedup.value
    rows = list(csv.DictReader((tmp_path / "run/learning_curve.csv").open()))
    assert [row["num_prompts"] for row in rows] == ["6", "12"] and "winners.5.gap_oracle.low" in rows[0]
    assert (tmp_path / "run/learning_curve.html").read_text().startswith("<!doctype html>")
    printed = capsys.readouterr().out
    assert "next: specheads evaluate head=run/share-1/heads/next_token-d0-r1" in printed and "train prompts AUROC" in printed


def test_all_prompts_in_a_curve_are_those_of_train(cfg, tmp_path, nano):
    """The share of all gives the head that specheads train gives."""
    cfg.shares = [1]
    (curve,) = learning_curve(cfg)
    assert curve.last_step is None
    alone = module.train_configured_heads(composed("paths.run=alone"), data_cache, nano).folder
    ours, theirs = (load_file(f"{folder}/model.safetensors") for folder in (curve.points[0].head, alone))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    caches = [path.parent for path in tmp_path.glob("data/*/manifest.json")]
    assert caches and all(len(load_split(cache, "train")) == 24 for cache in caches)


def example(step):
    def about(value):
        return Interval(value, value - 0.01, value + 0.02)

    points = [
        Point(
            share=number / 8,
            num_prompts=1000 * number,
            num_responses=1000 * number,
            num_epochs=8 // number,
            num_steps=80,
            head="head",
            auroc=about(0.7 + number / 100),
            kl=about(0.5),
            winners={"10": Winner("head_threshold", "head 0.6", "10", about(1.8), about(1.05), about(0.3), None, 1.8)},
        )
        for number in (4, 8)
    ]
    return Curve("nano", 300, points, step)


def test_a_curve_is_a_table_and_three_panels():
    text = StringIO()
    print_curve(example(Interval(0.04, 0.02, 0.06)), Console(file=text, width=80))
    for part in ("4,000", "8,000", "0.7400", "\u00b10.0150", "1.800x \u00b10.015", "30%", "at 10"):
        assert part in text.getvalue()
    figure = figure_of(example(None))
    assert [trace.name for trace in figure.data] == ["AUROC", "at ratio 10", "at ratio 10"]
    assert all(list(trace.x) == [4000, 8000] for trace in figure.data)
    assert figure.layout.xaxis.type == figure.layout.xaxis3.type == "log"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.01, 0.05, "still rises"), (-0.01, 0.05, "do not tell"), (-0.01, 0.009, "not what heads lack")],
)
def test_the_last_step_says_whether_more_prompts_would_help(low, high, expected):
    text = conclusion(example(Interval((low + high) / 2, low, high)))
    assert text.startswith("From 4,000 to 8,000 train prompts AUROC changes by ") and expected in text
    assert f"[{low:+.4f}, {high:+.4f}]" in text
    assert "the share of the gap at ratio 10 from 30.0% to 30.0%" in text
