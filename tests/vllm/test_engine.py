"""vLLM with a head on its draft model: tokens and distribution are those of the target."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file
from statistics_helper import chi_square_p_value
from transformers import AutoModelForCausalLM

NAMES = ("read", "count", "merge", "parse", "close")
ARGUMENTS = ("a", "path", "x=1", "*b")
PROMPTS = [f"def {name}({argument}):\n" for name in NAMES for argument in ARGUMENTS]
FALSE_ALARM = 1e-6


def greedy(count, **more):
    return vllm.SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **more
    )


def tokens(engine, prompts, params):
    """Return what an engine says."""
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


GREEDY = [greedy(16 + 3 * number) for number in range(len(PROMPTS))]  # of different lengths


@pytest.fixture(scope="module")
def expected(engine):
    """Return what the target alone says."""
    return tokens(engine(alone=True), PROMPTS, GREEDY)


def noted_drafts(engine):
    """Note all drafts from now on."""
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    drafter = executor.driver_worker.worker.model_runner.drafter
    noted = []
    propose = drafter.propose

    def proposed(*arguments, **others):
        drafts = propose(*arguments, **others)
        noted.extend(map(list, drafts))
        return drafts

    drafter.propose = proposed
    return noted


@pytest.mark.parametrize("threshold", [0.6, None])
def test_greedy_tokens_are_the_targets(engine, expected, threshold):
    made = engine(given={"threshold": threshold})
    drafts = noted_drafts(made)
    assert tokens(made, PROMPTS, GREEDY) == expected
    lengths = list(map(len, drafts))
    assert len(set(lengths)) > 2 and max(lengths) <= 6  # the head stops at different places


def test_preempted_requests_and_shared_prefixes_change_nothing(engine, expected, monkeypatch):
    # Memory for fewer tokens than four requests have at their ends.
    made = engine(
        num_gpu_blocks_override=10, max_model_len=128, enable_prefix_caching=True, block_size=32
    )
    scheduler = made.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda *given, **more: preempted.append(1) or preempt(*given, **more),
    )
    for _ in range(2):  # the second time prompts are in the cache
        assert tokens(made, PROMPTS, GREEDY) == expected
    assert preempted


def test_requests_that_come_late_and_end_early_change_nothing(engine, expected):
    made = engine()
    core = made.llm_engine
    done = {}
    added = 0
    while len(done) < len(PROMPTS):
        if added < len(PROMPTS):  # one more request after each step, so that rows move
            core.add_request(str(added), PROMPTS[added], GREEDY[added])
            added += 1
        for output in core.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
    assert [done[number] for number in range(len(PROMPTS))] == expected


def test_vllm_bounds_drafts_by_the_number_of_requests(engine, expected):
    made = engine(speculative={"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 4, 0]]})
    drafts = noted_drafts(made)
    assert tokens(made, PROMPTS, GREEDY) == expected
    lengths = list(map(len, drafts))
    # Four at once until the last ones are left
    assert lengths.count(0) > len(lengths) / 2 and 0 < max(lengths) <= 3


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("threshold", [0.6, None])
def test_the_first_two_sampled_tokens_follow_the_target(engine, folders, method, threshold):
    """Chi-square over pairs of tokens at top-k 50; false alarm 1e-6."""
    made = engine(
        max_num_seqs=16, speculative={"draft_sample_method": method}, given={"threshold": threshold}
    )
    count = 1500
    prompt = made.get_tokenizer()("import os\n")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float32)

    def law(texts):
        with torch.no_grad():
            logits = model(torch.tensor(texts)).logits[:, -1].double()
        kept = logits.topk(50).values[:, -1:]
        return torch.where(logits >= kept, logits, -torch.inf).softmax(dim=-1)

    first = law([prompt])[0]
    starts = first.nonzero().squeeze(1)
    pairs = first[starts, None] * law([[*prompt, token] for token in starts.tolist()])
    sampled = {"temperature": 1.0, "top_k": 50, "max_tokens": 6, "ignore_eos": True}
    params = [vllm.SamplingParams(seed=seed, detokenize=False, **sampled) for seed in range(count)]
    said = tokens(made, [{"prompt_token_ids": prompt}] * count, params)
    places = {token: place for place, token in enumerate(starts.tolist())}
    observed = torch.zeros_like(pairs)
    for row in said:
        observed[places[row[0]], row[1]] += 1
    assert chi_square_p_value(observed.flatten(), pairs.flatten()) > FALSE_ALARM


def test_a_head_of_another_draft_is_refused(engine, folders, head, tmp_path):
    shutil.copytree(head, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    content = json.loads(path.read_text())
    content["draft"]["revision"] = "0" * 16
    path.write_text(json.dumps(content))
    with pytest.raises(Exception, match="revision"):
        engine(given={"head": str(tmp_path / "other")})


def test_a_head_that_would_be_ignored_is_refused(engine, monkeypatch):
    with pytest.raises(Exception, match="has the method ngram: it would be ignored"):
        engine(speculative={"method": "ngram", "model": None, "prompt_lookup_max": 2})
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(
        Exception,
        match="model runner V2, where it would be ignored; set VLLM_USE_V2_MODEL_RUNNER=0",
    ):
        engine()


# What one process of vLLM, which reads its variables only once, does with a speculative config; it
# prints tokens or why not.
ONE_ENGINE = """
import json, sys
import vllm
from specheads.integrations.vllm import register

