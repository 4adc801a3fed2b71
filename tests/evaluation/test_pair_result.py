"""The result of an evaluation to send in: its schema, what it leaves out, and what is no report."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from report_example import report_example

from specheads import UserError
from specheads.commands import head_tool
from specheads.evaluation.pair_result import FILE, write_pair_result

SCHEMA = json.loads((Path(__file__).parents[2] / "specheads/evaluation/pair_result.schema.json").read_text())


@pytest.fixture
def report():
    content = asdict(report_example())
    known = {"draft": "/home/me/drafts/mine", "draft_revision": "1", "target": "me/target", "target_revision": "2"}
    known |= {"dtype": ["torch.float32"] * 2, "device": "a GPU", "threads": 2, "versions": {"torch": "2"}}
    known |= {"warp": {"temperature": 0.0}, "verification": "token verification", "max_new_tokens": 9, "prompts": {}}
    content["context"] = known | {"config": "paths: {data: /home/me}"}
    return content


def test_a_result_fits_its_schema_and_names_no_folder(report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report))
    message = head_tool.run(["result", f"report={tmp_path}"])
    assert message.startswith(f"{tmp_path / FILE} written")
    text = (tmp_path / FILE).read_text()
    content = json.loads(text)
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(content)
    assert content["pair"]["draft"] == "mine" and content["pair"]["target"] == "me/target" and "/home" not in text
    assert [row["name"] for row in content["live"]] == [row["name"] for row in report["live"]]


def test_what_is_no_report_is_named(report, tmp_path):
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        write_pair_result(str(tmp_path))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(UserError, match="is no report of specheads evaluate"):
        write_pair_result(str(tmp_path))
    (tmp_path / "report.json").write_text(json.dumps(report | {"live": []}))
    with pytest.raises(UserError, match="evaluate without live=none"):
        write_pair_result(str(tmp_path / "report.json"))
