"""`specheads export`, in this process."""

import pytest
import torch

from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head


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


def test_a_description_names_unknown_properties(tmp_path, run):
    torch.manual_seed(0)
    config = HeadConfig(hidden_size=8, predicts="input_token", depth=0)
    folder = save_head(AcceptanceHead(config), tmp_path / "bare", torch.randn(32, 8))
    code, text, _ = run("export", f"head={folder}")
    assert (
        code == 0
        and "draft           not named" in text
        and "specheads evaluate chooses a threshold" in text
        and "held out        not known" in text
    )


def test_the_files_are_checked(head, run):
    assert run("export", f"head={head}")[1].endswith("files           unchanged since its export\n")
    weights = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 64]))
    code, _, error = run("export", f"head={head}")
    assert code == 2 and "checksum differs" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export"], "head is missing; it is a folder"),
        (["export", "head="], "head= "),
        (["export", "folder"], "'folder' is not known; it takes head="),
        (["export", "head=a", "report=b"], "report=b is not known; expected one of head, format"),
        (["export", "head=./none"], "there is no head folder './none'"),
        (["export", "head=HEAD", "format=pickle"], "format=pickle must be one of 'standalone' or 'onnx'"),
        (["export", "head=specheads/nano/draft/../draft"], "config.json belongs to a model, not to a head"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_two(run, head, words, message):
    code, text, error = run(*(word.replace("HEAD", str(head)) for word in words))
    assert code == 2 and not text and error.startswith("error: ") and message in error and "Traceback" not in error