register()
target, options = json.loads(sys.argv[1])
try:
    limits = {"max_model_len": 128, "max_num_seqs": 4}
    engine = vllm.LLM(model=target, dtype="float32", enforce_eager=True, **limits, **options)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    answered = engine.generate(["def read(a):\\n"], params, use_tqdm=False)
    print(json.dumps({"ids": list(answered[0].outputs[0].token_ids)}))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""


def what_vllm_does(runner, target, **options):
    """Return the tokens of an engine of its own, or its error."""
    given = json.dumps([str(target), options])
    asked = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run(
        [sys.executable, "-c", ONE_ENGINE, given],
        check=False,
        env=asked,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return (
        json.loads(ran.stdout.splitlines()[-1])
        if ran.stdout.strip()
        else {"error": ran.stderr[-500:]}
    )


@pytest.fixture(scope="module")
def cut_draft(folders, tmp_path_factory):
    """Return the folder of nano's draft with logits for its first 1,024 tokens alone, stored as
    EAGLE-3's drafts are.
    """
    folder = tmp_path_factory.mktemp("cut") / "draft"
    shutil.copytree(folders["draft"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:1024].clone()
    save_file(
        tensors | {"d2t": torch.zeros(1024, dtype=torch.long)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"draft_vocab_size": 1024, "tie_word_embeddings": False})
    )
    return folder


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_docs_say_what_each_runner_takes(folders, head, cut_draft, runner):
    """The table of docs/decoders.md, row by row.

    Where it is wrong, the failure shows what this version does.
    """
    number = str(int(runner == "V2"))
    alone = None
    found = []
    for draft, with_head in itertools.product((folders["draft"], cut_draft), (False, True)):
        drafted = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
        options = {"speculative_config": drafted}
        if with_head:
            given = {"head": str(head), "threshold": 0.6, "any_draft": True}
            options["additional_config"] = {"specheads": given}
        did = what_vllm_does(number, folders["target"], async_scheduling=False, **options)
        if "ids" in did:
            alone = alone or what_vllm_does("0", folders["target"])["ids"]
            found.append("yes" if did["ids"] == alone else "wrong tokens")
        elif re.search("names a head, but|which vLLM's draft models cannot have", did["error"]):
            found.append("rejected with an error message")
        else:
            is_triton = "requires Triton" in did["error"]
            found.append("needs Triton" if is_triton else "vLLM's own error")
            print(did["error"])
    version = ".".join(vllm.__version__.split(".")[:2])
    text = (Path(__file__).parents[2] / "docs" / "decoders.md").read_text()
    row = f"| {version} | {runner} | {' | '.join(found)} |"
    assert row in text, f"docs/decoders.md lacks the row\n{row}"


def test_the_settings_of_an_evaluation_are_ones_that_vllm_takes(folders, tmp_path):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from specheads.integrations.engines import ENGINES, DraftLength, EngineDrafting

    lengths = [DraftLength(1, 5), DraftLength(4, 3), DraftLength(16, 0)]
    written = ENGINES["vllm"][1](EngineDrafting(str(folders["draft"]), lengths, None))
    flag, _, config = written.partition(" ")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", str(folders["target"]), "--dtype", "float32", flag, config.strip("'")]
    given = EngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()
    assert given.speculative_config.num_speculative_tokens == 5
    assert json.loads(config.strip("'"))["num_speculative_tokens_per_batch_size"] == [
        [1, 1, 5],
        [2, 4, 3],
        [5, 16, 0],
    ]
