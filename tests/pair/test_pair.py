import copy
import hashlib
import json
import os
import shutil
from dataclasses import replace
from datetime import date, datetime

import pytest
import torch
from fakes import CountingTokenizer, tiny_llama, tiny_pair
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specheads import UserError, load_pair
from specheads.pair.config import pair_config
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import _check_spread, _check_vocabulary, known_tokens, load_draft, remarks
from specheads.pair.revisions import resolve, revision_at, revision_of, set_draft_temperature
from specheads.pair.sampling import Warp
from specheads.pair.source import checked_device
from specheads.prompts.prompt import response_provenance
from specheads.storage import files


@pytest.fixture
def copies(tmp_path):
    """Folders of nano's target and draft, each with its tokenizer, like a pair of the user."""
    folders = {}
    for role in ("target", "draft"):
        folders[role] = tmp_path / role
        shutil.copytree(resolve(f"embedded:nano/{role}"), folders[role])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve(f"embedded:nano/{file}"), folders[role])
    return folders


def test_a_pair_of_folders_is_the_pair_of_that_name(nano, copies):
    pair = load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")
    assert (pair.draft_revision, pair.target_revision) == (
        nano.draft_revision,
        nano.target_revision,
    )
    # So data is found again
    assert response_provenance(pair, [], Warp(), 0) == response_provenance(nano, [], Warp(), 0)
    assert pair.stop_tokens == nano.stop_tokens == {1}
    tokens = torch.arange(5, 25)[None]
    assert torch.equal(pair.target(tokens).logits, nano.target(tokens).logits)


def test_a_target_placed_by_device_map_is_the_same_model(nano):
    spread = load_pair("nano", device_map="auto", device=None)
    tokens = torch.arange(5, 25)[None].to(spread.target_lm.device)
    expected = nano.target_lm.logits(nano.target_lm.hidden_states(tokens.cpu()))
    torch.testing.assert_close(
        spread.target_lm.logits(spread.target_lm.hidden_states(tokens)).cpu(),
        expected,
        atol=1e-4,
        rtol=0,
    )


def test_a_target_can_be_loaded_without_weights(nano):
    pair = load_pair("nano", only_draft=True)
    assert {weight.device.type for weight in pair.target.parameters()} == {"meta"}
    assert {weight.device.type for weight in pair.draft.parameters()} == {"cpu"}
    assert (pair.target_id, pair.target_revision, pair.window) == (
        nano.target_id,
        nano.target_revision,
        nano.window,
    )
    assert (pair.target_lm.hidden_size, pair.target.dtype) == (
        nano.target_lm.hidden_size,
        nano.target.dtype,
    )
    assert pair.stop_tokens == nano.stop_tokens


def test_each_training_process_uses_a_different_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert checked_device(None) == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert checked_device(None) == "cuda:1"


def test_a_folder_without_weights_has_no_version(nano, tmp_path):
    with pytest.raises(UserError, match="holds no .safetensors"):
        revision_of(nano.draft.config, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "nan"}, "no model config 'nan'; known: .*nano"),
        (
            {
                "draft": "/nowhere/draft",
                "target": "embedded:nano/target",
                "tokenizer": "embedded:nano",
            },
            "no draft folder '/nowhere/draft'; correct model.draft=",
        ),
        (
            {"draft": "embedded:nano/draft", "target": "someone/not-cached"},
            "'someone/not-cached' is no local folder.*HF_HUB_OFFLINE is set",
        ),
        (
            {"name": "nano", "dtype": "float61"},
            "model.dtype=float61 must be a floating-point type; use auto, float32",
        ),
        ({"name": "nano", "device": "gpu9"}, "device='gpu9' cannot be used here"),
        ({"draft": None, "target": "embedded:nano/target"}, "a pair needs both"),
        ({"name": "nano", "tap": 3}, r"model\.tap=3 is not known; .*expected one of draft, target"),
        (
            {"name": "nano", "chat": 1},
            r"model\.chat=1 must be true or false; it is whether instructions",
        ),
    ],
)
def test_a_pair_that_cannot_be_loaded_gets_a_message(arguments, message):
    with pytest.raises(UserError, match=message):
        load_pair(**arguments)


