"""Every table of the documentation is rendered from results, and every result says how to reproduce
it.
"""

import json
import re
import shutil

import pytest

from benchmarks import gains
from benchmarks import results as benchmark_results
from benchmarks.render import BLOCK, DOCUMENTS, RESULTS, ROOT, main, source, update
from benchmarks.results import Column, Table, text_of, write_result

FILES = sorted(RESULTS.glob("*.json"))
CONTENTS = {path.stem: json.loads(path.read_text()) for path in FILES}


def blocks(document):
    """Return result and table of every block."""
    return [(block[2], block[3]) for block in BLOCK.finditer((ROOT / document).read_text())]


def test_tables_agree_with_their_results(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", CONTENTS)
def test_results_say_how_they_were_made(name):
    content = CONTENTS[name]
    assert content["name"] == name and content["command"] and content["commit"]
    assert content["machine"]["cpu"] and re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    keys = [table["key"] for table in content["tables"]]
    assert keys and len(keys) == len(set(keys))
    for table in content["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])


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
    assert update(tmp_path, check=True) == []
    document = tmp_path / "CONTRIBUTING.md"
    document.write_text(document.read_text().replace("| replay.replay | ", "| replay.replay | 1"))
    assert update(tmp_path, check=True) == ["CONTRIBUTING.md: mutants/modules"]


def test_written_results_are_rendered(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_results, "OUTPUTS", tmp_path)
    columns = [Column("rule"), Column("speed", "ratio:1"), Column("overlap", "percent:1")]
    rows = [["a|b", 1.25, {"value": 0.5, "low": 0.4, "high": 0.6}]]
    table = Table("up", "Up", columns, rows)
    path = write_result("made", [table], notes=["One."], seeds=[0, 1])
    content = json.loads(path.read_text())
    assert content["notes"] == ["One."] and content["seeds"] == [0, 1]
    assert text_of(table) == (
        "| rule | speed | overlap |\n|---|---:|---:|\n| a\\|b | 1.2x | 50.0 % [40.0, 60.0] |"
    )
    assert source(content).startswith(f"<sub>`{content['command']}`; {content['date']}; ")
    assert source(content).endswith(". One.</sub>")


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
