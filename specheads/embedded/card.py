"""The model card of an embedded pair."""

from collections.abc import Callable

from specheads.embedded.recipe import PairRecipe


def card(pair: PairRecipe, results: dict) -> str:
    """Return the card for `results`, the content of `training.json`."""
    roles = [role for role in ("target", "draft") if role in results]
    start = None if pair.start is None else pair.start.name
    columns: list[tuple[str, Callable[[dict], str]]] = [
        ("parameters", "{parameters:,}".format_map),
        (f"tokens seen{f', after those of {start}' if start else ''}", _tokens_seen),
        ("seconds of training", "{seconds:,}".format_map),
    ]
    if pair.figures_script is None:  # which computes them, too
        columns += [(f"{split} loss, nats per response token", f"{{loss[{split}]}}".format_map) for split in ("dev", "test")]
    rows = "".join(f"| {name} | {' | '.join(text(results[role]) for role in roles)} |\n" for name, text in columns)
    sources = "".join("| {name} | {version} | {licence} | {functions:,} |\n".format(**row) for row in results["sources"])
    distilled = [role for role in roles if "distilled" in results[role]]
    trained = [role for role in roles if role not in distilled]
    models = "Two Llama-architecture models" if len(trained) == 2 else f"A Llama-architecture {trained[0]}"
    if pair.tokenizer is None:
        made = f"{models} and a byte-level BPE tokenizer, trained from scratch"
    else:
        begun = f"from the weights of {start}" if start else "from scratch"
        made = f"{models}, trained {begun} with the tokenizer of {pair.tokenizer.name}"
    added = f" Its {distilled[0]} was distilled by `specheads distill`." if distilled else ""
    seed = results["target"]["recipe"]["seed"]
    return (
        f"---\nlicense: apache-2.0\n---\n# {pair.name}, an embedded pair\n\n"
        f"{made} by `python -m specheads.{pair.name}.build` to write the body of a Python function from its signature and "
        f"docstring, so that every part of specheads runs on a laptop.{added} The code that it writes is Python-like, not "
        "useful.\n\n"
        f"| | {' | '.join(roles)} |\n|---|{'---|' * len(roles)}\n{rows}\n"
        f"{_figures(pair, results)}"
        f"Trained on {results['corpus_tokens']:,} tokens of documented functions found on one machine, de-duplicated by syntax "
        f"tree; seed {seed}, recipe in `training.json`; on a 2-core CPU that had other work to do. Files of "
        "the standard library were split by a hash of their path before training: half of them (dev) and a quarter (test) were "
        "never trained on, nor any function elsewhere with the same body or the same signature and docstring.\n\n"
        f"| source | version | licence | functions |\n|---|---|---|---|\n{sources}"
    )


def _tokens_seen(results: dict) -> str:
    """Return how much a model was trained on; a distilled draft learned from responses of its target."""
    if "distilled" not in results:
        return f"{results['tokens']:,}"
    distilled = results["distilled"]
    return f"{distilled['steps']:,} steps of distillation on {distilled['num_prompts']:,} prompts"


def _figures(pair: PairRecipe, results: dict) -> str:
    """Return the table of figures that the pair's script has computed; nothing before it has."""
    rows = "".join(f"| {name} | {value} |\n" for name, value in results.get("figures", {}).items())
    if not rows:
        return ""
    return (
        f"On functions that were held out, sampling at temperature 1, top-k 50 (computed by `python {pair.figures_script}` at commit "
        f"1a2ca02):\n\n| | |\n|---|---|\n{rows}\n"
    )
