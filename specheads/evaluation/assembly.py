"""The report of an evaluation, assembled from the results of its steps."""

import json
import shlex
from dataclasses import replace
from datetime import date

import yaml

from specheads.decoding import stopping
from specheads.decoding.verification import BlockVerification
from specheads.evaluation.answer import answer_of
from specheads.evaluation.candidates import Candidate, written
from specheads.evaluation.replayed_sets import Results
from specheads.evaluation.report import Answer, DataSet, LiveRow, Report, TextSample
from specheads.evaluation.rows import data_set, live_rows, reliability, text_samples
from specheads.evaluation.setup import Setup, device_name, load_average, versions
from specheads.pair.pair import Pair
from specheads.replay.information import information
from specheads.replay.intervals import interval
from specheads.replay.replay import recorded_head, replay
from specheads.storage.files import without_home


def report_of(
    setup: Setup, results: Results, config: str | None = None, command: str = "specheads generate"
) -> Report:
    """Return the report.

    `config` is the text of the configuration, None: the settings, `command` the words to which
    those of the setting to use are added.
    """
    measured = results.measured
    steps = results.cost_table.steps
    live = (
        live_rows(results, setup.settings.verification.lossless, setup.prompts.decoded.groups)
        if measured
        else []
    )
    heads = {name: recorded_head(head) for name, head in setup.heads.items()}
    sets = [] if results.dev is None else [results.dev, *results.tests]
    data_sets = list[DataSet]()
    for each in sets:
        detailed = replace(
            data_set(each, results),
            reliability=reliability(each.recording, heads),
            information=information([each.recording], heads, each.groups),
        )
        data_sets.append(detailed)
    report = Report(
        context=context_of(setup, config, num_decoded=len(measured[0].stats) if measured else 0),
        steps=None if steps is None else steps.estimate,
        ratio=None if steps is None else interval(steps.ratios()),
        doubts=results.doubts,
        disagreements=results.disagreements,
        live=live,
        data_sets=data_sets,
        batches=results.batches,
        notes=setup.prompts.notes(),
    )
    num_dev_prompts = 0 if results.dev is None else results.dev.recording.num_prompts
    answer = answer_of(report, results.uses, num_dev_prompts)
    if answer is None:
        return report
    texts = _texts(setup.pair, results, answer) if sets else []
    return replace(report, answer=_with_code(setup, results, answer, command), texts=texts)


def _with_code(setup: Setup, results: Results, answer: Answer, command: str) -> Answer:
    """Return the answer with the command and with the Python that decode with its setting."""
    known = [*(each.setting for each in results.measured), *results.candidates]
    rule = next((each for each in known if each.name == answer.setting and each.rule_name), None)
    # The target alone; or other drafts, which the command line names
    if rule is None or not setup.settings.can_replay:
        return answer
    words = _command_words(setup, rule, answer.under_verification)
    return replace(
        answer,
        command=f"{command} {shlex.join(words)}",
        python=_python(setup, rule, answer.under_verification),
    )


def _command_words(setup: Setup, rule: Candidate, verification: LiveRow | None) -> list[str]:
    """Return the words of a command line that decodes with a rule, under the verification rule that
    was faster.
    """
    located = setup.located_heads.get(rule.head or "")
    words = [f"stopping=[{rule.rule_name}]"]
    for key, value in rule.arguments.items():
        if value is not None:
            words.append(f"stopping.{rule.rule_name}.{key}={written(value)}")
    words.append(f"head={without_home(located.where)}" if located else "head=null")
    if verification is not None:
        words.append(f"verification={verification.verification}")
    return words


def _python(setup: Setup, rule: Candidate, verification: LiveRow | None) -> str:
    """Return Python that decodes with a rule, under another verification rule if that was
    faster.
    """
    pair = setup.pair
    cls = type(rule.live)
    located = setup.located_heads.get(rule.head or "")
    arguments = ["head"] if located else []
    for key, value in rule.arguments.items():
        if value is not None:
            arguments.append(f"{key}={value!r}")
    made = ", ".join(arguments)
    warp = ", ".join(f"{key}={value!r}" for key, value in setup.settings.warp.values().items())
    is_embedded = pair.target_id.startswith("embedded:")
    ids = repr(pair.name) if is_embedded else f"draft={pair.draft_id!r}, target={pair.target_id!r}"
    is_ours = hasattr(stopping, cls.__name__)
    place = "specheads.stopping." if is_ours else ""
    lines = ["import specheads"]
    if not is_ours:
        lines.append(f"from {cls.__module__} import {cls.__name__}")
    lines += ["", f"pair = specheads.load_pair({ids})"]
    if located:
        lines.append(f"head = specheads.load_head({without_home(located.where)!r})")
    lines += [f"rule = {place}{cls.__name__}({made})", f"warp = specheads.Warp({warp})"]
    more = ""
    if verification is not None:
        more = f", verification=specheads.verification.{BlockVerification.__name__}()"
    lines.append(f"decoder = specheads.SpeculativeDecoder(pair, stopping=rule, warp=warp{more})")
    most = setup.settings.max_new_tokens
    lines.append(f'print(decoder.generate("def mean(values):", max_new_tokens={most}).text)')
    return "\n".join(lines)


def _texts(pair: Pair, results: Results, answer: Answer) -> list[TextSample]:
    """Return responses in pieces, as each setting that there is to choose from drafts them."""
    names = {choice.name for choice in answer.comparison.choices.values()}
    rules = {rule.name: rule for rule in results.candidates if rule.name in names}.values()
    recording = results.reported.recording
    drafting = [rule.rule for rule in rules if rule.rule is not None]
    samples = []
    for rule, rounds in zip(rules, replay(recording, drafting), strict=True):
        samples += text_samples(pair, recording, rule, rounds)
    return samples


def context_of(setup: Setup, config: str | None = None, num_decoded: int = 0) -> dict[str, object]:
    """Return the description of the evaluation for its report.

    `num_decoded` prompts were decoded.
    """
    settings = setup.settings
    pair = setup.pair
    # Rules and other objects as Python shows them
    plain = json.loads(json.dumps(dict(settings), default=repr))
    return {
        "model": pair.name,
        "target": pair.target_id,
        "target_revision": pair.target_revision,
        "draft": pair.draft_id,
        "draft_revision": pair.draft_revision,
        "draft_reads": list(pair.draft_lm.reads_layers),
        "dtype": [str(pair.target.dtype), str(pair.draft.dtype)],
        "heads": [without_home(located.where) for located in setup.located_heads.values()],
        "warp": settings.warp.values(),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "num_live_prompts": num_decoded,
        "repeats": settings.repeats,
        "verification": settings.verification.label,
        "lossless": settings.verification.lossless,
        "costs": {"head_shares": setup.head_sizes},
        "device": device_name(pair),
        "date": date.today().isoformat(),
        "load": {"start": setup.load, "end": load_average()},
        "versions": versions(),
        **setup.prompts.context(),
        "config": config or yaml.safe_dump(plain, sort_keys=False, allow_unicode=True),
    }
