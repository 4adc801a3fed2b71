"""Exported graphs predict what the head predicts, for any number of tokens at once."""

import sys

import onnxruntime
import pytest
import torch
from head_kinds import KINDS

from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head, set_scale
from specheads.integrations import formats
from specheads.integrations.formats import write_onnx

KINDS = KINDS | {
    "one number": {"predicts": "next_token", "depth": 0, "inputs": ("max_prob",)},
    "depth": {"predicts": "input_token", "depth": 1, "inputs": ("hidden", "depth")},
}
CALIBRATION = {"slope": [1.2, 0.8, 0.7], "intercept": [0.1, 0.0, -0.2]}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, tmp_path):
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(hidden_size=32, calibration=CALIBRATION, **KINDS[kind]))
    for tensor in head.state_dict().values():
        tensor.add_(0.1 * torch.randn_like(tensor))
    return save_head(head, tmp_path / "head", torch.randn(32, head.config.input_size))


def expected(head, features, index):
    """Logit and calibrated chance, by the formula."""
    logit = head(features | {"index": index})
    slope, intercept = (
        torch.tensor(CALIBRATION[name])[index.clamp_max(2)] for name in ("slope", "intercept")
    )
    return logit, torch.sigmoid(slope * logit + intercept)


class Session:
    """An onnxruntime session that computes what a head computes.

    `error` is added to an output, by its number.
    """

    def __init__(self, head, error=0.0, output=0):
        self.network = formats._CalibratedHead(head)
        self.error = error
        self.output = output
        self.given = []

    def run(self, names, given):
        assert names is None and all(
            value.dtype in ("float32", "int64") for value in given.values()
        )
        self.given.append(given)
        features = {name: torch.from_numpy(value) for name, value in given.items()}
        outputs = list(self.network(features, features.pop("index")))
        outputs[self.output][-1] += self.error
        return [each.numpy() for each in outputs]


def small(scale=1.0, intercept=0.0):
    torch.manual_seed(0)
    head = AcceptanceHead(
        HeadConfig(hidden_size=4, depth=0, calibration=CALIBRATION)
    ).requires_grad_(False)
    head.readout.weight *= scale
    head.readout.bias += intercept
    return head.eval()


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize(
    ("error", "shown"), [(1e-3, "0.001"), (-1e-3, "0.001"), (float("nan"), "nan")]
)
def test_one_wrong_number_is_enough(output, error, shown):
    with pytest.raises(UserError) as raised:
        formats._check_same(small(), Session(small(), error, output), "head.onnx")
    assert (
        str(raised.value)
        == f"head.onnx differs from the head by {shown}, expected at most 1e-05; use"
        " format=standalone, or another version of the exporter."
    )


def test_onnxruntime_predicts_what_the_head_predicts(folder):
    head = load_head(folder)
    session = onnxruntime.InferenceSession(
        write_onnx(head, folder), providers=["CPUExecutionProvider"]
    )
    assert {value.name for value in session.get_inputs()} == {*head.config.inputs, "index"}
    for batch in (1, 2, 40):
        inputs = formats._example_inputs(head, batch)
        given = {name: value.numpy() for name, value in {**inputs[0], "index": inputs[1]}.items()}
        for actual, wanted in zip(session.run(None, given), expected(head, *inputs), strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), wanted, atol=1e-5, rtol=0)


def test_a_head_of_a_large_draft_is_tested_at_the_scale_of_its_inputs(tmp_path):
    """States of 1 and embeddings of 0.02, as Llama has: read at another scale, logits would be in
    the hundreds.
    """
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(hidden_size=2048, width=256))
    inputs = torch.randn(64, head.config.input_size)
    inputs[:, 2048:4096] *= 0.02
    set_scale(head, inputs)
    for parameter in head.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    assert write_onnx(head.eval(), tmp_path).stat().st_size > 1_000_000


@pytest.mark.parametrize("kind", ["look-ahead"])
def test_a_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        UserError, match=r"format=onnx needs onnxruntime: pip install 'specheads\[onnx\]'"
    ):
        write_onnx(load_head(folder), folder)
