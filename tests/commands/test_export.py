"""`specheads export`, in this process."""

import json

import pytest
import torch

from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.integrations.engines import drafting_of


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
        recommended={"threshold": 0.6, "min_tokens": 0, "max_tokens": 20, "predicted_speedup": 1.5},
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
        "threshold 0.6",
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


def write_report(folder, batches=(), probability=None, speed=1.4, doubts=()):
    """Write as much of a report as engines' settings read.

    Speeds at ratio 10 peak at three tokens.
    """

    def rule(family, value, *speeds):
        speedup = {
            ratio: {"value": each, "low": each - 0.05}
            for ratio, each in zip(("measured", "10"), speeds, strict=True)
        }
        return {"family": family, "value": value, "speedup": speedup}

    rules = [rule("fixed_length", 1, speed, 1.2), rule("fixed_length", 3, 0.9, 1.6)]
    rules += [] if probability is None else [rule("max_probability", 0.35, 0.8, probability)]
    tables = [
        {
            "concurrency": size,
            "rows": [
                {
                    "family": "fixed_length",
                    "name": f"fixed_length(num_tokens={length})",
                    "over_alone": over,
                }
            ],
        }
        for size, length, over in batches
    ]
    sets = [{"role": "dev", "rules": rules}, {"role": "test", "rules": []}]
    report = {
        "context": {"draft": "my/draft"},
        "data_sets": sets,
        "batches": tables,
        "doubts": list(doubts),
    }
    (folder / "report.json").write_text(json.dumps(report))
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
        json.loads((write_report(tmp_path, **given) / "report.json").read_text()), "10"
    )


def test_what_is_only_as_fast_is_not_faster(tmp_path):
    assert drafting(tmp_path) == ("my/draft", [(1, 3)], None)
    assert drafting(tmp_path, probability=1.6).least_probability is None
    assert drafting(tmp_path, batches=[(2, 5, 1.0), (1, 4, 1.01)]).lengths == [(1, 4), (2, 0)]
    report = json.loads((tmp_path / "report.json").read_text())
    del report["batches"]
    assert drafting_of(report, "10").lengths == [(1, 3)]
    report["data_sets"][0]["rules"][1]["speedup"]["10"]["low"] = 1.0
    with pytest.raises(UserError) as error:
        drafting_of(report, "10")
    assert (
        str(error.value)
        == "at ratio=10 no fixed length is clearly faster than the target alone: serve the target"
        " without a draft."
    )


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
            "no fixed lengths on dev prompts at it, expected one of 10, measured",
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
