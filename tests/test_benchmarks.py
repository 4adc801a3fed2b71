"""Every table of the documentation is rendered from results, and every result says how to reproduce
it.
"""

import json
import re
import shutil
from importlib.util import find_spec

import pytest

from benchmarks import gains
from benchmarks import results as benchmark_results
from benchmarks.render import (
    BLOCK,
    DOCUMENTS,
    RESULTS,
    ROOT,
    _machine_text,
    main,
    source,
    update,
)
from benchmarks.results import (
    Column,
    Table,
    _without_folders,
    prompt_record,
    write_result,
)
from specheads.commands.verbs import VERBS
from specheads.evaluation.prompt_sets import PromptSet
from specheads.prompts.prompt import Prompt

FILES = sorted(RESULTS.glob("*.json"))
CONTENTS = {path.stem: json.loads(path.read_text()) for path in FILES}


def blocks(document):
    """Return result and table of every block."""
    return [(block[2], block[3]) for block in BLOCK.finditer((ROOT / document).read_text())]


def test_tables_agree_with_their_results(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", CONTENTS)
def test_results_have_every_field(name):
    content = CONTENTS[name]
    assert content["name"] == name
    fields = "name command date commit machine load split seeds prompts notes tables"
    assert [*content] == fields.split()
    assert content["machine"]["cpu"] and re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert content["commit"]
    keys = [table["key"] for table in content["tables"]]
    assert keys and len(keys) == len(set(keys))
    for table in content["tables"]:
        columns = [Column(**column) for column in table["columns"]]
        # Refuses formats and rows that do not fit.
        Table(table["key"], table["title"], columns, table["rows"])
        assert all(
            column.format
            for column, *values in zip(columns, *table["rows"], strict=True)
            if has_interval(values)
        )


def has_interval(values):
    intervals = [value for value in values if isinstance(value, dict)]
    assert all(value.keys() == {"value", "low", "high"} for value in intervals)
    return bool(intervals)


@pytest.mark.parametrize("name", CONTENTS)
def test_commands_name_what_exists(name):
    command = CONTENTS[name]["command"]
    assert "\n" not in command and command == _without_folders(command)
    named = re.match(
        r"(?:python (?:-m (?P<module>[\w.]+)|(?P<script>[\w/]+\.py))|specheads (?P<verb>\w+))( |$)",
        command,
    )
    assert named, command
    if named["verb"]:
        assert named["verb"] in {verb.split()[0] for verb in VERBS}
    else:
        script = named["script"]
        assert find_spec(named["module"]) if named["module"] else (ROOT / script).is_file()


def test_every_result_is_shown_and_every_block_has_a_result():
    shown = [block for document in DOCUMENTS for block in blocks(document)]
    assert len(shown) == len(set(shown))
    known = {
        (name, table["key"]) for name, content in CONTENTS.items() for table in content["tables"]
    }
    assert set(shown) <= known
    assert {name for name, _ in shown} == CONTENTS.keys()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_table_is_typed_by_hand(document):
    text = BLOCK.sub("", (ROOT / document).read_text())
    assert "<!-- table:" not in text and "<!-- end -->" not in text
    assert not [
        line for line in text.splitlines() if line.startswith("|") and re.search(r"\d", line)
    ]


def test_a_changed_number_is_found(tmp_path):
    """The check names the table of a number that is changed by hand."""
    for document in DOCUMENTS:
        (tmp_path / document).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / document, tmp_path / document)
    assert update(tmp_path, RESULTS, check=True) == []
    document = tmp_path / "CONTRIBUTING.md"
    document.write_text(document.read_text().replace("| replay.replay | ", "| replay.replay | 1"))
    assert update(tmp_path, RESULTS, check=True) == ["CONTRIBUTING.md: mutants/modules"]


def test_rendered_documents_pass_the_check(tmp_path):
    for document in DOCUMENTS:
        (tmp_path / document).parent.mkdir(parents=True, exist_ok=True)
    folder = tmp_path / "benchmarks" / "results"
    columns = [Column("rule"), Column("speed", "ratio:1"), Column("overlap", "percent:1")]
    write_result(
        "made",
        [Table("up", "Up", columns, [["a|b", 1.25, {"value": 0.5, "low": 0.4, "high": 0.6}]])],
        "specheads train",
        keep="made",
        folder=folder,
    )
    for document in DOCUMENTS:
        (tmp_path / document).write_text(
            "Text.\n\n<!-- table: made/up -->\nold\n<!-- end -->\n\nMore.\n"
        )
    assert (
        len(update(tmp_path, folder)) == len(DOCUMENTS)
        and update(tmp_path, folder, check=True) == []
    )
    (text,) = {(tmp_path / document).read_text() for document in DOCUMENTS}
    assert (
        "*Up*\n\n| rule | speed | overlap |\n|---|---:|---:|\n| a\\|b | 1.2x | 50.0 % [40.0,"
        " 60.0] |\n" in text
    )
    assert (
        "`specheads train`" in text
        and text.startswith("Text.\n")
        and text.endswith("<!-- end -->\n\nMore.\n")
    )