def test_a_config_leaves_keys_to_its_user_and_null_means_the_default():
    config = pair_config("mine", draft="a", target="b", dtype=None)
    assert (config.draft, config.target, config.dtype, config.name) == ("a", "b", "auto", "mine")


def test_tokenizers_are_compared_not_vocabulary_sizes(nano, copies):
    path = copies["draft"] / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]  # the same size, other ids
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="different tokenizers.*2 tokens differ"):
        load_pair(draft=copies["draft"], target=copies["target"])


@pytest.mark.parametrize(
    "files", [("tokenizer.json",), ("tokenizer.json", "tokenizer_config.json")]
)
@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_tokenizer_that_is_named_is_compared_with_those_of_both_models(copies, role, files):
    path = copies[role] / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    if len(files) == 1:
        (copies[role] / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="tokens differ"):
        load_pair(
            draft=copies["draft"], target=copies["target"], tokenizer=resolve("embedded:nano")
        )


@pytest.mark.parametrize("named", ["0", 1.5, [[0]], [0, None], [-1], True, {"end": 1}])
def test_end_tokens_that_are_none_are_named_with_their_file(copies, named):
    path = copies["target"] / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": named}))
    with pytest.raises(UserError, match=r"generation_config\.json.*eos_token_id"):
        load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "part", ["embed_tokens", "mlp.down_proj", "self_attn.v_proj", "model.norm"]
)
@pytest.mark.parametrize("role", ["draft", "target"])
def test_weights_that_are_no_numbers_are_named(copies, role, part, value):
    path = copies[role] / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if part in name)
    weights[name].view(-1)[7] = value
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{role}: the weights {name} hold 1 of \d+ numbers"):
        load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")


def test_a_type_that_is_too_narrow_for_a_model_is_said(copies):
    path = copies["target"] / "model.safetensors"
    weights = {name: weight.float() for name, weight in load_file(path).items()}
    weights["model.norm.weight"] *= 3e38 / weights["model.norm.weight"].abs().max()
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="although all its weights are finite: float32 is too narr"):
        load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")


def test_the_same_vocabulary_with_other_merges_is_noticed():
    class Reversed(CountingTokenizer):
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": super().__call__(text)["input_ids"][::-1]}

    with pytest.raises(UserError, match="the same text gets other ids"):
        known_tokens(CountingTokenizer(5), Reversed(5), "a", "b")


def test_logits_of_padded_embeddings_are_left_out():
    pair = tiny_pair(vocab_size=5)
    pair.target = tiny_llama(8, seed=1, layers=2)
    _check_vocabulary(pair)
    tokens = torch.tensor([[1, 2]])
    logits = pair.target_lm.logits(pair.target_lm.hidden_states(tokens))
    assert logits.shape == (1, 2, 5)
    torch.testing.assert_close(logits, pair.target(tokens).logits[..., :5])


def test_a_model_with_too_few_logits_is_refused():
    pair = tiny_pair(vocab_size=5)
    pair.draft = tiny_llama(4, seed=1)
    with pytest.raises(UserError, match="draft has 4 logits.*5 tokens"):
        _check_vocabulary(pair)


def test_logits_that_a_model_changes_afterwards_are_noticed():
    model = tiny_llama(8, seed=0)
    LanguageModel(model).check()
    plain = model.forward

    def scaled(**kwargs):
        out = plain(**kwargs)
        out.logits = out.logits * 3
        return out

    model.forward = scaled
    with pytest.raises(UserError, match="LlamaForCausalLM changes its logits"):
        LanguageModel(model).check()


# --- from text to ids

