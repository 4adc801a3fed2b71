"""`specheads export`, in this process."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from specheads.evaluation.answer import answer_of
from specheads.evaluation.candidates import TARGET_ALONE
from specheads.evaluation.keys import MEASURED, Kind
from specheads.evaluation.report import BatchRow, BatchTable, DataSet, Report, RuleRow, Winner
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.integrations.engines import drafting_of
from specheads.replay.intervals import Interval


@pytest.fixture
def head(nano, tmp_path):
    """A head for nano with everything that a head's config can say."""
    torch.manual_seed(0)
    config = HeadConfig(
        hidden_size=160,
        depth=1,
        width=16,
        warp={"temperature": 1.0, "top_k": 50, "top_p": 1.0},
        draft={"id": nano.draft_id, "revision": nano.draft_revision},
        target={"id": nano.target_id, "revision": nano.target_revision},
        calibration={"slope": [1.0, 0.9], "intercept": [0.0, 0.1]},
        recommended={
            "threshold": 0.6,
            "min_tokens": 0,
            "max_tokens": 20,
            "setting": "head_threshold(threshold=0.6)",
            "speedup": 1.5,
            "speedup_low": 1.4,
            "speedup_high": 1.6,
            "use": "draft_product(min_product=0.3)",
            "evidence": "Replayed on 7 prompts.",
        },
        train={"num_prompts": 7, "test": {"auroc": 0.75}},
    )
    return save_head(AcceptanceHead(config), tmp_path / "head", torch.randn(32, config.input_size))


def test_a_head_is_described(head, run, nano):
    code, text, _ = run("export", f"head={head}")
    assert code == 0
    for fact in (
        "next_token, from hidden, embedding, draft_prob, max_prob, entropy",
        "323 inputs, width 16, 1 residual blocks",
        f"{nano.draft_id} (revision {nano.draft_revision})",
        f"{nano.target_id} (revision {nano.target_revision})",
        "temperature=1.0, top_k=50, top_p=1.0",
        "by 2 indices in the round",
        "Use draft_product(min_product=0.3). This head is best at threshold 0.6: 1.50 times as",
        "fast as the target alone [1.40, 1.60]. Replayed on 7 prompts.",
        "auroc 0.75",
    ):
        assert fact in text, fact
    parameters = sum(weight.numel() for weight in load_head(head).parameters())
    assert f"parameters      {parameters:,}\n" in text


def test_the_files_are_checked(head, run):
    assert run("export", f"head={head}")[1].endswith("files           unchanged since its export\n")
    weights = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 64]))
    code, _, error = run("export", f"head={head}")
    assert code == 2 and "checksum differs" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export"], "head=<folder> is missing, or report=<folder>"),
        (
            ["export", "head=a", "other=b"],
            "'other=b' is not known; it takes head=, format=, report=, ratio=.",
        ),
        (["export", "head=./none"], "there is no head folder './none'"),
        (
            ["export", "head=HEAD", "format=pickle"],
            "format=pickle must be one of 'standalone', 'onnx', 'vllm'",
        ),
        (
            ["export", "head=specheads/nano/draft/../draft"],
            "its config is not that of a head",
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_two(run, head, words, message):
    code, text, error = run(*(word.replace("HEAD", str(head)) for word in words))
    assert (
        code == 2
        and not text
        and error.startswith("error: ")
        and message in error
        and "Traceback" not in error
    )


def rule(family, parameters, speeds):
    """A replayed rule with its speeds at the measured ratio and at 10, which are known to 0.05."""
    values = ", ".join(f"{key}={value}" for key, value in parameters.items())
    speedup = {}
    for ratio, speed in zip((MEASURED, "10"), speeds, strict=True):
        speedup[ratio] = Interval(speed, speed - 0.05, speed + 0.05)
    given = {"parameters": parameters, "rule_name": family}
    rate = Interval(0.5, 0.5, 0.5)
    return RuleRow(family, f"{family}({values})", rate, rate, 2.0, 0.7, speedup, **given)


def winner(row, ratio):
    """The best rule of a family at a ratio."""
    speed = row.speedup[ratio]
    given = {"parameters": row.parameters, "rule_name": row.rule_name}
    return Winner(row.family, row.name, ratio, speed, speed, None, speed.value, **given)


def batch(size, length, over):
    """A fixed length that was decoded in batches."""
    levels = {f"p{level}": 1.0 for level in (50, 90, 99)}
    speedup = Interval(over, over, over)
    given = {"parameters": {"num_tokens": length}, "rule_name": "fixed_length"}
    name = f"fixed_length(num_tokens={length})"
    row = BatchRow(
        name, "fixed_length", True, 9.0, over, 9.0, speedup, levels, levels, 2.0, **given
    )
    return BatchTable(size, 4, [row])


def write_report(folder, batches=(), probability=None, speed=1.4, doubts=()):
    """Write a report.

    Speeds at ratio 10 peak at three tokens. At the measured one a token is `speed` times as fast as
    the target alone, which is to be used where that is not clear.
    """
    one, three = (
        rule("fixed_length", {"num_tokens": length}, speeds)
        for length, speeds in ((1, (speed, 1.2)), (3, (0.9, 1.6)))
    )
    rules = [one, three]
    if probability is not None:
        rules.append(rule("max_probability", {"threshold": 0.35}, (0.8, probability)))
    sets = [
        DataSet("dev", "dev", 4, 9, 1, rules, []),
        DataSet("test", "test", 4, 9, 1, rules, [winner(one, MEASURED), winner(three, "10")]),
    ]
    tables = [batch(*given) for given in batches]
    context = {"draft": "my/draft"}
    report = Report(context, None, list(doubts), data_sets=sets, batches=tables)
    uses = {MEASURED: one.name if speed > 1.05 else TARGET_ALONE.name, "10": three.name}
    answer = answer_of(report, uses)
    (folder / "report.json").write_text(json.dumps(asdict(replace(report, answer=answer))))
    return folder


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            "vllm",
            '"method": "draft_model", "model": "my/draft", "num_speculative_tokens": 3}',
        ),
        (
            "tensorrt-llm",
            "speculative_config:\n  decoding_type: Draft_Target\n  max_draft_len: 3\n",
        ),
        ("llama.cpp", "--spec-type draft-simple --spec-draft-n-max 3 --spec-draft-p-min 0 "),
        (
            "sglang",
            "--speculative-num-steps 3 --speculative-num-draft-tokens 4 --speculative-eagle-topk 1",
        ),
    ],
)
def test_an_engine_gets_the_best_length_at_a_ratio(run, tmp_path, engine, expected):
    code, text, _ = run(
        "export", f"report={write_report(tmp_path)}", f"format={engine}", "ratio=10"
    )
    assert code == 0 and expected in text and "at ratio 10\n" in text


