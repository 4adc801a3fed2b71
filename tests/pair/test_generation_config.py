"""What a target's generation config says of sampling is what every command does, unless it is told
otherwise.
"""

import logging

import pytest
import torch
from fakes import FewPrompts, tiny_pair

import specheads
from specheads import SpeculativeDecoder, UserError, Warp, generate_baseline
from specheads.commands.compose import command_config, settings_of
from specheads.data_gen.run import Stage, next_stage
from specheads.data_gen.settings import DataGeneration
from specheads.evaluation.probe.probe import Probe, probe
from specheads.evaluation.prompt_sets import PromptData
from specheads.pair.generation_config import TargetWarp
from specheads.pair.pair import _UNDONE, remarks
from specheads.prompts.prompt import Prompt, text_id


def sampled(**values):
    """Return a pair whose target has these values in its generation config."""
    pair = tiny_pair(30, scale=3.0)
    pair.target.generation_config.update(**values)
    return pair


@pytest.mark.parametrize(
    "said",
    [
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.6, "top_k": 4, "min_p": 0.1},
        {"min_p": 0.3},
    ],
    ids=str,
)
def test_the_warp_is_that_of_the_targets_own_generate(said):
    pair = sampled(do_sample=True, **said)
    prompt = torch.tensor([[1, 2, 3]])
    how = {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
    made = pair.target.generate(prompt, max_new_tokens=4, pad_token_id=0, **how)
    for logits, scores in zip(made.logits, made.scores, strict=True):
        torch.testing.assert_close(
            TargetWarp().of(pair)(logits), scores.softmax(-1), atol=1e-6, rtol=0
        )
    decoder = SpeculativeDecoder(pair, engine="eager")
    assert decoder.warp == TargetWarp().of(pair) and type(decoder.warp) is Warp


def test_given_values_win_one_by_one_and_the_log_says_once_where_each_is_from(caplog):
    caplog.set_level(logging.INFO)
    pair = sampled(temperature=0.6, top_k=-1)
    for words, expected in {
        (): Warp(0.6, 0),
        ("warp.temperature=0.7", "warp.min_p=0.1"): Warp(0.7, 0, min_p=0.1),
        ("warp=null",): Warp(0.6, 0),
        ("warp.temperature=1", "warp.top_k=5", "warp.top_p=0.9", "warp.min_p=0.1"): Warp(
            1, 5, 0.9, 0.1
        ),
        ("warp.temperature=0",): Warp(0, 0),
    }.items():
        for command, cls in {
            "train": specheads.HeadTraining,
            "data_gen": DataGeneration,
            "probe": Probe,
        }.items():
            assert settings_of(cls, command_config(command, words)).for_pair(pair).warp == expected
    assert DataGeneration(warp=Warp(top_p=0.5)).for_pair(pair).warp == Warp(top_p=0.5)
    lines = [record.message for record in caplog.records if record.message.startswith("warp:")]
    assert lines[:2] == [
        (
            "warp: temperature=0.6 (the target's), top_k=0 (the target's), top_p=1 (transformers'"
            " default), min_p=0 (transformers' default)"
        ),
        (
            "warp: temperature=0.7 (given), top_k=0 (the target's), top_p=1 (transformers'"
            " default), min_p=0.1 (given)"
        ),
    ]
    assert len(lines) == 4


def test_what_no_warp_does_is_named_where_it_is_on():
    off = {
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": [],
        "min_length": 0,
        "typical_p": 1.0,
    }
    assert not [
        *remarks(
            sampled(temperature=0.5, eos_token_id=[1, 2], pad_token_id=0, max_length=50, **off)
        )
    ]
    on = {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [3],
        "min_length": 5,
    }
    (remark,) = remarks(sampled(**on))
    assert remark.startswith(
        "the generation config of tiny-target has"
        f" {', '.join(sorted(on, key=list(_UNDONE).index))}, which"
    )


@pytest.mark.parametrize("said", [{}, {"do_sample": False}, {"do_sample": True}], ids=str)
def test_a_target_that_says_nothing_of_how_to_sample_has_the_usual_warp(said):
    pair = sampled(**said)
    assert (
        DataGeneration().for_pair(pair).warp == Warp(top_k=50)
        and SpeculativeDecoder(pair, engine="eager").warp == Warp()
    )
    assert DataGeneration().for_pair(sampled(**said, temperature=0.6)).warp == Warp(0.6, 50)


def test_the_warp_of_the_target_is_in_the_key_of_its_data(tmp_path):
    prompts = [Prompt(text_id(text), "train", text) for text in ("abc", "bcd")]

    def stage(settings, **said):
        stage = next_stage(sampled(**said), prompts, settings, tmp_path)
        assert isinstance(stage, Stage)
        return stage

    usual = stage(DataGeneration())
    own = stage(DataGeneration(), temperature=0.6, top_k=20)
    assert usual.store.provenance["warp"] == {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    assert (
        own.settings.warp == Warp(0.6, 20)
        and own.store.folder == stage(DataGeneration(warp=Warp(0.6, 20))).store.folder
    )
    assert (
        own.store.folder
        != usual.store.folder
        == stage(DataGeneration(warp=Warp(1.0, 50)), temperature=0.6).store.folder
    )


ENTRIES = {
    "data": lambda pair, data, path: next_stage(pair, [], DataGeneration(), path),
    "train_heads": lambda pair, data, path: specheads.train_heads(
        pair, data, specheads.HeadTraining(), path
    ),
    "distill": lambda pair, data, path: specheads.distill(
        pair, data, specheads.Distillation(), path
    ),
    "evaluate": lambda pair, data, path: specheads.evaluate(
        pair, {}, specheads.Evaluation(), data, (path, path)
    ),
    "probe": lambda pair, data, path: probe(pair, Probe(), data, path, str, {}),
    "SpeculativeDecoder": lambda pair, data, path: SpeculativeDecoder(pair, engine="eager"),
    "Baseline": lambda pair, data, path: generate_baseline(pair, [1], engine="eager"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_everything_that_samples_asks_the_target(entry, tmp_path):
    with pytest.raises(
        UserError,
        match=r"generation config of tiny-target: top_p=7.0 must be .* by the keys warp\.\*",
    ):
        ENTRIES[entry](sampled(top_p=7.0), PromptData(FewPrompts()), tmp_path)