VOCABULARY = ["<s>", "</s>", "<unk>", "[INST]", "[/INST]", "User:", "say", "{x}", "{instruction}"]
PLAIN = (  # a chat template that writes no begin token
    "{% for m in messages %}User: {{ m.content }}{% endfor %}"
)
BEGINNING = "{{ bos_token }}" + PLAIN


def word_pair(begins=True, chat_template=None, has_begin=True, ends=False, **changes):
    """A tiny pair whose tokenizer knows VOCABULARY, without a pad token.

    `begins`: it puts <s> in front, `ends`: </s> last.
    """
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        single = "<s> $A </s>" if ends else "<s> $A"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    special = {"bos_token": "<s>"} if has_begin else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", **special
    )
    fast.chat_template = chat_template
    assert fast.pad_token is None
    return replace(tiny_pair(len(VOCABULARY)), tokenizer=fast, **changes)


def text_of(ids):
    return " ".join(VOCABULARY[i] for i in ids)


@pytest.mark.parametrize(
    ("pair", "chats", "text"),
    [
        (word_pair(), False, "<s> say"),
        (word_pair(begins=False), False, "say"),
        (word_pair(ends=True), False, "<s> say"),
        (
            word_pair(ends=True, instruction_format="[INST] {instruction} [/INST]"),
            True,
            "<s> [INST] say [/INST]",
        ),
        (word_pair(has_begin=False, begins=False), False, "say"),
        (word_pair(chat_template=PLAIN), True, "User: say"),
        (word_pair(chat_template=BEGINNING), True, "<s> User: say"),
        (word_pair(chat_template=BEGINNING, begins=False), True, "<s> User: say"),
        (word_pair(chat_template=BEGINNING, chat=False), False, "<s> say"),
        (
            word_pair(chat_template=BEGINNING, instruction_format="[INST] {instruction} [/INST]"),
            True,
            "<s> [INST] say [/INST]",
        ),
        (
            word_pair(instruction_format="[INST] {instruction} [/INST]"),
            True,
            "<s> [INST] say [/INST]",
        ),
        (
            word_pair(begins=False, instruction_format="[INST] {instruction} [/INST]", chat=False),
            True,
            "[INST] say [/INST]",
        ),
    ],
)
def test_an_instruction_is_wrapped_as_the_pair_says(pair, chats, text):
    assert pair.chats is chats
    assert text_of(pair.encode_instruction("say")) == text
    if pair.instruction_format:  # braces of the instruction are text
        wrapped = pair.encode_instruction(" say {x} {instruction}\n")
        assert text_of(wrapped) == text.replace("say", "say {x} {instruction}")


@pytest.mark.parametrize(
    "ids",
    [
        word_pair().encode_instruction("<s> say"),
        word_pair(instruction_format="<s> {instruction}").encode_instruction("say"),
        word_pair(chat_template="{{ bos_token }}{{ messages[0].content }}").encode_instruction(
            "<s> say"
        ),
        word_pair().encode("<s> say").tolist(),
        word_pair(chat_template="{{ bos_token }}{{ messages[0].content }}")
        .encode([{"role": "user", "content": "<s> say"}])
        .tolist(),
    ],
)
def test_the_begin_token_is_never_doubled(ids):
    assert text_of(ids) == "<s> say"


def test_messages_go_through_the_chat_template_whatever_the_instruction_format():
    pair = word_pair(chat_template=BEGINNING, instruction_format="[INST] {instruction} [/INST]")
    assert text_of(pair.encode([{"role": "user", "content": "say"}])) == "<s> User: say"
    with pytest.raises(UserError, match="has no chat template, which chat messages need"):
        replace(pair, tokenizer=word_pair().tokenizer).encode([{"role": "user", "content": "say"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ raise_exception('no') }}",
        "{% for %}",
        "{{ {}.popitem() }}",
    ],
)
def test_whatever_a_chat_template_raises_is_one_sentence(template):
    with pytest.raises(
        UserError,
        match="^the chat template of tiny-target refuses the messages of user .*; give others",
    ):
        word_pair(chat_template=template).encode([{"role": "user", "content": "say"}])


