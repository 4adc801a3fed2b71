"""A user's mistake on a command line is reported in one message with the value, what was expected
and the remedy; exit code 2. One case per kind of message.
"""

import errno
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from safetensors.torch import save_file

from specheads import Distillation, Evaluation, HeadTraining, UserError
from specheads.commands.command import NoteRunKey
from specheads.commands.main import VERB_OF_PARENT, main
from specheads.data_gen.settings import DataGeneration
from specheads.decoding import responses as generate
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.heads.train_prompts import TrainPrompts
from specheads.prompts import sources as nano_source
from specheads.storage.shards import ShardStore
from specheads.training.distill import memory as memory_plan

SMALL = ["data.num_train=4", "data.num_dev=2", "data.num_test=2", "data.max_new_tokens=4"]
GOOD = """{"instruction": "a", "input": ""}
{"instruction": "b", "input": "c"}
{"instruction": "d", "input": ""}
"""
FILES = {
    "good.jsonl": GOOD,
    "broken.jsonl": '{"instruction": "a"}\n{"instruction": "b"}\n{"instruction": \n',
    "a_file": "",
}


@pytest.fixture(scope="module")
def library():
    return {side: list(nano_source.standard_library(side))[::8] for side in ("dev", "test")}


@pytest.fixture
def folder(tmp_path, monkeypatch, library):
    """The working folder of a command, with files to be wrong about.

    Reading the standard library takes seconds.
    """
    monkeypatch.setattr(nano_source, "standard_library", lambda side: iter(library[side]))
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECHEADS_ENGINE", "eager")  # compiling takes longer than all else here
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """A function that runs a command line in this process and returns its exit code and what it
    printed.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv(VERB_OF_PARENT, "")

    def give(*words):
        if not any(word.startswith("model=") for word in words):
            words = (*words, "model=nano")  # the smallest
        monkeypatch.setattr(sys, "argv", ["specheads", *words])
        NoteRunKey.key = ""
        capfd.readouterr()
        code = 0
        try:
            main()
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


# A command line, and below it a pattern of its message.
MISTAKES = r"""
train model=nanoo
    model=nanoo: there is no such choice; did you mean nano.*--config-dir
train head.dept=2
    head.dept=2: there is no such key; did you mean head.depth.*--help=all
train +unknown=1
    unknown=1 is not known; expected one of calibration, checkpoint
data +paths.dat=x
    paths.dat=x is not known; expected one of data, outputs, run
train model=mine model.target=x
    model.draft has no value, .*model.draft=<value> .specheads train --help=model.draft
evaluate stopping=[fixedlength]
    stopping=fixedlength: .*did you mean fixed_length
train model=mine model.draft=./a_folder model.target=./a_folder
    the folder has no tokenizer; save it there
train model=mine model.draft=./adapter model.target=./adapter
    it is a PEFT adapter; merge it into its model
data data=alpaca data.path=broken.jsonl
    broken.jsonl', line 3: no JSON \(Expecting value at column 16\)
data data.max_prompt_tokens=1
    none of [0-9]+ prompts has between 1 and 1 tokens
data +data.num_trane=2
    data.num_trane=2 is not known; expected one of num_train
train model=mine model.draft=a/b model.target=a/c
    'a/.' is no local folder, no (target|draft) of that name is cached
train head=null
    head=null must be a set of keys.*given to specheads evaluate
evaluate drafting=tree
    token verification does not take what Tree drafts, a tree of chosen tokens; use for example
train calibration=null logger=null
    logger=null: a group of configs cannot be null; write '~logger'
train resume=none.ckpt
    resume=none.ckpt must be true or false\.
train head.inputs=[colour]
    colour
evaluate
    train one with specheads train
evaluate head=null record=null
    record=null must be a set of keys
evaluate head=null drafting=graph verification=tree_match live_rules=[head_threshold]
    live_rules=\['head_threshold'\] leaves nothing to decode but .*: graph drafts
