"""A user's mistake on a command line is reported in one message with the value, what was expected and the remedy; exit code 2."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import sys

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from safetensors.torch import save_file

from specheads.commands import data, distill, evaluate, papers, train
from specheads.commands.run_folders import NoteRunKey
from specheads.decoding import responses as generate
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.heads.train_prompts import TrainPrompts
from specheads.prompts import sources as nano_source
from specheads.storage.shards import ShardStore
from specheads.training.distill import memory as memory_plan

COMMANDS = {"train.py": train.main, "distill": distill.main, "evaluate.py": evaluate.main, "data_gen": data.main}
COMMANDS["layer_search"] = papers.layer_search
DISTILL = ["distill"]
GRAPHS = ["evaluate.py", "drafting=graph", "verification=tree_match", "head=null"]
SMALL = ["data.num_train=4", "data.num_dev=2", "data.num_test=2", "data.max_new_tokens=4"]
FILES = {
    "good.jsonl": '{"instruction": "a", "input": ""}\n{"instruction": "b", "input": "c"}\n{"instruction": "d", "input": ""}\n',
    "broken.jsonl": '{"instruction": "a"}\n{"instruction": "b"}\n{"instruction": \n',
    "scalar.jsonl": '{"instruction": "a"}\n5\n',
    "list.jsonl": '{"instruction": ["a", "b"]}\n',
    "changing.jsonl": '{"instruction": "a"}\n{"instruction": 7}\n',
    "blank.jsonl": '{"instruction": null}\n{"instruction": " "}\n',
    "empty.jsonl": "",
    "broken.json": '[{"instruction": "a"},\n {"instruction": }]\n',
    "object.json": '{\n "instruction": "a"\n}\n',
    "cells.csv": "instruction,input\na,b,c\n",
    "prompts.doc": "a\n",
    "latin.txt": b"caf\xe9\n",
    "cut.parquet": b"PAR1 and no more",
    "no.ckpt": b"not a checkpoint",
    "a_file": "",
}


@pytest.fixture(scope="module")
def library():
    return {side: list(nano_source.standard_library(side))[::8] for side in ("dev", "test")}


@pytest.fixture
def folder(tmp_path, monkeypatch, library):
    """The working folder of a command, with files to be wrong about; reading the standard library takes seconds."""
    monkeypatch.setattr(nano_source, "standard_library", lambda side: iter(library[side]))
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "a_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """A function that gives a command line in this process and returns its exit code and what it printed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def give(*words):
        pair = () if any(word.startswith("model=") for word in words) else ("model=nano",)  # the smallest
        monkeypatch.setattr(sys, "argv", [*words, *pair])
        NoteRunKey.key = ""
        capfd.readouterr()
        code = 0
        try:
            COMMANDS[words[0]]()
        except SystemExit as end:
            code = end.code
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None
            for number, handler in handlers.items():
                signal.signal(number, handler)
        printed = capfd.readouterr()
        return code, printed.err + printed.out

    return give


def assert_told(result, message):
    code, printed = result
    assert code == 2, printed
    assert "Traceback" not in printed
    assert printed.count("error: ") == 1
    assert re.search(message, printed[printed.index("error: ") :], re.DOTALL), printed


def from_file(path, *words):
    return ["data_gen", "data=alpaca", f"data.path={path}", *words]