def test_the_fingerprint_follows_how_instructions_are_wrapped():
    pairs = [
        word_pair(),
        word_pair(begins=False),
        word_pair(chat_template=PLAIN),
        word_pair(chat_template=BEGINNING),
        word_pair(instruction_format="[INST] {instruction} [/INST]"),
        word_pair(instruction_format="User: {instruction}"),
    ]
    assert len({pair.encoding_fingerprint() for pair in pairs}) == len(pairs)
    plain, beginning = (
        word_pair(chat_template=text, instruction_format="User: {instruction}")
        for text in (PLAIN, BEGINNING)
    )
    # The template is not used
    assert plain.encoding_fingerprint() == beginning.encoding_fingerprint()


THINKING = "User: {{ messages[0].content }}{% if enable_thinking %} [INST]{% endif %}"


def test_arguments_of_the_chat_template_reach_every_prompt_and_the_fingerprint():
    plain, thinking, not_thinking = (
        word_pair(chat_template=THINKING, chat_template_kwargs=given) for given in ARGUMENTS
    )
    say = [{"role": "user", "content": "say"}]
    for pair, text in (
        (plain, "User: say"),
        (not_thinking, "User: say"),
        (thinking, "User: say [INST]"),
    ):
        assert text_of(pair.encode_instruction("say")) == text_of(pair.encode(say)) == text
    assert len({pair.encoding_fingerprint() for pair in (plain, thinking, not_thinking)}) == 3
    two = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert (
        len(
            {
                word_pair(chat_template=THINKING, chat_template_kwargs=given).encoding_fingerprint()
                for given in two
            }
        )
        == 1
    )
    wrapped = (
        replace(pair, instruction_format="User: {instruction}") for pair in (plain, thinking)
    )
    assert len({pair.encoding_fingerprint() for pair in wrapped}) == 1  # the template is not used


ARGUMENTS = ({}, {"enable_thinking": True}, {"enable_thinking": False})


def test_a_date_in_prompts_is_that_of_loading_and_in_the_fingerprint():
    template = "User: {{ strftime_now('%d %b') if date_string is undefined else date_string }}"
    today, later = (
        word_pair(chat_template=template, loaded_at=datetime(2026, 11, day)) for day in (5, 6)
    )
    assert [pair.render([{"role": "user", "content": "say"}]) for pair in (today, later)] == [
        "User: 05 Nov",
        "User: 06 Nov",
    ]
    assert today.encoding_fingerprint() != later.encoding_fingerprint()
    today, later = (
        replace(pair, chat_template_kwargs={"date_string": "say"}) for pair in (today, later)
    )
    assert (
        today.encoding_fingerprint() == later.encoding_fingerprint()
        and text_of(later.encode_instruction("say")) == "User: say"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokenize": True}, "the chat template of embedded:nano/target reads no tokenize;"),
        (
            {"date_string": date(2026, 11, 5)},
            "Object of type date is not JSON serializable.*put dates in quotes",
        ),
        ("thinking", "must be a set of keys"),
        (
            {"enable_thinkin": False},
            (
                r"the chat template of embedded:nano/target reads no enable_thinkin; correct the"
                r" name, or"
            ),
        ),
    ],
)
def test_arguments_that_the_chat_template_does_not_take_are_user_errors(given, message):
    with pytest.raises(UserError, match=rf"model\.chat_template_kwargs=.*{message}"):
        load_pair("nano", chat_template_kwargs=given)


def test_a_pair_is_loaded_with_its_instruction_format(nano):
    pair = load_pair("nano", instruction_format="# {instruction}\n")
    assert pair.chats and not nano.chats
    assert pair.encode_instruction(" sum ") == nano.encode_instruction("# sum\n")
    assert pair.encoding_fingerprint() != nano.encoding_fingerprint()