evaluate head=null split=final
    data.final_part=None.* ask for none; .*data.final_part=9
evaluate head=null 'test_sets={gsm9k: x.jsonl}'
    test_sets names 'gsm9k', which is not in conf/data; use one of alpaca
evaluate head=null stopping.max_probability.threshold=[0.5,2]
    stopping.max_probability.threshold=2 must be a number from 0 to 1
data paths.outputs=a_file
    a_file.*(part of the path is a file|a file is where)
data paths.data=/sys/data
    /sys/data.*(permission|cannot be written).*paths.data=
"""
LINES = MISTAKES.strip().splitlines()


@pytest.mark.parametrize(("line", "message"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_a_mistake_gets_one_message_and_exit_code_two(line, message, run, folder):
    before = set(folder.iterdir())
    verb, *words = shlex.split(line)
    # A mistake that is not noticed shall not take long.
    small = [] if verb == "evaluate" else SMALL
    assert_told(run(verb, *small, *words), message.strip())
    assert {path.name for path in set(folder.iterdir()) - before} <= {"data", "outputs"}


SETTINGS = [
    (HeadTraining, {"heads": "all"}, "heads=all must be one of 'both', 'lookahead' or"),
    (HeadTraining, {"head": {"inputs": "hidden"}}, "head.inputs=hidden must be a list"),
    (HeadTraining, {"trainer": {"epochs": 2}}, "trainer.epochs=2 is not known.*max_epochs"),
    (HeadTraining, {"calibration": "some"}, "calibration=some must be a positive integer.*null:"),
    (HeadTraining, {"mixing": None}, "mixing=null must be a set of keys"),
    (DataGeneration, {"batch_size": 10**12}, "generation.batch_size=10+ must be at most 65536"),
    (DataGeneration, {"warp": {"temperature": -1}}, "temperature=-1"),
    (Evaluation, {"thresholds": [1.2]}, "thresholds=1.2 must be a number from 0 to 1, or auto"),
    (Evaluation, {"fixed_lengths": [1.5, 2]}, "fixed_lengths=1.5 must be a positive integer"),
    (Evaluation, {"record": {"foo": 1}}, "record.foo=1 is not known; expected one of num_samples"),
    (Evaluation, {"head": 5}, "head=5 must be text; it is a folder of a head"),
    (Evaluation, {"ratios": [1]}, "ratios=1 must be a finite number above 1"),
    (Evaluation, {"live": "none", "ratios": []}, "ratios=.*leaves no costs to predict speeds"),
    (Evaluation, {"engine": "warp"}, "engine=warp must be one of auto, eager"),
    (Distillation, {"trainer": {"precision": "bf16-true"}}, "precision=bf16-true must be one of"),
]


@pytest.mark.parametrize(("cls", "values", "message"), SETTINGS)
def test_a_mistake_in_settings_has_the_words_of_the_command_line(cls, values, message):
    """What every field refuses by its type is in tests/properties/test_settings.py."""
    with pytest.raises(UserError) as told:
        cls(**values)
    assert re.search(message, str(told.value), re.DOTALL)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_failure_is_named_and_finished_shards_stay(number, run, folder, monkeypatch):
    write = ShardStore.write
    calls = []

    def refuse_the_second(self, name, rows):
        calls.append(name)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number), str(self.folder / name))
        write(self, name, rows)

    with monkeypatch.context() as patch:
        patch.setattr(ShardStore, "write", refuse_the_second)
        result = run("data", *SMALL)
    assert_told(result, rf"{calls[1]}.*{os.strerror(number)}.*paths.data=")
    (first,) = folder.glob("data/*/*.parquet")
    written = first.stat().st_mtime_ns
    assert run("data", *SMALL)[0] == 0
    assert first.stat().st_mtime_ns == written
    assert len(list(folder.glob("data/*/*.parquet"))) == 2 * 3  # responses, and those with labels


def test_a_file_size_limit_is_reported_and_no_half_written_shard_is_left(run, folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        result = run("data", *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_told(result, "File too large")
    assert not list(folder.glob("data/*/*.parquet"))
    assert run("data", *SMALL)[0] == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
            " bytes"
        ),
    ],
)
def test_running_out_of_memory_says_what_to_make_smaller(error, run, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(generate.BatchDecoder, "request", fail)
    assert_told(
        run("data", *SMALL), r"out of memory.*generation\.batch_size=.*data\.max_new_tokens="
    )


@pytest.fixture
def head(nano, folder):
    """A head for nano that was never trained, but is none that says the same of every token."""
    models = {
        role: {"id": getattr(nano, f"{role}_id"), "revision": getattr(nano, f"{role}_revision")}
        for role in ("draft", "target")
    }
    head = AcceptanceHead(
        HeadConfig(hidden_size=nano.draft_lm.hidden_size, predicts="input_token", depth=0, **models)
    )
    return save_head(
        head,
        folder / "head",
        torch.randn(32, nano.draft_lm.hidden_size, generator=torch.Generator().manual_seed(0)),
    )


HEAD_MISTAKES = {
    "weights that were cut off": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:60]
        ),
        "model.safetensors cannot be read",
    ),
    "weights that are missing": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "head has no model.safetensors",
    ),
    "config that is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json is not valid JSON",
    ),
    "config that is missing": (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json, so it is no head folder",
    ),
    "another draft's": (
        lambda folder: edit(folder, "draft"),
        "the head was trained for draft .* at revision another",
    ),
    "no folder": (shutil.rmtree, "no local folder, no head of that name|no head folder"),
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
    assert_told(run("evaluate", "head=head"), message)


def test_a_test_set_of_nothing_but_train_prompts_is_refused(head, run, folder):
    texts = ["a", "b\nInput: c", "d"]  # of good.jsonl
    TrainPrompts.of(texts).write(head)
    message = (
        r"alpaca cannot be reported on: all 3 of its prompts .*head=head.*give other prompts by"
        r" test_sets=\{alpaca: <file>\}"
    )
    assert_told(
        run("evaluate", "head=head", *SMALL, "live=none", "test_sets={alpaca: good.jsonl}"),
        message,
    )


def test_a_file_of_train_prompts_that_holds_something_else_is_named(head, run):
    save_file({"train": torch.zeros(2)}, head / "train_prompts.safetensors")
    assert_told(
        run("evaluate", "head=head"),
        "train_prompts.safetensors holds train float32 .*export the head again",
    )


def test_a_draft_whose_training_does_not_fit_the_gpu_is_refused_before_anything_is_loaded(
    run, monkeypatch
):
    """The shape of Llama 2 7B on a stand-in for a GPU of 80 GB."""
    monkeypatch.setattr(memory_plan, "checked_device", lambda device: "cuda")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (79 * 2**30, 0))
    monkeypatch.setattr(
        "specheads.pair.pair.load_model", lambda *args, **keys: pytest.fail("a model was loaded")
    )
    message = (
        r"training the draft does not fit the GPU: at least 1\d\d\.\d GiB, of which \d+\.\d for its"
        r" weights with gradients and "
        r"the optimizer's state .* but 79\.0 GiB are free"
    )
    assert_told(
        run(
            "distill",
            "model=synthetic-llama2",
            "data.max_prompt_tokens=1024",
            "data.max_new_tokens=512",
        ),
        message,
    )


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        (
            "torchrun",
            {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0"},
        ),
        (
            "srun",
            {
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_NTASKS_PER_NODE": "4",
                "SLURM_PROCID": "0",
            },
        ),
    ],
)
def test_a_launcher_of_several_processes_is_refused_where_one_does_the_work(
    launcher, environment, run, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_told(
        run("evaluate"),
        f"{launcher} has started 4 processes of this command, which is one process; start it once",
    )
