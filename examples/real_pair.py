# %% [markdown]
# # A real pair on one GPU
#
# From two models on the hub to an answer: is a head, or a better draft, worth having for this pair
# on this machine? Every step is a command of `specheads`, so each can be run by itself, is resumed
# by the same command after a crash, and says what comes next.
#
# By arithmetic a GPU of 24 GB is enough for SmolLM2, and 40 GB for Qwen3; it has not been run on
# one yet. All of it takes some hours; the first answer, of `probe`, minutes.

# %%
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

PAIRS = {
    "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "qwen3": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"),
}
CHOSEN = "smollm2"
# The embedded pair with few prompts: does every step run?
SMALL = bool(os.environ.get("SPECHEADS_SMALL"))

if SMALL:
    pair = [
        "model=nano",
        "data.num_train=24",
        "data.num_dev=6",
        "data.num_test=6",
        "data.max_new_tokens=16",
    ]
    probe_sizes = ["num_prompts=6", "num_live_prompts=1", "repeats=2", "max_new_tokens=16"]
    evaluate_sizes = ["num_prompts=4", "num_dev_prompts=4", "num_live_prompts=2"]
    train_sizes = ["trainer.max_epochs=1"]
    draft_sizes = ["trainer.max_epochs=1"]
else:
    draft, target = PAIRS[CHOSEN]
    pair = ["model=mine", f"model.draft={draft}", f"model.target={target}", "data=alpaca"]
    pair += ["data.num_train=8000", "data.num_dev=400", "data.num_test=400"]
    probe_sizes = []
    evaluate_sizes = []
    train_sizes = []
    draft_sizes = []


def specheads(verb, *words):
    """Run a command; its output is shown as it comes."""
    print(f"$ specheads {verb} {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "specheads", verb, *words], check=True)


def newest(pattern):
    """Return the newest folder or file in outputs/ that fits a pattern."""
    return str(max(Path("outputs").glob(pattern), key=lambda path: path.stat().st_mtime))


# %% [markdown]
# ## Is it worth it?
#
# `probe` trains nothing. It says how far draft and target agree, what steps cost on this machine,
# and which way to decode would pay.

# %%
specheads("probe", *pair, *probe_sizes)

# %% [markdown]
# ## Data and a head
#
# The target answers the prompts (add `runner=vllm` where vLLM is installed), both models label
# drafted tokens, a head learns.

# %%
specheads("data", *pair)
specheads("train", *pair, *train_sizes)

# %% [markdown]
# ## What it is worth
#
# Every stopping rule is replayed on the same recorded prompts, and the best ones are decoded. Open
# `report.html` in the folder that it names.

# %%
specheads("evaluate", *pair, "head=latest", *evaluate_sizes)

# %% [markdown]
# ## A better draft
#
# The draft learns from the target's responses. It is another draft then, so it gets a head of its
# own.

# %%
specheads("distill", *pair, *draft_sizes)
better = [*pair, f"model.draft={newest('distill/*/draft')}"]
specheads("train", *better, *train_sizes)
specheads("evaluate", *better, "head=latest", *evaluate_sizes)

# %% [markdown]
# ## Inside vLLM
#
# The head ends the drafts of vLLM's own draft model.

# %%
if importlib.util.find_spec("vllm") and not SMALL:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=PAIRS[CHOSEN][1],
        speculative_config={
            "method": "draft_model",
            "model": PAIRS[CHOSEN][0],
            "num_speculative_tokens": 8,
        },
        additional_config={"specheads": {"head": newest("head/*/heads/*")}},
        async_scheduling=False,
    )
    print(
        llm.generate(["Explain speculative decoding."], SamplingParams(max_tokens=128))[0]
        .outputs[0]
        .text
    )
