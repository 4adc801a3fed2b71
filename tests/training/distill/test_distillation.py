"""`specheads distill` as a whole, on nano with few prompts: the folder that it writes, and what it
refuses.
"""

import copy
import json
import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from fakes import cut
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

import specheads
from specheads import Distillation, UserError, Warp, load_pair
from specheads.commands.compose import command_config, settings_of
from specheads.commands.data import data_cache
from specheads.commands.train import _responses_of, distill_draft
from specheads.heads.head import AcceptanceHead, find_heads, save_head
from specheads.pair.draft_vocabulary import borrows_embedding, kept_tokens
from specheads.prompts import sources
from specheads.prompts.prompt import SPLITS
from specheads.training.distill.distillation import _reduced, prepare
from specheads.training.distill.draft_quality import draft_quality
from specheads.training.distill.samples import Samples, encoded_response, load_splits, train_samples
from specheads.training.heads.settings import HeadTraining
from specheads.training.trainer import new_trainer

SMALL = [
    "model=nano",
    "data.num_train=8",
    "data.num_dev=3",
    "data.num_test=3",
    "data.max_new_tokens=10",
]
SMALL += [
    "data.max_prompt_tokens=200",
    "trainer.max_epochs=2",
    "loader.batch_size=4",
    "validation.num_prompts=3",
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*callbacks.*"),
]


def composed(*words):
    return command_config("distill", [*SMALL, *words])


def description_of(folder):
    return json.loads((folder / "distill.json").read_text())


@pytest.fixture
def cfg(tmp_path):
    return lambda *words: composed(
        f"paths.data={tmp_path}/data",
        f"paths.outputs={tmp_path}",
        f"paths.run={tmp_path}/run",
        *words,
    )


@pytest.fixture(scope="module")
def library():
    return {side: list(sources.standard_library(side))[::40] for side in ("dev", "test")}


@pytest.fixture(autouse=True)
def few_functions(monkeypatch, library):
    """Reading the whole standard library takes seconds."""
    monkeypatch.setattr(sources, "standard_library", lambda side: iter(library[side]))