def test_a_draft_that_reads_its_target_gets_the_settings_of_eagle_3(run, tmp_path):
    path = write_report(tmp_path) / "report.json"
    report = json.loads(path.read_text())
    report["context"]["draft_reads"] = [2, 18, 33]
    path.write_text(json.dumps(report))
    words = ["export", f"report={tmp_path}", "ratio=10"]
    assert '"method": "eagle3", "model": "my/draft", "num_sp' in run(*words, "format=vllm")[1]
    assert "--speculative-algorithm EAGLE3 " in run(*words, "format=sglang")[1]
    for engine in ("llama.cpp", "tensorrt-llm"):
        code, _, error = run(*words, f"format={engine}")
        assert code == 2 and "the draft my/draft reads its target, and settings for such" in error


def test_batches_give_a_length_to_each_load(run, tmp_path):
    report = write_report(tmp_path, batches=[(16, 2, 0.9), (1, 5, 1.5), (4, 3, 1.1)])
    _, text, _ = run("export", f"report={report}", "format=vllm")
    config = json.loads(text.split("'")[1])
    assert config["num_speculative_tokens"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 5], [2, 4, 3], [5, 16, 0]]
    _, text, _ = run("export", f"report={report}", "format=tensorrt-llm")
    assert text.endswith(
        "speculative_config:\n  decoding_type: Draft_Target\n  max_draft_len: 5\n "
        ' speculative_model: "my/draft"\n  draft_len_schedule:  # up to so many requests, and none'
        " above\n    1: 5\n    4: 3\n"
    )


def drafting(tmp_path, **given):
    return drafting_of(
        json.loads((write_report(tmp_path, **given) / "report.json").read_text()), "10", 3
    )


def test_what_is_only_as_fast_is_not_faster(tmp_path):
    assert drafting(tmp_path) == ("my/draft", [(1, 3)], None, False)
    assert drafting(tmp_path, probability=1.6).least_probability is None
    assert drafting(tmp_path, batches=[(2, 5, 1.0), (1, 4, 1.01)]).lengths == [(1, 4), (2, 0)]
    report = json.loads((tmp_path / "report.json").read_text())
    del report["batches"]
    assert drafting_of(report, "10", 3).lengths == [(1, 3)]


def test_an_engine_that_lacks_the_recommended_rule_is_told_so(run, tmp_path):
    folder = write_report(tmp_path, probability=1.7)
    path = folder / "report.json"
    report = json.loads(path.read_text())
    at_ten = report["answer"]["others"][0]
    fixed = at_ten["choices"][Kind.FIXED]
    at_ten["choices"][Kind.HEADLESS] = fixed | {"name": "max_probability(threshold=0.35)"}
    path.write_text(json.dumps(report))
    words = ["export", f"report={folder}", "format=vllm", "ratio=10"]
    assert "the evaluation recommends" not in run(*words)[1]
    at_ten["use"] = Kind.HEADLESS
    path.write_text(json.dumps(report))
    assert "# the evaluation recommends max_probability(threshold=0.35); engines" in run(*words)[1]


def test_llama_stops_by_probability_where_that_is_faster(run, tmp_path):
    for probability, least in ((1.5, "0"), (1.7, "0.35")):
        report = write_report(tmp_path, probability=probability)
        assert (
            f"--spec-draft-p-min {least} "
            in run("export", f"report={report}", "format=llama.cpp", "ratio=10")[1]
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["format=vllm"], "settings need report=<folder> of an evaluation"),
        (["report={}"], "report=<folder> of an evaluation and format=vllm"),
        (["report={}", "format=onnx"], "report=<folder> of an evaluation"),
        (["report={}/no", "format=vllm"], "report.json cannot be read"),
        (
            ["report={}", "format=vllm", "ratio=7"],
            "the report has no answer at it, expected one of measured, 10",
        ),
        (
            ["report={}", "format=vllm"],
            "at ratio=measured no fixed length is clearly faster than the target alone",
        ),
    ],
)
def test_mistakes_in_engines_settings_are_named(run, tmp_path, words, message):
    write_report(tmp_path, speed=1.04)  # faster, but not clearly
    code, _, error = run("export", *(word.format(tmp_path) for word in words))
    assert code == 2 and message in error
