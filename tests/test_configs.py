"""Every config composes, and so does every command line that the README or a config shows."""

import inspect
import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_object
from omegaconf import OmegaConf

from specheads.commands.checks import check_keys
from specheads.commands.compose import (
    command_config,
    model_config,
    names_of,
    plain,
    settings_of,
    source_of,
)
from specheads.commands.verbs import PROGRAMS, verb_of
from specheads.data_gen.settings import DataGeneration
from specheads.pair.config import config_folder
from specheads.prompts.sources import prompt_source
from specheads.settings import fields_of
from specheads.training.heads.settings import HeadTraining
from tests.kills import TRIALS

ROOT = Path(__file__).parents[1]
SHOWN_IN = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *config_folder().rglob("*.yaml"),
    *ROOT.glob("*.py"),
    *(ROOT / "data_gen").glob("*.py"),
    *(ROOT / "specheads" / "evaluation").glob("*.py"),
    *filter(Path.is_file, (ROOT / "examples" / "cluster").iterdir()),
]
# keys with quotes around them or within; <...> and ... stand for what the reader fills in
COMMAND = re.compile(
    r"(?:python"
    rf" )?({'|'.join(re.escape(program.removeprefix('python ')) for program in PROGRAMS.values())})"
    r"((?: +(?:-m\b|'[^'`]*'|[\w.+]+=[^\s`)]+))*)"
)


def shown_commands():
    lines = {
        match.groups()
        for path in SHOWN_IN
        for match in COMMAND.finditer(path.read_text())
        if "={" not in match[0]
    }
    names = {script.removeprefix("python "): name for name, script in PROGRAMS.items()}
    return sorted((names[command], overrides.strip()) for command, overrides in lines)


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_commands_that_are_killed_have_keys_that_exist(trial):
    verb, *overrides = trial.words
    assert command_config({"data": "data_gen"}.get(verb, verb), overrides).model.name == "nano"


def test_commands_are_shown():
    assert {command for command, _ in shown_commands()} == set(PROGRAMS)


@pytest.mark.parametrize(("command", "overrides"), shown_commands())
def test_shown_command_lines_compose(command, overrides):
    words = [
        re.sub(r"(<.*?(?=\]?$)|\.\.\.)", "folder", word)
        for word in shlex.split(overrides)
        if word not in ("-m", "")
    ]
    # The first value of each swept key.
    words = [re.sub(r"=(?![\[\x22])([^,]+),.*", r"=\1", word) for word in words]
    command_config(command, words)


MODELS = sorted(path.stem for path in (config_folder() / "model").glob("*.yaml"))


def models_of_commands():
    """Every model with one command, and every command with two models; all others in a full run."""
    for command, model in itertools.product(PROGRAMS, MODELS):
        marks = [] if command == "train" or model in ("nano", "llama2-7b") else [pytest.mark.full]
        yield pytest.param(command, model, marks=marks)


@pytest.mark.parametrize(("command", "model"), list(models_of_commands()))
def test_every_model_composes_with_every_command(command, model):
    named = ["model.draft=a", "model.target=b"] if model == "mine" else []
    cfg = command_config(command, [f"model={model}", *named])
    assert cfg.model.name == model and model_config(cfg).target
    source = prompt_source(plain(cfg.data))
    assert (type(source).__name__ == "NanoSource") == (model in ("nano", "mini"))


DATA = sorted((config_folder() / "data").glob("*.yaml"))


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_every_prompt_set_passes_its_own_check(path):
    source_of(command_config("data_gen", [f"data={path.stem}"]))


@pytest.mark.parametrize(("name", "cls"), [("train", HeadTraining), ("data_gen", DataGeneration)])
def test_defaults_of_a_class_are_those_of_the_configs(name, cls):
    cfg = command_config(name, ["data=alpaca"])
    assert settings_of(cls, cfg) == cls()
    keys = fields_of(cls).keys()
    for group in {key.rpartition(".")[0] for key in keys} - {"", "data"}:
        assert {f"{group}.{name}" for name in plain(OmegaConf.select(cfg, group)) or {}} <= keys


def test_nested_objects_of_the_trainer_are_instantiated():
    def settings(key, cls):
        place = f"+trainer.{key}={{_target_: lightning.pytorch.{cls}}}"
        return settings_of(HeadTraining, command_config("train", [place]))

    strategy = "strategies.SingleDeviceStrategy, device: cpu"
    made = [settings("strategy", strategy) for _ in range(2)]
    assert type(made[0].trainer.values()["strategy"]).__name__ == "SingleDeviceStrategy"
    # It says where a run trains.
    assert made[0].cache_key() == made[1].cache_key() == HeadTraining().cache_key()
    keys = [settings("profiler", "profilers.PassThroughProfiler").cache_key() for _ in range(2)]
    assert keys[0] == keys[1] != HeadTraining().cache_key()


def test_a_template_on_the_command_line_replaces_the_list_of_templates():
    source = source_of(command_config("data_gen", ["data=alpaca", 'data.template="{question}"']))
    assert source.template == "{question}"
    source = source_of(
        command_config("data_gen", ["data=alpaca", "data.template=['{a} {b}','{a}']"])
    )
    assert list(source.template) == ["{a} {b}", "{a}"]


def test_the_papers_recipe_is_the_papers():
    cfg = command_config("train", ["experiment=specdecpp", "model=llama2-7b"])
    assert (cfg.heads, cfg.head.depth, cfg.loss.reject_weight) == ("specdecpp", 3, 6)
    assert (cfg.trainer.max_epochs, cfg.loader.batch_size) == (3, 32)
    assert (cfg.optimizer.lr, cfg.optimizer.warmup_share) == (5e-5, 0.03)
    assert (cfg.warp.temperature, cfg.warp.top_k) == (1, 50)
    assert (cfg.data.max_new_tokens, cfg.mixing.response_share) == (512, 0.15)
    assert (cfg.data.num_train, cfg.data.num_dev, cfg.data.num_test) == (40000, 10000, 2000)
    evaluation = command_config("evaluate")
    assert {2, 4, 6, 8, 10, 12, 14} <= set(evaluation.fixed_lengths)
    assert list(evaluation.thresholds) == ["auto", *(t / 10 for t in range(1, 10))]


def argument_names(target):
    """The names that a class or a function of a `_target_` takes; None if it takes any."""
    parameters = inspect.signature(get_object(target)).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters}


def nodes_with_a_target(content):
    if isinstance(content, dict):
        if "_target_" in content:
            yield content
        for value in content.values():
            yield from nodes_with_a_target(value)


WITH_TARGETS = [
    path
    for path in sorted(config_folder().rglob("*/*.yaml"))
    if "_target_" in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", WITH_TARGETS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_key_of_an_object_is_its_argument(path):
    for node in nodes_with_a_target(yaml.safe_load(path.read_text())):
        known = argument_names(node["_target_"])
        assert known is None or node.keys() - {"_target_"} <= known


@pytest.mark.parametrize("experiment", names_of("experiment"))
def test_every_recipe_composes_and_all_its_keys_are_read(experiment):
    cfg = command_config("train", [f"experiment={experiment}", "paths.run=run"])
    check_keys(cfg, verb_of("train").settings())


@pytest.mark.parametrize("command", PROGRAMS)
def test_every_key_of_a_command_is_read(command):
    check_keys(command_config(command, ["paths.run=run"]), verb_of(command).settings())
