"""`specheads papers <name>`: experiments of papers repeated, and their theory computed.

No other module imports `specheads.papers`: conf/drafting and conf/verification name its methods, as
they name a user's own.
"""

import inspect
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape

import specheads
from specheads.commands.command import command
from specheads.commands.compose import keys_of_choice, load_configured_pair, plain, settings_of
from specheads.commands.evaluate import prompt_data, rule_choice
from specheads.commands.main import arguments
from specheads.commands.runs import print_table
from specheads.data_gen.settings import DataGeneration
from specheads.decoding.drafting import Autoregressive, check_pairing
from specheads.errors import UserError
from specheads.evaluation.candidates import RuleChoice, check_rules
from specheads.evaluation.prompt_sets import PromptSets
from specheads.evaluation.settings import Evaluation
from specheads.heads.head import LocatedHead, find_heads
from specheads.papers.claims import (
    CheckedClaim,
    Measured,
    ReportSection,
    checked,
    is_measured,
    measured,
)
from specheads.papers.reproduction.decoding import decode, replayed
from specheads.papers.reproduction.settings import METRICS, Method, Reproduction
from specheads.papers.theory import rejections, rounds, stopping
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.intervals import Interval
from specheads.storage.files import write_json

GROUPS = ("drafting", "stopping", "verification")
METRICS_PER_TABLE = 4
# Of the simulations and the linear programmes of the theory.
NUM_TEXTS = 20_000  # each has 50 tokens: a million
NUM_DRAFTS = 20_000
NUM_PROGRAMMES = 5  # models of each size whose linear programmes are solved


@command("reproduce", DataGeneration, Reproduction)
def reproduce(cfg: DictConfig) -> None:
    """Repeat the experiment of a composed config.

    Print the result and write `reproduction.json` into its folder.

    Raises:
        UserError: settings that do not fit, or not one head for the methods that need one.
    """
    settings = settings_of(Reproduction, cfg, methods=methods_of(plain(cfg.methods)))
    data = prompt_data(cfg)
    needing = [method.name for method in settings.methods if method.needs_head]
    heads = dict[str, LocatedHead]()
    if needing and settings.head is None:
        raise UserError(
            f"head=null, but {needing[0]} decodes with a head; train it with 'specheads train"
            f" model={cfg.model.name} experiment=specdecpp', and give head=latest or its folder."
        )
    data.check(settings.split)
    pair = load_configured_pair(cfg)
    run = Path(cfg.paths.run)
    if needing:
        heads = find_heads(settings.head, pair, Path(cfg.paths.outputs), settings.warp)
        wanted = [method.head for method in settings.methods if method.needs_head]
        if len(heads) > 1 and None in wanted:
            raise UserError(
                f"head={settings.head} has {len(heads)} heads; give the folder of one, such as"
                f" {next(iter(heads))}."
            )
        if missing := [name for name in wanted if name not in {None, *heads}]:
            raise UserError(
                f"head={settings.head} lacks the head {missing[0]}; it has {', '.join(heads)}."
            )
    sets = PromptSets(
        data, pair, heads, Evaluation(split="final" if settings.split == "final" else "test")
    )
    prompts = (sets.dev if settings.split == "dev" else sets.reported).first(settings.num_prompts)
    folder = Path(cfg.paths.data) if settings.replay else run
    tallies = (replayed if settings.replay else decode)(
        pair, settings, prompts.prompts, folder, heads
    )
    methods = measured(tallies, settings.metrics, prompts.groups)
    measurable = [
        claim
        for claim in settings.claims
        if claim.metric in settings.metrics and is_measured(claim, tallies)
    ]
    claims = [checked(claim, tallies, prompts.groups) for claim in measurable]
    print_result(methods, claims)
    outcomes = Counter(claim.outcome for claim in claims)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "none"
    print(f"{len(prompts.prompts)} prompts decoded by {len(tallies)} methods; claims: {counts}")
    result = {
        "experiment": Path(cfg.command).name,
        "command": command_line(),
        **(
            {"heads": {name: head_fingerprint(located.head) for name, located in heads.items()}}
            if heads
            else {}
        ),
        "model": {
            "name": pair.name,
            "target": [pair.target_id, pair.target_revision],
            "draft": [pair.draft_id, pair.draft_revision],
        },
        "prompts": {"name": prompts.name, "split": settings.split, **prompts.provenance()},
        "warp": settings.warp.values(),
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "ratio": settings.ratio,
        "settings": [dict(method.keys) for method in settings.methods],
        "versions": {"specheads": specheads.__version__},
        "methods": {
            name: {metric: asdict(value) for metric, value in row.items()}
            for name, row in methods.items()
        },
        "claims": [asdict(claim) for claim in claims],
        "not_run": [
            {"claims": each.claims, "says": each.says}
            for each in settings.claims
            if each not in measurable
        ],
    }
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "reproduction.json", result)
    print(run / "reproduction.json")