MISTAKES = {
    # configs
    "unknown model": (
        ["train.py", "model=nanoo"],
        "model=nanoo: there is no such choice; did you mean nano.*--config-dir",
    ),
    "unknown data": (["data_gen", "data=nothing"], "nothing.*alpaca"),
    "unknown key": (["train.py", "head.dept=2"], "head.dept=2: there is no such key; did you mean head.depth.*--help=all"),
    "key that no command has": (["train.py", "+unknown=1"], "unknown=1 is not known; expected one of calibration, checkpoint"),
    "key that no evaluation has": (["evaluate.py", "+head_depth=2"], "head_depth=2 is not known; expected one of any_draft"),
    "key that no layer search has": (["layer_search", "+max_skipped=2"], "max_skipped=2 is not known; .*most_skipped"),
    "folder that no command has": (["data_gen", "+paths.dat=x"], "paths.dat=x is not known; expected one of data, outputs, run"),
    "override without a value": (["train.py", "head.depth"], "head.depth"),
    "value of another type": (["train.py", "trainer.max_epochs=many"], "trainer.max_epochs=many"),
    "missing value": (
        ["train.py", "model=mine", "model.target=x"],
        "model.draft has no value, .*model.draft=<value> .specheads train --help=model.draft",
    ),
    "choice in a list": (["evaluate.py", "stopping=[fixedlength]"], "stopping=fixedlength: .*did you mean fixed_length"),
    "folder without a tokenizer": (
        ["train.py", "model=mine", "model.draft=./a_folder", "model.target=./a_folder"],
        "the folder has no tokenizer; save it there",
    ),
    "folder that is not there": (
        ["train.py", "model=mine", "model.draft=./none", "model.target=./none"],
        "Reason: there is no folder none",
    ),
    # prompts
    "data that is not there": (from_file("none.jsonl"), r"data.path='none.jsonl': there is no /.*none.jsonl; give a JSON"),
    "line that is broken": (from_file("broken.jsonl"), r"broken.jsonl', line 3: no JSON \(Expecting value at column 16\)"),
    "line that is no object": (from_file("scalar.jsonl"), "line 2: a number instead of an object; expected one per line"),
    "field that is a list": (
        from_file("list.jsonl"),
        r"line 1: the field 'instruction' is a list; .*name a part of it, such as {instruction\[0\]}",
    ),
    "field that changes its type": (
        from_file("changing.jsonl"),
        "line 2: the field 'instruction' is a number, but a text in line 1",
    ),
    "no text in any row": (from_file("blank.jsonl"), "gives no prompt: none of 2 rows has text in instruction"),
    "empty file": (from_file("empty.jsonl"), "'empty.jsonl' has no rows; give a data set with some"),
    "array that is broken": (from_file("broken.json"), "line 2: no JSON .*expected an array of objects"),
    "object over several lines": (from_file("object.json"), "one JSON value over several lines; expected an array"),
    "cells without a header": (from_file("cells.csv"), "line 2: 3 cells under a header of 2; put quotes"),
    "suffix that is not read": (from_file("./prompts.doc"), r"ends in \.doc, but only .*\.jsonl.*are read; convert it"),
    "text that is not UTF-8": (from_file("latin.txt", "data.template='{text}'"), "line 1: not UTF-8 .*save the file as UTF-8"),
    "parquet that was cut off": (from_file("cut.parquet"), r"cut.parquet' cannot be read .*write it again"),
    "folder that is no data set": (from_file("./a_folder"), "is a folder, but no data set that save_to_disk wrote"),
    "folder named like a file": (from_file("folder.jsonl"), "is a folder, but no data set"),
    "field that is not there": (
        from_file("good.jsonl", "data.template='{question}'"),
        "names the field 'question', but .* has instruction, input",
    ),
    "template with an open brace": (from_file("good.jsonl", "data.template='{instruction'"), "expected '}' before end of string"),
    "template without a name": (from_file("good.jsonl", "data.template='{}'"), "a field has no name; write plain names"),
    "template without a field": (from_file("good.jsonl", "data.template=hello"), "it names no field"),
    "slice that is none": (
        from_file("good.jsonl", "data.split='train[:'"),
        "data.split='train\\[:' must be the name of a split or a slice of one",
    ),
    "slice beyond the end": (from_file("good.jsonl", "data.split='train[9:]'"), "holds no rows of good.jsonl; widen it"),
    "negative number of prompts": (
        from_file("good.jsonl", "data.num_dev=-1"),
        "data.num_dev=-1 must be a non-negative integer",
    ),
    "no prompts": (["data_gen", "data.num_train=0", "data.num_dev=0", "data.num_test=0"], "all 0, so there would be no prompts"),
    "all prompts too long": (["data_gen", "data.max_prompt_tokens=1"], "none of [0-9]+ prompts has between 1 and 1 tokens"),
    "no hub and no cache": (
        from_file("someone/something"),
        "'someone/something' is no local file or folder.*data.path=<file>.*data=nano",
    ),
    # generation
    "no tokens": (["data_gen", "data.max_new_tokens=0"], "data.max_new_tokens=0 must be a positive integer"),
    "half a batch": (["data_gen", "generation.batch_size=0.5"], "generation.batch_size=0.5 must be a positive integer"),
    "batch that no memory holds": (
        ["data_gen", "generation.batch_size=1000000000000"],
        "generation.batch_size=1000000000000 must be at most 65536.*fewer take less memory",
    ),
    "key of generation that is unknown": (
        ["data_gen", "+generation.workers=2"],
        "generation.workers=2 is not known; expected one of batch_size, rows_per_shard",
    ),
    "key of data that is unknown": (
        ["data_gen", "+data.num_trane=2"],
        "data.num_trane=2 is not known; expected one of num_train",
    ),
    "temperature below zero": (["data_gen", "warp.temperature=-1"], "temperature=-1"),
    "temperature in words": (["data_gen", "warp.temperature=hot"], "temperature=hot"),
    "top-p above one": (["data_gen", "warp.top_p=1.5"], "top_p=1.5"),
    "seed below zero": (["data_gen", "seed=-1"], "seed=-1 must be a non-negative integer"),
    "seed in words": (["train.py", "seed=lucky"], "seed=lucky"),
    # models
    "models that are not there": (["train.py", "model.target=/none", "model.tokenizer=null"], "'/none' could not be loaded"),
    "models on a hub out of reach": (
        ["train.py", "model=mine", "model.draft=a/b", "model.target=a/c"],
        "'a/.' could not be loaded.*reachable or cached",
    ),
    "unknown dtype": (["data_gen", "model.dtype=bfloat61"], "dtype='bfloat61'.*use auto, float32"),
    "device that is not there": (["data_gen", "model.device=gpu9"], "device='gpu9'.*use cpu"),
    "format without an instruction": (
        ["data_gen", "model.instruction_format='[INST]'"],
        "instruction_format='\\[INST\\]' does not say where",
    ),
    # heads and training
    "unknown kind of head": (
        ["train.py", "head.predicts=both"],
        "head.predicts=both must be one of 'next_token' or 'input_token'",
    ),
    "fewer rollouts than none": (
        ["data_gen", "generation.rollouts_per_response=-1"],
        "generation.rollouts_per_response=-1 must be a non-negative integer",
    ),
    "one input in place of a list": (["train.py", "head.inputs=hidden"], "head.inputs=hidden must be a list"),
    "evaluate's head": (["train.py", "head=null"], "head=null must be a set of keys.*given to specheads evaluate"),
    "mixing in words": (["train.py", "mixing.response_share=half"], "response_share=half"),
    "unknown key of loaders": (["train.py", "+loader.pin_memory=true"], "loader.pin_memory=true is not known"),
    "rule that does not take trees": (
        ["evaluate.py", "drafting=tree"],
        "token verification does not take what Tree drafts, a tree of chosen tokens; use for example verification=tree_match",
    ),
    "layers to skip left open": (["evaluate.py", "drafting=layer_skip"], "drafting.skipped"),
    "layer that is not there": (
        ["evaluate.py", "drafting=layer_skip", "drafting.skipped=[9]"],
        "names layer 9, but LlamaForCausalLM",
    ),
    "head that does not prune": (
        [
            "evaluate.py",
            "head=null",
            "drafting=tree",
            "drafting.prune=head",
            "verification=tree_match",
            "live_rules=[fixed_length]",
        ],
        "prune=head leaves pruning to a head",
    ),
    "group that is null": (
        ["train.py", "calibration=null", "logger=null"],
        "logger=null: a group of configs cannot be null; write '~logger'",
    ),
    "logger that is not installed": (["train.py", "logger=tensorboard"], "needs its package: pip install tensorboard"),
    "no branches at once": (["evaluate.py", "record.batch_size=0"], "record.batch_size=0 must be a positive integer"),
    "unknown input": (["train.py", "head.inputs=[colour]"], "colour"),
    "negative depth": (["train.py", "head.depth=-1"], "head.depth=-1"),
    "width of nothing": (["train.py", "head.width=0"], "head.width=0"),
    "negative weight": (["train.py", "loss.reject_weight=-1"], "reject_weight=-1"),
    "mixing that leaves nothing": (["train.py", "head.predicts=input_token", "mixing.response_share=1"], "response_share=1"),
    "no dev prompts": (["train.py", "data.num_dev=0"], "data.num_dev=0"),
    "rate of zero": (["train.py", "optimizer.lr=0"], "optimizer.lr=0 must be a finite number above 0"),
    "rate without an end": (["train.py", "optimizer.lr=inf"], "optimizer.lr=inf must be a finite number above 0"),
    "unknown argument of the trainer": (["train.py", "+trainer.epochs=2"], "trainer.epochs=2 is not known.*max_epochs"),
    "checkpoints that never come": (["train.py", "checkpoint.every_steps=0"], "checkpoint.every_steps=0"),
    "checkpoint that is not there": (
        ["train.py", "resume=none.ckpt"],
        "resume=none.ckpt is not a file; it must be true or false, or a checkpoint",
    ),
    "resume that is a number": (["train.py", "resume=5"], "resume=5 must be true or false, or a checkpoint"),
    "resume that is nothing": (["train.py", "resume=null"], "resume=null must be true or false, or a checkpoint"),
    "resume of what has no checkpoints": (["data_gen", "resume=no.ckpt"], r"resume=no.ckpt must be true or false\."),
    "calibration on nothing": (["train.py", "calibration.num_prompts=0"], "calibration.num_prompts=0 must be a positive integer"),
    "calibration by a number": (["train.py", "calibration=5"], "calibration=5 must be a set of keys.*null: not at all"),
    "workers below zero": (["train.py", "loader.num_workers=-1"], "loader.num_workers=-1 must be a non-negative integer"),
    "log that never comes": (["train.py", "trainer.log_every_n_steps=0"], "trainer.log_every_n_steps=0"),
    "several machines": (["train.py", "+trainer.num_nodes=2"], "trainer.num_nodes=2 needs a launcher"),
    "validation by the clock": (
        ["train.py", "trainer.val_check_interval='00:00:01:00'"],
        "trainer.val_check_interval=00:00:01:00",
    ),
    "validation across epochs": (
        ["train.py", "trainer.check_val_every_n_epoch=null"],
        "trainer.check_val_every_n_epoch=null must be a positive integer",
    ),
    "data that is read again": (
        ["train.py", "+trainer.reload_dataloaders_every_n_epochs=1"],
        "reload_dataloaders_every_n_epochs=1",
    ),
    "no weight": (["train.py", "loss.reject_weight=0"], "loss.reject_weight=0 must be a finite number above 0"),
    "checkpoint that is none": (["train.py", "resume=no.ckpt"], "no.ckpt is not a checkpoint that specheads train can resume"),
    # evaluation
    "head folder that is not there": (
        ["evaluate.py", "head=outputs/none"],
        "no head folder 'outputs/none'|'outputs/none' is no local folder",
    ),
    "no head trained yet": (["evaluate.py"], "train one with specheads train"),
    "threshold above one": (["evaluate.py", "thresholds=[1.2]"], r"thresholds=1.2 must be a number from 0 to 1, or auto"),
    "one threshold in place of a list": (["evaluate.py", "thresholds=0.5"], "thresholds=0.5 must be a list"),
    "length of zero": (["evaluate.py", "head=null", "fixed_lengths=[0,2]"], "fixed_lengths=0 must be a positive integer"),
    "length that is a fraction": (
        ["evaluate.py", "head=null", "fixed_lengths=[1.5,2]"],
        "fixed_lengths=1.5 must be a positive integer",
    ),
    "length that is a word": (["evaluate.py", "head=null", "fixed_lengths=[2,a]"], "fixed_lengths=a must be a positive integer"),
    "threshold that is a word": (["evaluate.py", "thresholds=[a]"], "thresholds=a must be a number from 0 to 1, or auto"),
    "head that costs less than nothing": (
        ["evaluate.py", "costs.head_share=-0.1"],
        "costs.head_share=-0.1 must be a finite number of at least 0",
    ),
    "verification that costs a word": (
        ["evaluate.py", "costs.verified_share=x"],
        "costs.verified_share=x must be a finite number of at least 0; it is .*the target's forward pass",
    ),
    "costs that are null": (
        ["evaluate.py", "head=null", "costs=null"],
        "costs=null must be a set of keys",
    ),
    "costs that are a number": (["evaluate.py", "head=null", "costs=5"], "costs=5 must be a set of keys"),
    "cost that is unknown": (
        ["evaluate.py", "head=null", "+costs.foo=1"],
        "costs.foo=1 is not known; expected one of head_share, verified_share",
    ),
    "nothing to decode but the target": (
        [*GRAPHS, "live_rules=[head_threshold]"],
        r"live_rules=\['head_threshold'\] leaves nothing to decode but .*: graph drafts .*live_rules=\[fixed_length\]",
    ),
    "thresholds that need a recording": (
        [*GRAPHS[:-1], "live_rules=[head_threshold]", "thresholds=[auto]"],
        "leaves nothing to decode but the target alone",
    ),
    "one length to tell costs apart": (
        [*GRAPHS, "fixed_lengths=[4]"],
        r"drafts 4 tokens in every round, .*costs .* cannot be told apart: graph drafts .*fixed_lengths=\[4,8\]",
    ),
    "ratio that is a word": (["evaluate.py", "head=null", "ratios=[x]"], "ratios=x must be a finite number"),
    "all prompts": (["evaluate.py", "head=null", "num_prompts=all"], "num_prompts=all must be a positive integer"),
    "half a repeat": (["evaluate.py", "head=null", "repeats=1.5"], "repeats=1.5 must be a positive integer"),
    "responses without tokens": (["evaluate.py", "head=null", "max_new_tokens=0"], "max_new_tokens=0 must be a positive integer"),
    "head that is a number": (["evaluate.py", "head=5"], "head=5 must be text; it is a folder of a head"),
    "ratio of one": (["evaluate.py", "head=null", "ratios=[1]"], "ratios=1 must be a finite number above 1"),
    "no prompts to decode": (["evaluate.py", "head=null", "num_prompts=0"], "num_prompts=0"),
    "no dev prompts to tune on": (["evaluate.py", "head=null", "data.num_dev=0"], "no dev prompts.*data.num_dev"),
    "live that is unknown": (["evaluate.py", "head=null", "live=some"], "live=some must be one of 'winners', 'all' or 'none'"),
    "nothing to predict speeds with": (
        ["evaluate.py", "head=null", "live=none", "ratios=[]"],
        "ratios=.*leaves no costs to predict speeds with",
    ),
    "split that is not reported": (
        ["evaluate.py", "head=null", "split=dev"],
        "split=dev must be one of 'test' or 'final'",
    ),
    "final split of no part": (
        ["evaluate.py", "head=null", "split=final"],
        "data.final_part=None.* ask for none; .*data.final_part=9",
    ),
    "final split of no rows": (
        ["evaluate.py", "head=null", "split=final", "data=alpaca", "data.path=good.jsonl"],
        "data.num_final=0 asks for none; .*data.num_final=500",
    ),
    "part that is none": (
        ["evaluate.py", "head=null", "split=final", "data.final_part=[0,10]"],
        r"data.final_part=\[0, 10\] must be a part of the final split",
    ),
    "test prompts that reach the final ones": (
        ["evaluate.py", "head=null", "data.num_test=400"],
        "data.num_test=400 reaches",
    ),
    "test set that reads no file": (
        ["evaluate.py", "head=null", "test_sets={nano: x.jsonl}"],
        "nano reads no file; leave it out",
    ),
    "test set that is unknown": (
        ["evaluate.py", "head=null", "test_sets={gsm9k: x.jsonl}"],
        "test_sets names 'gsm9k', which is not in conf/data; use some of alpaca",
    ),
    "test sets that name none": (["evaluate.py", "head=null", "test_sets=gsm8k"], "test_sets=gsm8k must be names with files"),
    "test set without a file": (["evaluate.py", "head=null", "test_sets={gsm8k: none.jsonl}"], "none.jsonl"),
    "value that a rule refuses": (
        ["evaluate.py", "head=null", "stopping.max_probability.threshold=[0.5,2]"],
        "stopping.max_probability.threshold=2 must be between 0 and 1",
    ),
    "no acceptance samples": (
        ["evaluate.py", "head=null", "record.num_samples=0"],
        "record.num_samples=0 must be a positive integer",
    ),
    "no fixed lengths to compare with": (
        ["evaluate.py", "head=null", "stopping=[max_probability]"],
        "stopping leaves out fixed_length",
    ),
    "live rule that is unknown": (["evaluate.py", "head=null", "live_rules=[fixed]"], "live_rules names 'fixed'"),
    "no lengths": (
        ["evaluate.py", "head=null", "fixed_lengths=[]"],
        r"stopping.fixed_length.num_tokens=\[\] must name at least one value",
    ),
    "unknown engine": (["evaluate.py", "head=null", "engine=warp"], "engine=warp must be one of auto, eager"),
    "acceptance rate above 1": (
        ["evaluate.py", "head=null", "verification=synthetic", "verification.rate=2"],
        "verification.rate=2",
    ),
    "ahead by a number": (["evaluate.py", "head=null", "drafting.ahead=3"], "drafting.ahead=3"),
    "other rule that is none": (
        ["evaluate.py", "head=null", "compare_verification=[blok]"],
        "compare_verification names 'blok', which is not in conf/verification; use some of .*block",
    ),
    "other rules that are no list": (
        ["evaluate.py", "head=null", "compare_verification=block"],
        "compare_verification=block must be a list",
    ),
    "negative margin": (["evaluate.py", "head=null", "verification=biased", "verification.eps=-1"], "verification.eps=-1"),
    # distillation
    "unknown samples": ([*DISTILL, "samples=own"], "samples=own must be one of 'text', 'target', 'on_policy' or 'mixed'"),
    "mixture of nothing": ([*DISTILL, "samples=mixed", "mixed={target: 0, on_policy: 0}"], "samples=mixed: all shares are 0"),
    "share of mixed samples that is infinite": ([*DISTILL, "mixed.text=inf"], "mixed.text=inf must be a finite number"),
    "unknown kind of response": ([*DISTILL, "+mixed.own=1"], "mixed.own=1 is not known; expected one of text, target, on_policy"),
    "mixture that is a word": ([*DISTILL, "mixed=half"], "mixed=half must be a set of keys"),
    "responses that are never refreshed": ([*DISTILL, "refresh_every=0"], "refresh_every=0 must be a positive integer"),
    "unknown divergence": ([*DISTILL, "loss.divergence=kl"], "loss.divergence=kl must be one of 'forward_kl'"),
    "distillation at temperature 0": ([*DISTILL, "loss.temperature=0"], "loss.temperature=0 must be a finite number above 0"),
    "beta at its limit": ([*DISTILL, "loss.beta=1"], "loss.beta=1 must be a number above 0 and below 1"),
    "unknown initial draft": ([*DISTILL, "init=nothing"], "init=nothing must be one of 'draft', 'layers' or 'fresh'"),
    "fresh draft like the target": ([*DISTILL, "init=fresh"], "init=fresh needs init_config"),
    "layers of a loaded draft": ([*DISTILL, "init_layers=2"], "init_layers=2 is for init=layers, but init=draft"),
    "more layers than there are": (
        [*DISTILL, "init=layers", "init_layers=7"],
        "init_layers=7 must be an integer from 1 to 6, the number of the target's layers",
    ),
    "layer that the target does not have": (
        [*DISTILL, "init=layers", "init_layers=[0,6]"],
        r"init_layers=\[0, 6\] are not layers",
    ),
    "key that the target's config does not have": (
        [*DISTILL, "init=fresh", "init_config={depth: 2}"],
        "init_config.depth is no key of LlamaConfig",
    ),
    "config that is a word": ([*DISTILL, "init=fresh", "init_config=small"], "init_config=small must be a set of keys"),
    "unknown storage of distributions": (
        [*DISTILL, "target_probs.keep=yes"],
        "target_probs.keep=.*'auto', 'cached' or 'recomputed'",
    ),
    "distributions beyond the budget": (
        [*DISTILL, "target_probs.keep=cached", "target_probs.budget=0"],
        "target_probs.budget=0 and",
    ),
    "share of tokens without a reference": (
        [*DISTILL, "loss.token_share=0.5"],
        "loss.token_share=0.5 and reference=null go together",
    ),
    "reference that does not exist": (
        [*DISTILL, "loss.token_share=0.5", "reference=/none"],
        "the model '/none' could not be loaded",
    ),
    "no dev prompts to measure on": (
        [*DISTILL, "validation.num_prompts=0"],
        "validation.num_prompts=0 must be a positive integer",
    ),
    "no prompts to distil on": ([*DISTILL, "data.num_train=0"], "data.num_train=0 must be a positive integer"),
    "gradient checkpointing that is a word": (
        [*DISTILL, "gradient_checkpointing=some"],
        "gradient_checkpointing=some must be true or false",
    ),
    "infinite learning rate of a draft": ([*DISTILL, "optimizer.lr=inf"], "optimizer.lr=inf must be a finite number above 0"),
    "half-precision weights": (
        [*DISTILL, "trainer.precision=bf16-true"],
        "trainer.precision=bf16-true must be one of '32-true'.*half-precision weights lose small steps",
    ),
    "unknown precision": ([*DISTILL, "trainer.precision=fp7"], "trainer.precision=fp7 must be one of '32-true'"),
    "no batches to accumulate": (
        [*DISTILL, "trainer.accumulate_grad_batches=0"],
        "trainer.accumulate_grad_batches=0 must be a positive integer",
    ),
    "draft that writes nothing": ([*DISTILL, "write_batch_size=0"], "write_batch_size=0 must be a positive integer"),
    "validation left out": ([*DISTILL, "validation=null"], "validation=null must be a set of keys"),
    "storage of distributions left out": ([*DISTILL, "target_probs=null"], "target_probs=null must be a set of keys"),
    "loss left out": ([*DISTILL, "loss=null"], "loss=null must be a set of keys"),
    "optimizer left out": ([*DISTILL, "optimizer=null"], "optimizer=null must be a set of keys"),
    "unknown key of the loss": ([*DISTILL, "+loss.gamma=1"], "loss.gamma=1 is not known; expected one of divergence, beta"),
    "unknown key of the optimizer": ([*DISTILL, "+optimizer.momentum=1"], "optimizer.momentum=1 is not known"),
    "sizes of heads that do not fit the width": (
        [*DISTILL, "init=fresh", "init_config={hidden_size: 33}"],
        "init_config=.*'hidden_size': 33.* makes no model",
    ),
    "number of layers that is a word": (
        [*DISTILL, "init=fresh", "init_config={num_hidden_layers: two}"],
        "init_config=.*'two'.* makes no model",
    ),
    "unknown activation function": (
        [*DISTILL, "init=fresh", "init_config={hidden_act: foo}"],
        "init_config=.*'foo'.* makes no model",
    ),
    "number of key-value heads that does not divide": (
        [*DISTILL, "init=fresh", "init_config={num_key_value_heads: 3}"],
        "init_config=.*'num_key_value_heads': 3.* makes no model",
    ),
    "head's learning rate left out": (["train.py", "optimizer.lr=null"], "optimizer.lr=null must be a finite number above 0"),
    "compared with nothing": (["evaluate.py", "head=null", "compare=[a_folder]"], "compare=a_folder holds no report"),
    # places
    "outputs where no folder can be made": (
        ["data_gen", "paths.outputs=/proc/none"],
        "/proc/none.*give other folders .*paths.outputs=",
    ),
    "outputs in a file": (["data_gen", "paths.outputs=a_file"], "a_file.*(part of the path is a file|a file is where)"),
    "data in a file": (
        ["data_gen", "paths.data=a_file"],
        "a_file.*(part of the path is a file|a file is where).*paths.data=",
    ),
    "folder that nobody may write": (
        ["data_gen", "paths.data=/sys/data"],
        "/sys/data.*(permission|cannot be written).*paths.data=",
    ),
}


