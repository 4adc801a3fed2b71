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

KINDS = KINDS | {"one number": {"predicts": "next_token", "depth": 0, "inputs": ("max_prob",)}}
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


def test_a_graph_is_compared_with_the_head_at_every_index_and_for_several_batches():
    session = Session(small())
    formats._check_same(small(), session, "head.onnx")
    assert [len(given["index"]) for given in session.given] == [3, 1, 17]
    assert session.given[2]["index"].tolist() == [
        *range(11),
        *range(6),
    ]  # beyond the last of the calibration, too
    for given in session.given:
        assert sorted(given) == [
            "draft_prob",
            "embedding",
            "entropy",
            "hidden",
            "index",
            "max_prob",
        ]
        assert (
            given["hidden"].shape == (len(given["index"]), 4)
            and given["entropy"].shape == given["index"].shape
        )


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


def test_rounding_of_large_logits_is_no_difference():
    formats._check_same(small(), Session(small(), 0.9e-5), "head.onnx")
    large = small(intercept=1000.0)
    formats._check_same(large, Session(large, 5e-3), "head.onnx")
    with pytest.raises(UserError, match="by 0.02"):
        formats._check_same(large, Session(large, 0.02 * 1000), "head.onnx")


def test_what_is_tried_has_the_scale_of_what_the_head_was_trained_on():
    head = AcceptanceHead(HeadConfig(hidden_size=400))
    head.input_mean.copy_(
        torch.cat([torch.full((400,), 3.0), torch.full((400,), -2.0), torch.zeros(3)])
    )
    head.input_scale.copy_(
        torch.cat([torch.full((400,), 0.5), torch.full((400,), 50.0), torch.ones(3)])
    )
    features, index = formats._example_inputs(head, 13)
    for name, mean, spread in (
        ("hidden", 3.0, 2.0),
        ("embedding", -2.0, 0.02),
    ):  # 5,200 numbers: five standard errors
        assert features[name].mean().item() == pytest.approx(mean, abs=5 * spread / 5200**0.5)
        assert features[name].std().item() == pytest.approx(spread, rel=5 / (2 * 5200) ** 0.5)
    for name in ("draft_prob", "max_prob", "entropy"):
        assert (
            features[name].shape == (13,) and 0 <= features[name].min() < features[name].max() < 1
        )
    assert index.tolist() == [*range(11), 0, 1]
    again = formats._example_inputs(head, 13)[0]
    assert all(torch.equal(features[name], again[name]) for name in features)


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
def test_a_graph_that_computes_something_else_is_refused_and_removed(folder, monkeypatch):
    other = AcceptanceHead(load_head(folder).config).eval()
    torch.nn.init.ones_(other.readout.bias)
    graph = formats._traced(other)
    monkeypatch.setattr(formats, "_traced", lambda head: graph)
    before = set(folder.iterdir())
    with pytest.raises(UserError, match="differs from the head by"):
        write_onnx(load_head(folder), folder)
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("kind", ["look-ahead"])
def test_a_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        UserError, match=r"format=onnx needs onnxruntime: pip install 'specheads\[onnx\]'"
    ):
        write_onnx(load_head(folder), folder)