@pytest.mark.parametrize("samples", ["text", "target"])
def test_a_draft_becomes_an_ordinary_folder(cfg, tmp_path, samples, capsys):
    pair = load_pair("nano")
    initial = {name: weight.clone() for name, weight in pair.draft.state_dict().items()}
    folder = distill_draft(cfg(f"samples={samples}"), pair).folder
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "distill.json"} <= {
        p.name for p in folder.iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == pair.tokenizer.get_vocab() and model.dtype == torch.bfloat16
    trained = pair.draft.state_dict()
    assert all(
        torch.equal(weight, trained[name].bfloat16()) for name, weight in model.state_dict().items()
    )
    assert any(
        not torch.equal(weight, initial[name]) for name, weight in model.state_dict().items()
    )
    again = load_pair("nano", draft=str(folder))
    assert again.draft_revision != pair.draft_revision and again.draft_id == str(folder)
    description = description_of(folder)
    assert description["steps"] == 4 and description["num_prompts"] == 8
    assert description["samples"] == samples
    card = (folder / "README.md").read_text()
    printed = capsys.readouterr().out
    for name in ("overlap", "kl", "agreement", "block_efficiency_4"):
        before, after = (description["test"][when][name] for when in ("before", "after"))
        assert (
            f"| {name} | {before:.4f} | {after:.4f} |" in card
            and name in printed
            and f"{after:.4f}" in printed
        )
    caches = [json.loads(path.read_text()) for path in tmp_path.glob("data/*/manifest.json")]
    assert [any(name.startswith("train") for name in cache["shards"]) for cache in caches] == [
        samples == "target"
    ]
    assert list(tmp_path.glob("data/target_probs/*/manifest.json"))


def dev_overlaps(run):
    """The overlap on dev prompts after each epoch, as the run noted it."""
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    found = [of_step["dev/overlap"] for _, of_step in checkpoint["history"] if "dev/kl" in of_step]
    return found[1:]  # the first is from before


@pytest.mark.parametrize("lr", [0.02, 0.001])
def test_the_epoch_that_is_best_on_dev_prompts_is_exported(cfg, tmp_path, lr, capsys):
    words = [f"optimizer.lr={lr}", "trainer.max_epochs=4", "stored_dtype=float32"]
    pair = load_pair("nano")
    before = copy.deepcopy(pair.draft)
    made = cfg(*words)
    folder = distill_draft(made, pair).folder
    overlaps = dev_overlaps(tmp_path / "run")
    assert len(overlaps) == 4
    settings = settings_of(Distillation, made).for_pair(pair)
    data = data_cache(made, pair, splits=SPLITS, labelled=False)
    dev = load_splits(data, pair, train_samples(data, pair, settings), settings)[0]["dev"]
    exported = load_pair("nano", draft=str(folder), draft_temperature=1.0)
    found = draft_quality(exported, dev, settings.warp, 4)["overlap"]
    assert found == pytest.approx(max(overlaps), abs=1e-5)
    was = draft_quality(replace(pair, draft=before), dev, settings.warp, 4)["overlap"]
    printed = capsys.readouterr().out
    epoch = 1 + overlaps.index(max(overlaps))
    assert f"after epoch {epoch}, the best on dev prompts" in printed
    assert f"{was:.4f} before training, {overlaps[-1]:.4f} after the last epoch" in printed
    is_worse = max(overlaps) < was
    assert is_worse == (lr == 0.02)
    assert ("WARNING: the draft became worse" in printed) == is_worse
    assert ("next: " in printed) == (not is_worse)


@pytest.mark.parametrize(
    "words",
    [
        ["gradient_checkpointing=true", "stored_dtype=float32", "trainer.precision=bf16-mixed"],
        # With stored distributions, which one epoch does not read.
        ["model.dtype=bfloat16", "trainer.max_epochs=2"],
        ["target_probs_budget=0", "loss.divergence=forward_kl"],
        ["warp.temperature=0"],
    ],
    ids=lambda words: " ".join(words),
)
def test_other_settings_train_too(cfg, words):
    folder = distill_draft(cfg("trainer.max_epochs=1", *words)).folder
    quality = description_of(folder)["test"]
    # Of 48 tokens, which are others in every version of Python; a draft that has forgotten
    # everything loses 0.5.
    assert quality["after"]["overlap"] > quality["before"]["overlap"] - 0.25
    wanted = torch.float32 if "stored_dtype=float32" in words else torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == wanted


@pytest.mark.parametrize(
    ("embedding", "more"),
    [
        ("own", []),
        ("target", ["loss.divergence=forward_kl", "gradient_checkpointing=true"]),
        pytest.param(
            "target", ["model.dtype=bfloat16", "target_probs_budget=0"], marks=pytest.mark.full
        ),
    ],
)
def test_a_draft_keeps_the_tokens_that_the_target_says_most(cfg, embedding, more, caplog):
    caplog.set_level(logging.INFO)
    words = [
        "init_layers=1",
        "draft_vocabulary=60",
        f"embedding={embedding}",
        "model.draft=null",
        *more,
    ]
    folder = distill_draft(cfg(*words)).folder
    with safe_open(folder / "model.safetensors", "pt") as stored:
        assert ("model.embed_tokens.weight" in set(stored.keys())) == (embedding == "own")
        assert stored.get_tensor("lm_head.weight").shape == (60, 256)
    pair = load_pair("nano", draft=str(folder))
    kept = set(kept_tokens(pair.draft).tolist())
    answers = Counter()
    for file in folder.parents[1].glob("data/*/train-*.parquet"):
        answers.update(
            token
            for response in Dataset.from_parquet(str(file))["response_ids"]
            for token in response
        )
    assert pair.stop_tokens <= kept and {token for token, _ in answers.most_common(40)} <= kept
    assert borrows_embedding(pair.draft) == (embedding == "target")
    assert "the draft's output keeps 60 of 2048 tokens" in caplog.text
    quality = description_of(folder)["test"]
    assert (
        0 < quality["after"]["overlap"] < 1
        and quality["after"]["kl"] > 0
        and description_of(folder)["init"]["vocabulary"] == 60
    )
    words = [
        "draft_vocabulary=50",
        "trainer.max_epochs=1",
        f"model.draft={folder}",
        f"paths.run={folder.parents[1]}/again",
    ]
    again = distill_draft(cfg(*words)).folder
    fewer = set(kept_tokens(load_pair("nano", draft=str(again)).draft).tolist())
    assert len(fewer) == 50 and pair.stop_tokens <= fewer < kept


def test_a_draft_that_reads_its_target_becomes_a_folder_of_speculators(cfg, tmp_path, capsys):
    words = ["draft_kind=eagle3", "draft_vocabulary=60", "eagle3.steps=2"]
    folder = distill_draft(cfg(*words, "trainer.max_epochs=4")).folder
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 60
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    with safe_open(folder / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
        assert stored.get_tensor("lm_head.weight").dtype == torch.bfloat16
        assert stored.get_tensor("t2d").sum() == 60
    assert {"d2t", "fc.weight"} <= names and "embed_tokens.weight" not in names
    pair = load_pair("nano", draft=str(folder))
    assert pair.draft_lm.reads_layers == (1, 3, 4) and borrows_embedding(pair.draft)
    assert pair.stop_tokens <= set(kept_tokens(pair.draft).tolist())
    description = description_of(folder)
    assert pair.draft_lm.temperature == description["temperature"]
    expected = {"layers": [1, 3, 4], "steps": 2, "step_decay": 1.0, "format": "speculators"}
    assert description["reads"] == expected
    assert description["loss"] == {"divergence": "forward_kl"}
    quality = description["test"]
    assert quality["after"]["kl"] < quality["before"]["kl"] - 0.1
    card = (folder / "README.md").read_text()
    assert "the inputs of the target's layers 1, 3, 4" in card and "| overlap_3 |" in card
    printed = capsys.readouterr().out
    is_better = f"next: specheads train model.draft={folder}" in printed
    assert is_better != ("WARNING: the draft became worse" in printed)
    # The target is read for its states in any case
    assert not list(tmp_path.glob("data/target_probs/*"))
    with pytest.raises(
        UserError, match="cannot describe the draft, which has norm_before_residual"
    ):
        distill_draft(cfg(f"model.draft={folder}", "eagle3.format=safeailab"))
    # Trained further, it begins where it was
    again = [f"model.draft={folder}", "trainer.max_epochs=1", f"paths.run={tmp_path}/again"]
    more = description_of(distill_draft(cfg(*again)).folder)
    found = [quality["after"]["overlap"], more["test"]["before"]["overlap"]]
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_an_export_is_what_a_user_loads(cfg):
    """The figures of its card are those of the folder in the type in which it runs."""
    made = cfg("draft_kind=eagle3.1", "trainer.max_epochs=1", "draft_vocabulary=100")
    folder = distill_draft(made).folder
    settings = settings_of(Distillation, made)
    initial = load_pair("nano", new_draft=settings.initial_draft)
    data = _responses_of(made, initial, settings)
    splits, _ = load_splits(data, initial, train_samples(data, initial, settings), settings)
    found = draft_quality(load_pair("nano", draft=str(folder)), splits["test"], Warp(0.5, 50), 4)
    assert found == description_of(folder)["test"]["after"]


def test_a_cut_draft_is_cut_further_among_its_own_tokens(nano):
    (stop,) = nano.stop_tokens
    others = [500, 900, *range(1000, 1100)]
    pair = cut(nano, [stop, *others])
    responses = [[np.array([500, 600, 600, 900, 900])]]
    samples = Samples([np.array([0])], responses)
    for most, kept in ((1, []), (2, [900]), (4, [500, 900, 1000]), (2000, others)):
        reduced = _reduced(
            replace(pair, draft=copy.deepcopy(pair.draft)),
            samples,
            Distillation(draft_vocabulary=most),
        )
        assert kept_tokens(reduced.draft).tolist() == sorted([stop, *kept])


def test_embeddings_of_another_size_are_refused_before_responses_are_made(cfg, tmp_path):
    with pytest.raises(UserError, match=r"those are \(2048, 256\), and it needs \(2048, 160\)"):
        distill_draft(cfg("draft_vocabulary=60", "embedding=target"))
    assert not list(tmp_path.glob("data/*"))


def test_gradient_checkpointing_changes_no_number(cfg):
    words = ["trainer.max_epochs=1", "samples=text"]
    folders = []
    for more in ([], ["gradient_checkpointing=true"]):
        folder = distill_draft(cfg(*words, *more)).folder
        folders.append(AutoModelForCausalLM.from_pretrained(folder).state_dict())
        (folder.parent / "checkpoints" / "last.ckpt").unlink()
    for name, weight in folders[0].items():
        torch.testing.assert_close(weight, folders[1][name], atol=1e-5, rtol=0)


def test_a_head_of_the_old_draft_is_refused_unless_any_draft_will_do(cfg, nano, tmp_path):
    folder = distill_draft(cfg("trainer.max_epochs=1")).folder
    (spec,) = HeadTraining(heads="lookahead").specs(nano)
    head = AcceptanceHead(spec.config).eval()
    torch.nn.init.normal_(head.readout.weight)
    where = str(save_head(head, tmp_path / "old"))
    pair = load_pair("nano", draft=str(folder))
    message = f"trained for draft embedded:nano/draft.*but this pair's draft is {folder}"
    with pytest.raises(UserError, match=message):
        find_heads(where, pair, tmp_path, Warp())
    (located,) = find_heads(where, pair, tmp_path, Warp(), any_draft=True).values()
    located.head.check_fits(pair)
    assert find_heads(where, nano, tmp_path, Warp())


def test_a_data_sets_own_response_gets_an_end_token_and_keeps_the_limits(nano):
    ids = encoded_response(nano, "    return 1\n", 10, 100).tolist()
    assert (
        ids[-1] == nano.tokenizer.eos_token_id
        and nano.tokenizer.decode(ids[:-1]) == "    return 1\n"
    )
    assert encoded_response(nano, "    return 1\n", 10, 3).tolist() == ids[:3]
    assert encoded_response(nano, "    return 1\n", nano.window - 2, 100).tolist() == ids[:2]


def test_prompts_without_a_response_are_left_out(cfg, tmp_path, caplog):
    rows = [
        {"question": f"def f{i}(x):\n", "answer": "    return x\n" if i % 2 else ""}
        for i in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [
        "data=alpaca",
        f"data.path={tmp_path}/rows.jsonl",
        "data.template='{question}'",
        "data.response_template='{answer}'",
    ]
    alpaca = composed(
        f"paths.data={tmp_path}/data",
        f"paths.run={tmp_path}/run",
        *data,
        "samples=text",
        "trainer.max_epochs=1",
    )
    with caplog.at_level(logging.INFO):
        folder = distill_draft(alpaca).folder
    assert description_of(folder)["num_prompts"] == 4  # of eight, every other one
    alpaca.data.response_template = None
    with pytest.raises(
        UserError,
        match=r"data.response_template=null, but the data set's own responses are asked for",
    ):
        distill_draft(alpaca)


def test_the_quality_in_the_folder_is_that_of_the_folder(cfg):
    """The figures on the card are those of the draft that a user loads, in half precision too."""
    half = cfg("trainer.max_epochs=1", "model.dtype=bfloat16", "trainer.precision=bf16-mixed")
    folder = distill_draft(half).folder
    pair = load_pair("nano", draft=str(folder), dtype="bfloat16")
    settings = settings_of(Distillation, half)
    initial_pair = load_pair("nano", dtype="bfloat16")
    data = _responses_of(half, initial_pair, settings)
    splits, _ = load_splits(
        data, initial_pair, train_samples(data, initial_pair, settings), settings
    )
    assert (
        draft_quality(pair, splits["test"], Warp(0.5, 50), 4)
        == description_of(folder)["test"]["after"]
    )


def test_nothing_is_dropped_at_random():
    config = OPTConfig(
        vocab_size=29,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        dropout=0.5,
    )
    config.attention_dropout = config.layerdrop = 0.5
    model = OPTForCausalLM(config).bfloat16()
    prepare(model)
    tokens = torch.arange(20)[None]
    first, second = (model(tokens).logits for _ in range(2))
    assert (
        model.training
        and torch.equal(first, second)
        and first.dtype == torch.float32
        and config.dropout == 0.5
    )


def test_the_library_call_is_the_command(cfg, tmp_path):
    """A distillation in plain Python, from the data of the command, has the same weights."""
    pair = load_pair("nano")
    composed_cfg = cfg("trainer.max_epochs=1")
    folder = distill_draft(composed_cfg).folder
    settings = specheads.Distillation(
        trainer={"max_epochs": 1},
        loader={"batch_size": 4},
        num_dev_prompts=3,
    )
    assert settings == settings_of(Distillation, composed_cfg)
    data = _responses_of(composed_cfg, pair, settings)
    distilled = specheads.distill(pair, data, settings, tmp_path / "library")
    assert (
        distilled.folder == tmp_path / "library" / "draft"
        and distilled.after == description_of(folder)["test"]["after"]
    )
    files = [(each / "model.safetensors").read_bytes() for each in (folder, distilled.folder)]
    assert files[0] == files[1]


def test_a_strategy_that_averages_batches_itself_is_refused(tmp_path):
    class Averaging(SingleDeviceStrategy):  # as DeepSpeed's
        handles_gradient_accumulation = True

    settings = Distillation(
        trainer={"accumulate_grad_batches": 2, "strategy": Averaging(), "precision": "32-true"}
    )
    message = r"trainer\.accumulate_grad_batches=2: trainer\.strategy=.*loader\.batch_size"
    with pytest.raises(UserError, match=message):
        new_trainer(settings, tmp_path, [], "cpu", {})


def test_a_loaded_draft_is_not_taken_for_the_initial_draft_that_is_asked_for(cfg, nano):
    with pytest.raises(
        UserError,
        match=r"init_layers=2 trains a new draft, but the pair has the draft embedded:nano/draft",
    ):
        distill_draft(cfg("init_layers=2"), nano)
    with pytest.raises(UserError, match="draft_kind=eagle3 trains a new draft, but the pair has"):
        distill_draft(cfg("draft_kind=eagle3"), nano)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eagle3.target_layers=[1,6]"], r"eagle3.target_layers=\[1, 6\] must be different layers"),
        (["model.quantization=int8"], "a new eagle3 draft' is made of a target whose weights are"),
    ],
)
def test_a_target_that_cannot_be_read_is_refused_before_responses_are_made(
    cfg, tmp_path, words, message
):
    with pytest.raises(UserError, match=message):
        distill_draft(cfg("draft_kind=eagle3", *words))
    assert not list(tmp_path.glob("data/*"))


def test_a_draft_becomes_a_folder_in_safeailabs_format(cfg):
    words = ["draft_kind=eagle3", "draft_vocabulary=60", "eagle3.format=safeailab"]
    folder = distill_draft(cfg(*words, "trainer.max_epochs=1")).folder
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    # Of nano's six layers those of the paper are too near each other
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    assert load_pair("nano", draft=str(folder)).draft_lm.reads_layers == (1, 3, 4)
    card = (folder / "README.md").read_text()
    assert "| format | safeailab |" in card