def test_a_draft_of_another_temperature_is_another_draft(nano, copies):
    flat = load_pair("nano", draft_temperature=2)
    ids = torch.arange(5, 25)[None]
    states = nano.draft_lm.hidden_states(ids)
    assert torch.equal(flat.draft_lm.hidden_states(ids), states)
    assert torch.equal(flat.draft_lm.logits(states), nano.draft_lm.logits(states) / 2)
    assert torch.equal(
        flat.target_lm.logits(flat.target_lm.hidden_states(ids)),
        nano.target_lm.logits(nano.target_lm.hidden_states(ids)),
    )
    assert flat.draft_revision == f"{nano.draft_revision} at temperature 2"


def test_a_draft_is_saved_with_its_temperature(nano, copies):
    draft = copy.deepcopy(nano.draft)
    set_draft_temperature(draft, 0.8)
    draft.save_pretrained(copies["draft"])
    pair = load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")
    assert pair.draft_lm.temperature == 0.8 and pair.target_lm.temperature == 1
    assert pair.draft_revision == revision_at(copies["draft"]) and pair.draft_revision.endswith(
        " at temperature 0.8"
    )
    assert load_draft(copies["draft"], nano).temperature == 0.8
    above = load_pair(
        draft=copies["draft"],
        target=copies["target"],
        device="cpu",
        dtype="float32",
        draft_temperature=1.5,
    )
    assert above.draft_lm.temperature == 1.5 and above.draft_revision.endswith(
        " at temperature 1.5"
    )
    assert (
        load_pair("nano", draft_temperature=1).draft_revision
        == nano.draft_revision
        == revision_at("embedded:nano/draft")
    )


@pytest.mark.parametrize("temperature", [0, -1, "warm", True])
def test_a_temperature_that_divides_nothing_is_refused(temperature):
    with pytest.raises(
        UserError, match=r"model\.draft_temperature=.* must be a finite number above 0"
    ):
        load_pair("nano", draft_temperature=temperature)


def test_a_target_partly_outside_the_gpus_is_refused():
    _check_spread({"model.embed_tokens": 0, "model.layers.0": 1, "lm_head": "cuda:1"}, "t")
    with pytest.raises(
        UserError,
        match=r"target t does not fit: 2 of 3 parts, 'model.layers.1' first.*model\.device=cuda:1",
    ):
        _check_spread({"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}, "t")


def test_a_target_on_several_devices_is_said_to_be_slow_once(caplog):
    _check_spread({"model.layers.0": 0, "lm_head": 0}, "t")
    _check_spread({}, "t")
    assert not caplog.records
    _check_spread({"model.layers.0": 1, "model.layers.1": 0, "lm_head": 1}, "t")
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(
        "the target t is spread over 2 devices (0, 1): it runs without compilation"
    )
    assert "model.quantization=fp8" in message and "vLLM" in message


def test_a_tokenizer_with_other_ends_than_responses_is_remarked_on_and_ends_no_prompt(
    nano, copies, caplog
):
    usual = word_pair()
    ending = word_pair(ends=True)
    assert not [*remarks(usual)] and usual.encoding_fingerprint() != ending.encoding_fingerprint()
    assert text_of(ending.encode("say </s>")) == "<s> say </s>"  # the user's own
    (remark,) = remarks(ending)
    assert "appends an end token to every text; prompts go without it" in remark
    config = json.loads((copies["target"] / "generation_config.json").read_text()) | {
        "eos_token_id": [5, 7],
        "min_length": 3,
    }
    (copies["target"] / "generation_config.json").write_text(json.dumps(config))
    assert load_pair(
        draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32"
    ).stop_tokens == {5, 7}
    about = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(about) == 2 and "has min_length, which is not done here" in about[0]
    assert (
        f"ends texts with token 1 ({nano.tokenizer.eos_token}), but responses end with [5, 7]"
        in about[1]
    )


# --- versions by content


@pytest.mark.parametrize(
    ("name", "value"), [("rope_theta", 5e5), ("rms_norm_eps", 1e-3), ("num_hidden_layers", 1)]
)
def test_another_config_is_another_version(nano, copies, name, value):
    path = copies["target"] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert revision_at(copies["target"]) != nano.target_revision


def test_notes_in_a_config_are_no_other_version(nano, copies):
    path = copies["target"] / "config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text())
            | {
                "transformers_version": "4.0",
                "_name_or_path": "another",
            }
        )
    )
    assert revision_at(copies["target"]) == nano.target_revision


