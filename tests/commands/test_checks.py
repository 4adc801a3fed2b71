"""What is checked at the door: in a moment, as nothing large is imported, and before any folder is
made.
"""

import json
import subprocess
import sys

import pytest
from commands import shell
from hydra.core.global_hydra import GlobalHydra

from specheads.commands.checks import check
from specheads.commands.command import configs_of
from specheads.commands.compose import command_config
from specheads.commands.verbs import VERBS
from specheads.errors import UserError

LARGE = ["torch", "transformers", "lightning", "datasets"]
SCRIPT = f"""
import json, sys
from specheads.commands.main import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
imported = [name for name in {LARGE} if name in sys.modules]
print(json.dumps([code, imported]))
"""

# A command line, and below it what its message names: the value, what was expected, the remedy.
MISTAKES = """
trian
    trian; there is no such verb; did you mean train?
train model=nope
    model=nope; did you mean nano?; --config-dir
train modl=nano
    modl=nano; did you mean model?; --help=all lists every key
train trainer.max_epochs=abc
    trainer.max_epochs=abc; must be a positive integer; passes over the train prompts
train +trainer.max_step=3
    trainer.max_step=3; did you mean max_steps; expected one of
train heads=bth
    heads=bth; must be one of 'both', 'lookahead' or 'specdecpp'; the kind of heads
train head.inputs=[colour]
    head.inputs names 'colour'; can read hidden
train warp.temperature=-1
    warp.temperature=-1; must be 0 or a number from; greedy
train model.dtype=int7
    model.dtype=int7; must be a floating-point type; use auto
train model=mine model.draft=./none model.target=./none
    './none'; there is no target folder; correct model.target=
train data=alpaca data.path=none.jsonl data.num_train=2
    none.jsonl; is not there; give a JSON
distill loss.divergence=kl
    loss.divergence=kl; must be one of 'auto'; divergence
data generation.batch_size=0
    generation.batch_size=0; must be a positive integer; fewer take less memory
evaluate head=./no_head
    './no_head'; there is no head folder; head=latest
evaluate live_rules=[nope]
    'nope'; is not in conf/stopping; use one of
runs outptus=x
    'outptus=x'; did you mean outputs?
export
    head=<folder> is missing; report=<folder>
export head=./none format=onnx
    './none'; there is no head folder; specheads train
export format=onx head=a
    format=onx; must be one of 'standalone'; what to write
"""
LINES = MISTAKES.strip().splitlines()


def ran(folder, line):
    """Return the exit code, the large libraries that were imported, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *line.split()],
        cwd=folder,
        env=shell(),
        check=True,
        capture_output=True,
        text=True,
    )
    *_, last = done.stdout.splitlines()
    code, imported = json.loads(last)
    return code, imported, done.stderr + done.stdout


@pytest.mark.parametrize(("line", "parts"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_a_wrong_value_imports_nothing_large_and_leaves_no_folder(tmp_path, line, parts):
    code, imported, printed = ran(tmp_path, line)
    assert (code, imported) == (2, [])
    for part in parts.strip().split("; "):
        assert part in printed, printed
    assert printed.count("error: ") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["train --help", "train --help=model", "export --help", "--help"])
def test_help_imports_nothing_large(tmp_path, line):
    code, imported, printed = ran(tmp_path, line)
    assert (code, imported) == (0, []) and len(printed.splitlines()) > 8


def test_a_wrong_strategy_leaves_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = run("evaluate", "head=null", "stopping.fixed_length.num_tokens=[2,0]")
    assert code == 2 and "stopping.fixed_length.num_tokens=0 must be a positive" in error
    assert not list(tmp_path.iterdir())


def test_the_jobs_of_a_sweep_are_checked_before_the_first_begins(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = run("train", "-m", "model=nano", "trainer.max_epochs=1,many")
    assert code == 2 and "trainer.max_epochs=many must be a positive integer" in error
    assert not list(tmp_path.iterdir())


def test_a_sweep_has_a_config_for_each_combination():
    words = ["-m", "model=nano", "heads=lookahead,specdecpp", "head.depth=1,2"]
    found = [(cfg.heads, cfg.head.depth) for cfg in configs_of("train", words)]
    kinds = ("lookahead", "specdecpp")
    assert found == [(kind, depth) for kind in kinds for depth in (1, 2)]
    assert list(configs_of("train", ["--cfg", "job"])) == []  # Hydra prints it
    assert not GlobalHydra.instance().is_initialized()


def checked(verb, *words):
    check(VERBS[verb], command_config(VERBS[verb].config, ["model=nano", "paths.run=run", *words]))


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_a_training_needs_prompts_of_every_split(split):
    with pytest.raises(UserError, match=f"data.num_{split}=0 must be a .* of every split"):
        checked("train", f"data.num_{split}=0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loader.batch_size=6", "trainer.devices=4"], "cannot be split over 4 processes"),
        (["model.quantization=int8", "runner=vllm"], "model.quantization=int8 is of this process"),
        (["model.quantization=int3"], "model.quantization=int3 is not known; .*expected int8"),
    ],
)
def test_settings_that_contradict_each_other_are_told(words, message):
    checked("train", "loader.batch_size=6")
    with pytest.raises(UserError, match=message):
        checked("train", *words)
