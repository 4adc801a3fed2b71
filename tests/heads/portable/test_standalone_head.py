"""A head's folder with its loader decodes elsewhere as it does here."""

import json
import subprocess
import sys

import pytest
import torch
from head_kinds import KINDS
from safetensors.torch import load_file, save_file

from specheads.decoding.stopping import HeadThreshold
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.heads.portable.loaders import STANDALONE, loader_source, write_loader
from specheads.heads.portable.standalone_head import DraftRound, StandaloneHead

CALIBRATION = {"slope": [1.2, 0.8, 0.7], "intercept": [0.1, 0.0, -0.2]}
RECOMMENDED = {"threshold": 0.55, "min_tokens": 1, "max_tokens": 6, "predicted_speedup": 1.3}
KINDS = KINDS | {
    "linear": {"predicts": "input_token", "depth": 0},
    "depth": {"predicts": "next_token", "inputs": ("hidden", "depth")},
}
ALONE = """
import importlib.util, os, sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("specheads", "transformers", "lightning"):
            raise ImportError(name)
sys.meta_path.insert(0, Gone())
import torch
from safetensors.torch import load_file, save_file
for folder in sys.argv[1:]:
    os.chdir(folder)
    spec = importlib.util.spec_from_file_location("acceptance_head", "acceptance_head.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    head, given = module.StandaloneHead.load("."), load_file("given.safetensors")
    index = given.pop("index")
    logits = head.score(load_file("golden.safetensors")["inputs"])
    computed = {"chances": head.acceptance(given, index), "logits": logits}
    save_file(computed, "computed.safetensors")
assert "specheads" not in sys.modules
"""


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    return exported(request.param, tmp_path / "head")


def exported(kind, folder):
    """Return the folder, with a head of a kind and its loader."""
    torch.manual_seed(0)
    kind = KINDS[kind]
    config = HeadConfig(hidden_size=160, recommended=RECOMMENDED, calibration=CALIBRATION, **kind)
    head = AcceptanceHead(config)
    for tensor in head.state_dict().values():
        tensor.add_(0.1 * torch.randn_like(tensor))
    save_head(head, folder, torch.randn(32, config.input_size))
    write_loader(folder, STANDALONE)
    return folder


def features(head, count=9):
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.rand(count, generator=generator)
        for name in ("draft_prob", "max_prob", "entropy", "second_prob", "depth")
    }
    sizes = {"hidden": 160, "embedding": 160}
    values |= {name: torch.randn(count, size, generator=generator) for name, size in sizes.items()}
    return {name: values[name] for name in head.config.inputs if name in values}


@pytest.fixture(scope="module")
def computed_alone(tmp_path_factory):
    """By kind: a folder of a head with what it computed in a process without specheads, one for all
    of them.
    """
    folders = {kind: exported(kind, tmp_path_factory.mktemp("head")) for kind in KINDS}
    for folder in folders.values():
        save_file(
            features(load_head(folder)) | {"index": torch.arange(9)}, folder / "given.safetensors"
        )
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *folders.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_the_same_chances_without_specheads(computed_alone, kind):
    folder = computed_alone[kind]
    head = load_head(folder)
    given = features(head)
    index = torch.arange(9)
    computed = load_file(folder / "computed.safetensors")
    assert torch.equal(computed["logits"], load_file(folder / "golden.safetensors")["logits"])
    rule = HeadThreshold(head, 0.5)
    logits = head(given)
    slope, intercept = (
        torch.tensor(CALIBRATION[name])[index.clamp_max(2)] for name in ("slope", "intercept")
    )
    torch.testing.assert_close(computed["chances"], (slope * logits + intercept).sigmoid())
    assert rule.needs <= set(given) | {"token"}


def test_a_round_stops_where_the_rule_stops(folder):
    ours = load_head(folder)
    theirs = StandaloneHead.load(folder)
    given = features(ours, 200)
    for start in range(0, 190, 10):
        rule = HeadThreshold(
            ours, **{name: RECOMMENDED[name] for name in ("threshold", "min_tokens", "max_tokens")}
        )
        state = rule.start_prompt(1, torch.device("cpu"))
        draft_round = DraftRound(theirs)
        for place in range(start, start + 6):
            token_features = {name: value[place : place + 1] for name, value in given.items()}
            state, stop = rule.step(state, token_features)
            assert draft_round.stops(token_features) == bool(stop)
            if stop:
                break
        assert stop  # at the sixth token at the latest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("readout.bias"), "'readout.bias' is no such tensor, expected"),
        (
            lambda tensors: tensors.update({"more": torch.zeros(2)}),
            r"'more' is \(2,\), expected no such tensor",
        ),
        (
            lambda tensors: tensors.update({"readout.bias": torch.zeros(3)}),
            r"'readout.bias' is \(3,\), expected \(1,\)",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(folder, change, message):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        StandaloneHead.load(folder)


def test_default_bounds_yield_to_given_bounds(folder):
    head = StandaloneHead.load(folder)
    head.config["recommended"] = None
    assert (
        DraftRound(head, max_tokens=1).min_tokens,
        DraftRound(head, max_tokens=1).max_tokens,
    ) == (1, 1)
    for wrong in (
        {"threshold": 1.5},
        {"threshold": "auto"},
        {"min_tokens": 3, "max_tokens": 2},
        {"max_tokens": 0},
    ):
        with pytest.raises(
            ValueError, match=r"must be a number from 0 to 1|must be a positive integer of at most"
        ):
            DraftRound(head, **wrong)


def test_damaged_weights_are_detected(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["readout.bias"] += 5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"outputs differ from the golden vectors by 5"):
        StandaloneHead.load(folder)


def test_a_config_with_only_the_required_keys_is_enough(folder):
    config = json.loads((folder / "config.json").read_text())
    names = ("format_version", "hidden_size", "depth", "predicts", "inputs", "width")
    needed = {key: config[key] for key in names}
    (folder / "config.json").write_text(json.dumps(needed))
    given = features(load_head(folder))
    assert torch.equal(StandaloneHead.load(folder)(given), load_head(folder)(given))


def test_another_format_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format_version": 9}))
    with pytest.raises(ValueError, match="head format 9; this file reads 2"):
        StandaloneHead.load(folder)


def test_the_file_is_whole_and_names_no_part_of_this_project(folder):
    source = loader_source(STANDALONE)
    assert (folder / STANDALONE).read_text() == source
    assert "import specheads" not in source and "from specheads" not in source
    compile(source, STANDALONE, "exec")