def print_result(methods: Measured, claims: Sequence[CheckedClaim]) -> None:
    """Print tables of the methods, a few metrics each, and the table of the claims."""

    def half_width(estimate: Interval | None) -> str:
        if estimate is None:
            return ""
        half = (estimate.high - estimate.low) / 2
        digits = 0 if estimate.value >= 100 else 1 if estimate.value >= 10 else 3
        return f"{estimate.value:.{digits}f} ±{half:.{digits}f}"

    used = [
        name for name in METRICS if any(name in row and row[name].high for row in methods.values())
    ]
    for start in range(0, len(used), METRICS_PER_TABLE):
        metrics = used[start : start + METRICS_PER_TABLE]
        rows = [
            [name, *(half_width(row.get(metric)) for metric in metrics)]
            for name, row in methods.items()
        ]
        titles = [METRICS[metric].title for metric in metrics]
        print_table(
            ["method", *titles], rows, caption="± half of the 95 % interval over groups of prompts"
        )
    ratios = ["" if claim.ratio is None else f"{claim.ratio:.2f}" for claim in claims]
    rows = [
        [each.says, each.ours, each.published or "", ratio, each.outcome]
        for each, ratio in zip(claims, ratios, strict=True)
    ]
    if rows:
        print_table(
            ["claim", "ours [95 %]", "paper", "ratio", "outcome"],
            rows,
            numbers=False,
            show_lines=True,
        )


def command_line() -> str:
    """Return this command without the keys that say where files are."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    kept = [
        override for override in given if not override.lstrip("+").startswith(("paths.", "resume="))
    ]
    return shlex.join(["specheads", "papers", "reproduce", *kept])


def methods_of(entries: Any) -> tuple[Method, ...]:
    """Return the methods of a config's list.

    Raises:
        UserError: a name that is not in conf/, a key that its file does not have, values that do
            not fit each other.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UserError(
            f"methods={entries} must be a list of methods; write each as {{name: ..., drafting:"
            " ..., stopping: ...}."
        )
    return tuple(_method(each) for entry in entries for each in _each_value(entry))