def test_a_single_changed_weight_is_another_version_and_the_old_one_comes_back(nano, copies):
    path = copies["target"] / "model.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert revision_at(copies["target"]) != nano.target_revision
    path.write_bytes(before)
    assert revision_at(copies["target"]) == nano.target_revision


# --- checkpoints that transformers would read wrongly


def test_a_checkpoint_in_an_unknown_format_is_refused(copies):
    path = copies["target"] / "config.json"
    stored = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    with pytest.raises(
        UserError,
        match=(
            "by the method modelopt, which transformers does not read; give the checkpoint without"
        ),
    ):
        load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")


def test_a_checkpoint_without_some_weights_is_refused(copies):
    path = copies["target"] / "model.safetensors"
    weights = load_file(path)
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        del weights[name]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(
        UserError,
        match=(
            r"has no weights for model.layers.0.mlp.up_proj.weight and 1 others of LlamaForCausalLM"
        ),
    ):
        load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")


def test_a_tensor_of_another_shape_is_named_with_both(copies):
    path = copies["draft"] / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    rows, columns = weights[name].shape
    weights[name] = weights[name][1:].contiguous()
    save_file(weights, path, {"format": "pt"})
    message = rf"has {name} in the shape \[{rows - 1}, {columns}\], but .* \[{rows}, {columns}\]"
    with pytest.raises(UserError, match=message):
        load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")


def test_tensors_that_a_model_does_not_use_are_named(copies, caplog):
    path = copies["draft"] / "model.safetensors"
    weights = load_file(path)
    for layer in (7, 8):
        weights[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.ones(2, 2)
    save_file(weights, path, {"format": "pt"})
    load_pair(draft=copies["draft"], target=copies["target"], device="cpu", dtype="float32")
    (record,) = (record for record in caplog.records if "does not use" in record.getMessage())
    assert "model.layers.7.mlp.up_proj.weight and 1 others" in record.getMessage()


def test_what_was_noted_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path))
    values = iter([["a", 0.5, {"b": None}], "another"])
    for _ in range(2):
        assert files.noted("kind", ["key"], lambda: next(values)) == ["a", 0.5, {"b": None}]


def test_a_file_is_read_again_only_where_its_content_may_have_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    path.write_bytes(b"1")
    recent = files.hash_of(path)
    assert recent == hashlib.sha256(b"1").hexdigest()
    assert not (tmp_path / "cache").exists()  # it may change within the resolution of its time
    monkeypatch.setattr(files, "_SETTLED", -1.0)
    assert files.hash_of(path) == recent
    (note,) = (tmp_path / "cache" / "hashes").iterdir()
    whole = note.read_text()
    # As a full disk leaves it, of an earlier version, and with another value
    for damaged in ("", json.dumps(recent), json.dumps([]), whole.replace(recent, "0" * 64)):
        note.write_text(damaged)
        assert files.hash_of(path) == recent and note.read_text() == whole
    status = path.stat()
    path.write_bytes(b"2")  # as large, and with the old time of change, as cp -p leaves it
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    recent = hashlib.sha256(b"2").hexdigest()
    assert files.hash_of(path) == recent
    path.rename(tmp_path / recent)  # as the hub's cache calls a file of this content
    assert files.hash_of(tmp_path / recent) == recent