def cases():
    """All mistakes; of those that every field refuses by its type (tests/properties tries all fields), one of a kind and command.

    The others only in a full run.
    """
    tried = set()
    for name, (words, message) in MISTAKES.items():
        by_type = re.search(r"must be (a|an|one of|true)\b|is not known; expected one of", message)
        kind = by_type and (words[0], by_type[0])
        yield pytest.param(words, message, id=name, marks=[pytest.mark.full] if kind in tried else [])
        tried |= {kind} if kind else set()


@pytest.mark.parametrize(("words", "message"), list(cases()))
def test_a_mistake_gets_one_message_and_exit_code_two(words, message, run, folder):
    before = set(folder.iterdir())
    small = [] if words[0] == "evaluate.py" else SMALL  # a mistake that is not noticed shall not take long
    assert_told(run(words[0], *small, *words[1:]), message)
    assert {path.name for path in set(folder.iterdir()) - before} <= {"data", "outputs"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_failure_is_named_and_finished_shards_stay(number, run, folder, monkeypatch):
    write, calls = ShardStore.write, []

    def refuse_the_second(self, name, rows):
        calls.append(name)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number), str(self.folder / name))
        write(self, name, rows)

    with monkeypatch.context() as patch:
        patch.setattr(ShardStore, "write", refuse_the_second)
        assert_told(
            run("data_gen", *SMALL), rf"{calls[1] if len(calls) > 1 else 'dev-00000.parquet'}.*{os.strerror(number)}.*paths.data="
        )
    (first,) = folder.glob("data/*/*.parquet")
    written = first.stat().st_mtime_ns
    assert run("data_gen", *SMALL)[0] == 0
    assert first.stat().st_mtime_ns == written
    assert len(list(folder.glob("data/*/*.parquet"))) == 2 * 3  # responses, and those with labels