def _each_value(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a method for each combination of its listed heads and values of its stopping rule,
    which its name has in braces.
    """
    given = entry.get("stopping")
    stopping = given if isinstance(given, Mapping) else {}
    listed = {
        key: value
        for key, value in {"head": entry.get("head"), **stopping}.items()
        if isinstance(value, list)
    }
    for values in product(*listed.values()):
        chosen = dict(zip(listed, values, strict=True))
        changes = (
            {"name": entry["name"].format(**chosen), "stopping": {**stopping, **chosen}}
            if chosen
            else {}
        )
        if "head" in chosen:
            changes |= {"head": changes["stopping"].pop("head")}
        yield {**entry, **changes}


def _method(entry: Mapping[str, Any]) -> Method:
    where = f"methods: {entry.get('name')}"
    chosen = {
        group: _chosen(where, group, entry[group])
        for group in GROUPS
        if entry.get(group) is not None
    }
    if entry.get("baseline") and chosen:
        raise UserError(
            f"{where}: a baseline drafts nothing; leave out {', '.join(chosen)}, or baseline."
        )
    built = {
        group: instantiate(arguments) for group, arguments in chosen.items() if group != "stopping"
    }
    if rule := chosen.get("stopping"):
        built["stopping"] = _rule(where, rule)
    if "verification" in built:
        check_pairing(built.get("drafting", Autoregressive()), built["verification"])
    values = {key: value for key, value in entry.items() if key not in GROUPS}
    return Method(**(values | built), keys=values | chosen)


def _chosen(where: str, group: str, given: Any) -> dict[str, Any]:
    """Return the keys of a file of a config group with those that a method gives in their place."""
    overrides = {} if isinstance(given, str) else dict(given)
    name = overrides.pop("name", None) if overrides else given
    content = keys_of_choice(f"{where}: {group}", group, name, overrides)
    for key, value in content.items():
        several = group == "stopping" and isinstance(value, list)
        if several or (isinstance(value, str) and value.startswith(("${", "???"))):
            raise UserError(
                f"{where}: {group}={name} leaves {key} open; give a value: {{name: {name}, {key}:"
                " ...}."
            )
    return content


def _rule(where: str, content: Mapping[str, Any]) -> RuleChoice:
    """Return a stopping rule; raises UserError for values that it refuses."""
    choice = rule_choice(content)
    if choice.cls.open_parameters(choice.arguments):
        name = content["_target_"].rpartition(".")[2]
        raise UserError(f"{where}: {name} has to be fitted; use a rule whose values are given.")
    try:
        check_rules({"": choice})
    except UserError as error:
        raise UserError(f"{where}: {str(error).replace('stopping..', 'stopping.')}") from None
    return choice


def theory(out: str = "outputs/theory", seed: str = "0") -> str:
    """Compute every section, print it and write `theory.json`.

    Return how many claims held, and where the file is.

    Each section has the same seed, so that a change to one leaves the others as they are. Raises
    UserError for a seed that is no integer.
    """
    if not seed.removeprefix("-").isdigit():
        raise UserError(f"seed={seed} must be an integer.")

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(int(seed))

    sections = [
        rejections.simulation(generator(), NUM_TEXTS),
        rejections.batch_improvement(),
        rejections.unbiased(generator()),
        rejections.lower_bound(generator()),
        rejections.pareto_front(generator()),
        rounds.worked_example(),
        rounds.verification_rules(generator(), num_programmes=NUM_PROGRAMMES),
        rounds.joint_choice(generator()),
        stopping.thresholds(generator(), NUM_DRAFTS),
        stopping.greedy_oracle(),
    ]
    path = Path(out) / "theory.json"
    for section in sections:
        _print_section(section)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "command": f"specheads papers theory seed={seed}",
            "sections": [asdict(section) for section in sections],
        },
    )
    counts = Counter(claim.outcome for section in sections for claim in section.claims)
    return f"claims: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}\n{path}"


def _print_section(section: ReportSection) -> None:
    rows = [
        [
            (
                each
                if isinstance(each, str)
                else f"{each:,}"
                if isinstance(each, int)
                else f"{each:.4f}"
            )
            for each in row
        ]
        for row in section.rows
    ]
    print_table(
        section.columns,
        rows,
        title=section.title,
        caption=section.source,
        title_justify="left",
        caption_justify="left",
    )
    lines = [
        f"[bold]{each.outcome}[/bold]: {escape(f'{each.says} Here: {each.ours}. {each.why}')}"
        for each in section.claims
    ]
    Console(highlight=False).print(
        *lines, *([escape(section.note)] if section.note else []), sep="\n"
    )


def print_theory() -> None:
    """Compute the theory with the arguments of this process's command line.

    Raises UserError for one that is not known.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(
            "usage: specheads papers theory [out=<folder of theory.json, by default"
            " outputs/theory>] [seed=<of simulations>]"
        )
        return
    print(
        theory(
            **arguments("papers theory", sys.argv[1:], list(inspect.signature(theory).parameters))
        )
    )
