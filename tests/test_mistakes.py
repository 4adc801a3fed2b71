"""A user's mistake on a command line is reported in one message with the value, what was expected
and the remedy; exit code 2. One case per kind of message.
"""

import re
import resource
import shlex
import signal
import sys

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from specheads.commands.command import NoteRunKey
from specheads.commands.main import VERB_OF_PARENT, main

SMALL = ["data.num_train=4", "data.num_dev=2", "data.num_test=2", "data.max_new_tokens=4"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a command, with files to be wrong about."""
    rows = ['{"instruction": "a"}', '{"instruction": "b"}', '{"instruction": ']
    (tmp_path / "broken.jsonl").write_text("\n".join([*rows, ""]))
    (tmp_path / "a_file").touch()
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
    paths.dat=x is not known; did you mean data. expected one of data, outputs, run
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
    data.num_trane=2 is not known; did you mean num_train. expected one of num_train
train model=mine model.draft=a/b model.target=a/c
    'a/.' is no local folder, no (target|draft) of that name is cached
train head=null
    head=null must be a set of keys.*given to specheads evaluate
evaluate drafting=tree
    token verification does not take what Tree drafts, a tree of chosen tokens; use for example
train calibration=null logger=null
    a group of configs is left out by '~group'
train resume=none.ckpt
    resume=none.ckpt must be true or false \(true: resume the newest run .*; false: start again\)\.
train head.inputs=[colour]
    colour
evaluate
    train one with specheads train
data runner=vllm model.quantization=int8
    model.quantization=int8 is of this process
evaluate head=null record=null
    record=null must be a set of keys
evaluate head=null drafting=graph verification=tree_match live_rules=[head_threshold]
    live_rules=\['head_threshold'\] leaves nothing to decode but .*: graph drafts
evaluate head=null split=final
    split=final needs final prompts; .*data.final_part=9
evaluate head=null 'test_sets={gsm9k: x.jsonl}'
    test_sets names 'gsm9k', which is not in conf/data; use one of alpaca
evaluate head=null stopping.max_probability.threshold=[0.5,2]
    stopping.max_probability.threshold=2 must be a number from 0 to 1
data paths.outputs=a_file
    a_file.*(Not a directory|File exists).*paths.outputs=
data paths.data=/sys/data
    /sys/data.*(ermi|Read-only).*paths.data=
"""
LINES = MISTAKES.strip().splitlines()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("server.url", "http://me:s3cret@localhost:9"),
        ("server.url", "'http://localhost:9/v1?api_key=s3cret'"),
        ("data.path", "https://me:s3cret@localhost:9/rows.jsonl"),
        ("data.path", "'https://localhost:9/rows.jsonl?token=s3cret'"),
        ("model.target", "https://s3cret@localhost/model"),
        ("vllm.options", "{hf_token: s3cret}"),
        ("server", "{url: http://me:s3cret@localhost:9}"),
    ],
)
def test_a_secret_on_the_command_line_is_neither_kept_nor_shown(key, value, run, folder):
    before = set(folder.iterdir())
    result = run("data", "data=alpaca", *SMALL, f"{key}={value}")
    assert_told(result, rf"{re.escape(key)}\S* holds a password or another secret.*HF_TOKEN")
    assert "s3cret" not in result[1]
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(("line", "message"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_a_mistake_gets_one_message_and_exit_code_two(line, message, run, folder):
    before = set(folder.iterdir())
    verb, *words = shlex.split(line)
    # A mistake that is not noticed shall not take long.
    small = [] if verb == "evaluate" else SMALL
    assert_told(run(verb, *small, *words), message.strip())
    assert {path.name for path in set(folder.iterdir()) - before} <= {"data", "outputs"}


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


def test_a_launcher_of_several_processes_is_refused_where_one_does_the_work(run, monkeypatch):
    processes = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**processes, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert_told(
        run("evaluate"),
        "torchrun has started 4 processes of this command, which is one process; start it once",
    )