def test_results_say_where_they_come_from(tmp_path):
    prompts = prompt_record(["b", "a"])
    assert (
        prompts["number"] == 2
        and prompts["hash"] == prompt_record("ab")["hash"] != prompt_record("ac")["hash"]
    )
    reported = PromptSet(
        "nano", "test", [(Prompt(prompt_id, "test", prompt_id), []) for prompt_id in "ab"]
    )
    assert reported.provenance()["sha256"] == prompts["hash"]
    path = write_result(
        "made",
        [Table("up", "Up", [Column("a")], [[1]])],
        split="dev",
        seeds=range(4),
        prompts=prompts,
        notes="One.",
        keep="made",
        folder=tmp_path,
    )
    content = json.loads(path.read_text())
    assert (
        content["prompts"] == prompts
        and content["notes"] == ["One."]
        and content["seeds"] == [0, 1, 2, 3]
    )
    assert content["load"].keys() == {"start", "end", "quiet"} and content["machine"]["cores"]
    assert (
        source(content)
        == f"<sub>`{content['command']}`; {content['date']}; {_machine_text(content['machine'])}."
        " One.</sub>"
    )
    assert content["machine"]["cpu"] in _machine_text(content["machine"])


def test_recorded_commands_have_no_local_folders(monkeypatch):
    command = (
        f"specheads evaluate head={ROOT}/outputs/head/x 'test_sets={{humaneval:"
        " /some/where/humaneval.jsonl}' --data /a/b.json"
    )
    assert (
        _without_folders(command)
        == "specheads evaluate head=outputs/head/x 'test_sets={humaneval: humaneval.jsonl}' --data"
        " b.json"
    )
    monkeypatch.setattr(
        "sys.argv", [str(ROOT / "benchmarks" / "decoding.py"), "--repeats", "8", "a b"]
    )
    assert benchmark_results._started_command() == "python benchmarks/decoding.py --repeats 8 'a b'"


def gains_report(seed, gain, explained):
    """A report of an evaluation with one set of test prompts: a head, a logistic, and a faster rule
    that no decoder can use.
    """

    def about(value):
        return {"value": value, "low": value - 0.01, "high": value + 0.01}

    def row(rule, head, dev, gain, **more):
        fields = {
            "ratio": "10",
            "bound": False,
            "rule_name": rule,
            "head": head,
            "dev_speedup": dev,
            "gain": about(gain),
        }
        return fields | {"gain_uncharged": None, "gap_ceiling": about(10 * (gain - 1))} | more

    head = "next_token-d3-r1"
    winners = [
        row("fixed_length", None, 9.0, 1.0),
        row("head_threshold", head, 1.0, 2.0),  # better on these prompts, and not chosen
        row("head_threshold", head, 2.0, gain, gain_uncharged=about(gain + 0.01)),
        row("logistic", None, 1.5, 1.02),
        row("ceiling", None, 9.0, 3.0, bound=True),
    ]
    known = {
        "reducible": about(0.36),
        "irreducible": about(0.12),
        "explained": {head: about(explained), gains.LOGISTIC: about(0.2)},
    }
    data = {"name": "mini, final", "role": "test", "information": known, "winners": winners}
    warp = {"temperature": 0.5, "top_k": 50, "top_p": 1.0}
    return {
        "context": {"model": "mini", "warp": warp, "seed": seed, "split": "final"},
        "data_sets": [data],
    }


def test_gains_are_means_over_seeds_of_what_dev_prompts_chose(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / f"{seed}.json" for seed in (0, 1)]
    for path, seed, gain in zip(paths, (0, 1), (1.04, 1.06), strict=True):
        path.write_text(json.dumps(gains_report(seed, gain, 10 * (gain - 1))))
    monkeypatch.setattr(benchmark_results, "OUTPUTS", tmp_path / "outputs")
    monkeypatch.setattr("sys.argv", ["gains.py", *map(str, paths)])
    gains.main()
    written = json.loads((tmp_path / "outputs" / "gains.json").read_text())
    gained, known, relation = written["tables"]
    values = {}
    for table in (gained, known):
        for column, value in zip(table["columns"], table["rows"][0], strict=True):
            values[column["name"]] = value
    assert values["warp"] == "T = 0.5, top-k 50" and len(gained["rows"]) == len(known["rows"]) == 1
    of_head = values["look-ahead head at 10"]
    assert (of_head["value"], of_head["low"], of_head["high"]) == pytest.approx((0.05, 0.03, 0.07))
    assert values["excluding its overhead, at 10"]["value"] == pytest.approx(0.06)
    assert values[f"{gains.LOGISTIC} at 10"]["value"] == pytest.approx(0.02)
    assert values["look-ahead head explains"]["value"] == pytest.approx(0.5)
    assert values["SpecDec++ head at 10"] is None
    # Each closes the share that it explains.
    assert relation["rows"][0][1:5] == pytest.approx([2, 1.0, 1.0, 0.0], abs=1e-9)
