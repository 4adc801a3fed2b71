"""The three commands, end to end on nano with small sizes, and what they say to a user's
mistakes.
"""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from commands import SMALL, heads
from warm_processes import run

from specheads import SpeculativeDecoder, Warp, generate_baseline, load_head, load_pair, stopping
from specheads.pair.draft_vocabulary import kept_tokens

OFFLINE = ["logger=wandb", "logger.wandb.offline=true"]


def ran(folder, *words):
    """Run a command that succeeds."""
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    return done


def report_of(folder):
    """Return the path of the newest report, and what it holds."""
    paths = folder.glob("outputs/evaluate/*/report.json")
    path = max(paths, key=lambda path: path.stat().st_mtime)
    return path, json.loads(path.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which data was generated and a head trained."""
    folder = tmp_path_factory.mktemp("run")
    ran(folder, "train.py", *SMALL, "heads=lookahead", "trainer.max_epochs=2")
    return folder


def test_train_leaves_a_head_its_logs_and_the_next_command(folder):
    (exported,) = heads(folder)
    trained = load_head(exported).config.train
    assert trained["num_prompts"] == 24
    assert trained["dev_ece"].keys() == trained["dev_log_loss"].keys() == {"raw", "cross_fitted"}
    card = (exported / "README.md").read_text()
    assert f"{trained['dev_ece']['cross_fitted']:.4f} |" in card
    names = {path.name for path in exported.iterdir()}
    assert {"model.safetensors", "golden.safetensors", "README.md", "config.json"} <= names
    run_folder = exported.parents[1]
    header = (run_folder / "csv" / "metrics.csv").read_text().splitlines()[0]
    for metric in ("kl", "auroc", "brier", "ece", "loss"):
        assert f"dev/lookahead-d3-r1/{metric}" in header
    assert not (run_folder / "wandb").exists()  # nobody asked for it
    assert (run_folder / "checkpoints" / "last.ckpt").is_file()
    assert json.loads((run_folder / "test.json").read_text()).keys() == {"lookahead-d3-r1"}
    assert (run_folder / ".hydra" / "config.yaml").is_file()


def times_of_shards(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "data").rglob("*.parquet")}


def test_a_second_command_uses_the_same_data(folder):
    before = times_of_shards(folder)
    done = ran(folder, "data_gen", *SMALL)
    assert before and re.search("^labels +reused from", done.stdout, re.MULTILINE)
    assert times_of_shards(folder) == before


def test_evaluate_replays_rules_and_decodes_the_best(folder):
    # tests/evaluation/test_candidates.py has all rules
    words = ["stopping=[fixed_length,head_threshold,online_head]", "thresholds=[auto,0.5]"]
    words += ["num_prompts=4", "num_live_prompts=2", "max_new_tokens=16", "fixed_lengths=[2,4]"]
    words += ["timing_seconds=1"]
    (dev,) = (folder / "data" / "recordings").iterdir()  # that the head was calibrated on
    rows = [json.dumps({"prompt": f"def add_{i}(a, b):\n"}) for i in range(4)]
    (folder / "more.jsonl").write_text("\n".join(rows))
    more = "test_sets={humaneval: more.jsonl}"
    done = ran(folder, "evaluate.py", *SMALL, *words, *OFFLINE, more)
    report, content = report_of(folder)
    assert list(report.parent.glob("wandb/offline-run-*"))
    assert [(data["name"], data["role"]) for data in content["data_sets"]] == [
        ("nano, dev", "dev"),
        ("nano", "test"),
        ("humaneval", "test"),
    ]
    families = {row["family"] for row in content["data_sets"][1]["rules"]}
    assert families >= {"fixed_length", "head_threshold", "online_head", "ceiling", "oracle"}
    assert "head_threshold auto" in families
    live = content["live"]
    assert [row["family"].split()[0] for row in live][:2] == ["target", "fixed_length"]
    assert len(live) >= 4
    assert all(row["replayed_tokens_per_second"] or row["verification"] for row in live[1:])
    assert len(list((folder / "data" / "recordings").iterdir())) == 3
    assert (dev / "predictions" / "ground_truth").is_dir()
    (exported,) = heads(folder)
    config = load_head(exported).config
    errors = {row["predictor"]: row["ece"] for row in content["data_sets"][0]["reliability"]}
    assert errors[exported.name] == pytest.approx(config.train["dev_ece"]["raw"])
    assert (f"{exported.name}, calibrated" in errors) == (config.calibration is not None)
    answer = content["answer"]
    assert f"Use: {answer['setting']}" in done.stdout
    assert f"report: {report.with_suffix('.html').relative_to(folder)}" in done.stdout
    assert "the best of each family" not in done.stdout  # but with verbose=true
    names = {path.name for path in report.parent.iterdir()}
    assert {"report.html", "report.json", "generations.jsonl", "overheads.jsonl", "wandb"} <= names
    # Three short responses tell little, so the answer is doubted.
    assert content["doubts"]
    assert config.recommended["use"] == answer["setting"]


def test_a_sweep_trains_every_combination(folder):
    before = set(heads(folder))
    choices = ["heads=specdecpp,lookahead", "head.depth=0", "experiment=specdecpp"]
    ran(folder, "train.py", "-m", *choices, "trainer.max_epochs=1", *SMALL, *OFFLINE)
    made = set(heads(folder)) - before
    assert sorted(path.name for path in made) == ["lookahead-d0-r6", "specdecpp-d0-r6"]
    for head in made:
        assert list(head.parents[1].glob("wandb/offline-run-*"))  # a W&B run for each job


def test_a_bank_is_trained_in_one_pass_exported_head_by_head_and_replayed(folder):
    words = ["experiment=specdecpp_grid", "head.depth=[0,2]", "loss.reject_weight=[1,6]"]
    done = ran(folder, "train.py", *SMALL, *words, "trainer.max_epochs=1", "calibration=2")
    bank = Path(re.search(r"^heads: (.*)$", done.stdout, re.MULTILINE)[1])
    names = {f"specdecpp-d{depth}-r{weight}" for depth in (0, 2) for weight in (1, 6)}
    assert {path.name for path in (folder / bank).iterdir()} == names
    losses = [load_head(folder / bank / name).config.train["dev_log_loss"] for name in names]
    # One pass, but each was measured.
    assert all(first != other for first, other in itertools.combinations(losses, 2))
    rules = ["stopping=[fixed_length,draft_product,head_threshold]", "thresholds=[0.3,0.6]"]
    sizes = ["live=none", "num_prompts=4", "num_dev_prompts=4"]
    ran(folder, "evaluate.py", f"head={bank}", *SMALL, *rules, *sizes)
    _, content = report_of(folder)
    assert content["live"] == [] and content["steps"] is None
    rows = content["data_sets"][-1]["rules"]
    assert {row["head"] for row in rows} == names | {None}
    families = {row["family"].split()[0] for row in rows}
    assert families == {"fixed_length", "draft_product", "head_threshold", "ceiling", "oracle"}


def test_a_model_in_a_folder_gets_a_draft_with_a_cut_output_and_a_head_that_decode(nano, tmp_path):
    """From a target alone to a report: what a model that people use goes through."""
    nano.target.save_pretrained(tmp_path / "target")
    nano.tokenizer.save_pretrained(tmp_path / "target")
    words = ["model=mine", "model.dtype=float32", f"model.target={tmp_path}/target", "data=nano"]
    words += SMALL[1:]
    made = ["model.draft=null", "init_layers=1", "draft_vocabulary=100", "embedding=target"]
    epochs = ["trainer.max_epochs=4", "loader.batch_size=4"]
    ran(tmp_path, "specheads", "distill", *words, *made, *epochs)
    (draft,) = tmp_path.glob("outputs/distill/*/draft")
    words.append(f"model.draft={draft}")
    ran(tmp_path, "train.py", *words, "heads=lookahead", "trainer.max_epochs=1", "calibration=null")
    rules = ["stopping=[fixed_length,head_threshold]", "fixed_lengths=[2]", "thresholds=[0.5]"]
    sizes = ["num_prompts=3", "num_dev_prompts=3", "num_live_prompts=1", "max_new_tokens=12"]
    sizes += ["engine=eager", "timing_seconds=1"]
    ran(tmp_path, "evaluate.py", *words, *rules, *sizes)
    _, content = report_of(tmp_path)
    families = {row["family"] for row in content["data_sets"][1]["rules"]}
    assert families >= {"fixed_length", "head_threshold", "ceiling", "oracle"}
    live = [row["family"].split()[0] for row in content["live"]]
    assert live[:3] == ["target", "fixed_length", "head_threshold"]
    pair = load_pair(target=tmp_path / "target", draft=draft, dtype="float32")
    (exported,) = heads(tmp_path)
    rule = stopping.HeadThreshold(load_head(exported), 0.5)
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=Warp(0), engine="eager")
    out = decoder.generate("import os\n", 40)
    plain = generate_baseline(pair, "import os\n", 40, warp=Warp(0), engine="eager")
    assert torch.equal(out.tokens, plain.tokens)
    assert out.stats.num_accepted > 0 and len(kept_tokens(pair.draft)) == 100
    assert 0.1 < json.loads((draft / "distill.json").read_text())["test"]["after"]["overlap"] < 1


@pytest.mark.parametrize(
    "words", [["train.py"], pytest.param(["evaluate.py", "head=null"], marks=pytest.mark.full)]
)
def test_wandb_online_without_a_login_is_a_mistake_too(words, tmp_path):
    nobody = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    nobody["NETRC"] = str(tmp_path / "none")
    done = run(tmp_path, *words, *SMALL, "logger=wandb", **nobody)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = "wandb login.*logger.wandb.offline=true"
    assert re.search(said, done.stderr, re.DOTALL)
    assert not list(tmp_path.glob("data/*"))  # said before an hour of generating data