def test_a_file_size_limit_is_reported_and_no_half_written_shard_is_left(run, folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        result = run("data_gen", *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_told(result, "File too large")
    assert not list(folder.glob("data/*/*.parquet"))
    assert run("data_gen", *SMALL)[0] == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_running_out_of_memory_says_what_to_make_smaller(error, run, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(generate.RowsDecoder, "row", fail)
    assert_told(run("data_gen", *SMALL), r"out of memory.*generation\.batch_size=.*data\.max_new_tokens=")


def test_an_error_of_our_own_keeps_its_traceback(run, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(generate.RowsDecoder, "row", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("data_gen", *SMALL)


@pytest.mark.parametrize("damage", ["cut off", "foreign"])
def test_a_shard_that_is_damaged_is_named_and_made_again(damage, run, folder):
    assert run("data_gen", *SMALL)[0] == 0
    (labels,) = (path.parent for path in folder.glob("data/*/manifest.json") if "every draft" not in path.read_text())
    shards = sorted(labels.glob("*.parquet"))
    content = {path: path.read_bytes() for path in shards}
    shards[1].write_bytes(content[shards[0]] if damage == "foreign" else content[shards[1]][:100])
    code, printed = run("data_gen", *SMALL)
    assert code == 0
    assert f"{shards[1].name} in" in printed and "damaged and will be made again" in printed
    assert {path: path.read_bytes() for path in shards} == content


@pytest.fixture
def head(nano, folder):
    """A head for nano that was never trained, but is none that says the same of every token."""
    models = {
        role: {"id": getattr(nano, f"{role}_id"), "revision": getattr(nano, f"{role}_revision")} for role in ("draft", "target")
    }
    head = AcceptanceHead(HeadConfig(hidden_size=nano.draft_lm.hidden_size, predicts="input_token", depth=0, **models))
    return save_head(
        head, folder / "head", torch.randn(32, nano.draft_lm.hidden_size, generator=torch.Generator().manual_seed(0))
    )


HEAD_MISTAKES = {
    "weights that were cut off": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:60]),
        "model.safetensors cannot be read",
    ),
    "weights that are missing": (lambda folder: (folder / "model.safetensors").unlink(), "head has no model.safetensors"),
    "config that is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config that is missing": (lambda folder: (folder / "config.json").unlink(), "has no config.json, so it is no head folder"),
    "another draft's": (lambda folder: edit(folder, "draft"), "the head was trained for draft .* at revision another"),
    "no folder": (shutil.rmtree, "no local folder, and no head of that name|no head folder"),
}


def edit(folder, role):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[role]["revision"] = "another"
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(("damage", "message"), HEAD_MISTAKES.values(), ids=HEAD_MISTAKES)
def test_a_head_that_does_not_load_is_named(damage, message, head, run):
    load_head(head)
    damage(head)
    assert_told(run("evaluate.py", "head=head"), message)


def test_a_test_set_of_nothing_but_train_prompts_is_refused(head, run, folder):
    texts = ["a", "b\nInput: c", "d"]  # of good.jsonl
    TrainPrompts.of(texts).write(head)
    message = (
        r"alpaca cannot be reported on: all 3 of its prompts .*head=head.*give other prompts by test_sets=\{alpaca: <file>\}"
    )
    assert_told(run("evaluate.py", "head=head", *SMALL, "live=none", "test_sets={alpaca: good.jsonl}"), message)


def test_a_file_of_train_prompts_that_holds_something_else_is_named(head, run):
    save_file({"train": torch.zeros(2)}, head / "train_prompts.safetensors")
    assert_told(run("evaluate.py", "head=head"), "train_prompts.safetensors holds train float32 .*export the head again")


def test_a_draft_whose_training_does_not_fit_the_gpu_is_refused_before_anything_is_loaded(run, monkeypatch):
    """The shape of Llama 2 7B on a stand-in for a GPU of 80 GB."""
    monkeypatch.setattr(memory_plan, "usable_memory", lambda device: 0.9 * 79 * 2**30)
    monkeypatch.setattr("specheads.pair.load_model", lambda *args, **keys: pytest.fail("a model was loaded"))
    message = (
        r"training the draft does not fit the GPU: 100\.4 GiB for 6\.74 billion weights .*"
        r"activations of 16 texts of 1,536 tokens in .* with gradient checkpointing .* = 1.*GiB, but 71\.1 GiB can be used"
    )
    assert_told(run(*DISTILL, "model=synthetic-llama2", "data.max_prompt_tokens=1024", "data.max_new_tokens=512"), message)


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        ("torchrun", {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0"}),
        ("srun", {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "0"}),
    ],
)
def test_a_launcher_of_several_processes_is_refused_where_one_does_the_work(launcher, environment, run, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_told(run("evaluate.py"), f"{launcher} has started 4 processes of this command, which is one process; start it once")


def test_processes_that_are_not_spread_evenly_are_refused(run, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert_told(run("train.py"), "torchrun has started 4 processes, of which 3 on this machine; .* --nproc-per-node")
