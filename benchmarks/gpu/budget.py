"""What each step should take on a GPU, by arithmetic from the models' shapes and the GPU's data sheet, next to what was measured.

A step at batch 1 reads its weights once, so its time is their bytes over the memory's bandwidth; a step of training is its
operations over the peak. Both are limits, of which the goals are shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.machine import DATA_SHEETS, is_called
from benchmarks.gpu.training import ALONE, DEPTHS, LABELLED, REJECT_WEIGHTS, grid
from benchmarks.results import Column, Table, Value
from specheads import AcceptanceHead
from specheads.synthetic import SHAPES

GPU = "H200"
BYTES = 2  # of a weight in bfloat16
FLOAT32 = 989 / 67  # the peak of bfloat16 operations over that of float32 without TF32, of its data sheet
CONTEXT = 256  # positions in memory
Documents = Mapping[str, Mapping[str, Any]]  # a script's JSON by the script's name


@dataclass(frozen=True)
class Sizes:
    """The weights of a model that a forward pass multiplies by, and the bytes that one reads at batch 1."""

    layers: int
    output: int
    read_bytes: int

    @classmethod
    def of(cls, shape: str) -> "Sizes":
        """Return those of a shape of specheads/synthetic.py."""
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
        output, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        weights = sum(weight.numel() for weight in model.parameters())
        layers = weights - output.numel() - (0 if output is table else table.numel())
        config = model.config
        memory = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * CONTEXT
        return cls(layers, output.numel(), BYTES * (layers + output.numel() + memory))


def tables(documents: Documents) -> list[Table]:
    """Return the goals, the steps of decoding and the speeds, with what `documents` measured."""
    return [goal_table(documents), step_table(documents), speed_table(documents)]


def goal_table(documents: Documents) -> Table:
    """Return the goals next to what was measured."""
    reached = measured_goals(documents)
    rows = [[goal.text, goal.script, goal.bound, goal.limit, reached.get(name)] for name, goal in GOALS.items()]
    columns = [Column("goal"), Column("script"), Column("limit is"), Column("limit", "fixed:2"), Column("measured", "fixed:2")]
    return Table("goals", "The goals, as ratios", columns, rows)


def measured_goals(documents: Documents) -> dict[str, float]:
    """Return what was measured of each goal."""
    parts = [part for document in documents.values() for part in document["parts"].values()]
    return {name: value for part in parts for name, value in part.get("goals", {}).items()}


def step_table(documents: Documents) -> Table:
    """Return the seconds of steps and rounds: at full bandwidth, at the goals, and measured."""
    gpu = gpu_of(documents)
    least = [Sizes.of(shape).read_bytes / DATA_SHEETS[gpu][0] for shape in ("llama3.1-8b", "llama3.2-1b")]
    limit = {name: goal.limit for name, goal in GOALS.items()}
    at_goals = [seconds / limit["target_alone"] for seconds in least]
    columns_of_steps = (step_seconds(*least, 1, 1), step_seconds(*at_goals, limit["verification_of_8"], limit["round"]))
    measured = {row["step"]: row["seconds"] for row in _rows(documents, "round", "sampled_steps")}
    measured |= {f"round, {row['rule']}": row["round_seconds"] for row in _rows(documents, "round", "rounds")}
    rows = [[name, *(seconds[name] for seconds in columns_of_steps), measured.get(name)] for name in columns_of_steps[0]]
    columns = [Column("step"), *(Column(name, "ms") for name in ("at full bandwidth", "at the goals", "measured"))]
    title = f"Steps of Llama 3.1 8B and drafts of Llama 3.2 1B in bfloat16 on one {gpu}, {CONTEXT} positions of context"
    return Table("steps", title, columns, rows)


def step_seconds(target: float, draft: float, verification: float, overhead: float) -> dict[str, float]:
    """Return the seconds of steps and rounds.

    Args:
        target, draft: seconds of a step of each.
        verification: of 8 tokens, in steps of the target.
        overhead: a round's seconds over those of its forward passes.
    """
    steps = {"target alone": target, "verification of 8": target * verification, "draft step": draft}
    return steps | {f"round, fixed K={length}": overhead * (length * draft + target * verification) for length in (4, 8)}


def gpu_of(documents: Documents) -> str:
    """Return the name of the data sheet of the GPU that was measured, or of the one that the arithmetic is for."""
    names = [document["machine"]["gpu"] or "" for document in documents.values()]
    return next((sheet for name in names for sheet in DATA_SHEETS if is_called(name, sheet)), GPU)


def speed_table(documents: Documents) -> Table:
    """Return tokens per second: at full bandwidth or peak, at the goals, and measured."""
    bandwidth, peak = DATA_SHEETS[gpu_of(documents)]
    target, draft = (Sizes.of(shape) for shape in ("llama3.1-8b", "llama3.2-1b"))
    alone, share = bandwidth / target.read_bytes, GOALS["target_alone"].limit
    # Half of a text is the response, whose tokens alone need the output embedding.
    per_token = 6 * (draft.layers + draft.output / 2) + 2 * (target.layers + target.output / 2)
    speed = peak / per_token
    responses = {row["rows"]: row["tokens_per_second"] for row in _rows(documents, "data", "responses")}
    steps = _rows(documents, "training", "distillation")
    distilled = next((row["tokens_per_second"] for row in steps), None)
    rows: list[list[Value]] = [
        [f"responses, {count} at once", count * alone, count * alone * share, responses.get(count)] for count in (1, 16)
    ]
    rows.append(["distillation of 1B from 8B", speed, speed * GOALS["distillation"].limit, distilled])
    columns = [Column("what"), *(Column(name, "fixed:0") for name in ("at the limit", "at the goals", "measured"))]
    return Table(
        "speeds",
        f"Tokens per second on one {gpu_of(documents)}; responses while weights are most of what a step reads",
        columns,
        rows,
    )


def head_ratio(hidden_size: int, draft: Sizes, of_heads: float = 1.0) -> float:
    """Return the multiply-adds of a training step of the paper's 20 heads over those of a single one.

    A step reads the draft's states once, and multiplies by a head's weights in three products for each labelled position.

    Args:
        of_heads: the time of one of a head's multiply-adds, which are in float32, in those of the draft in bfloat16.
    """
    with torch.device("meta"):
        banks = [grid(hidden_size, DEPTHS, REJECT_WEIGHTS), grid(hidden_size, [ALONE], [1.0])]
        sizes = [sum(w.numel() for spec in specs for w in AcceptanceHead(spec.config).parameters()) for specs in banks]
    twenty, single = (draft.layers + 3 * LABELLED * size * of_heads for size in sizes)
    return twenty / single


def _rows(documents: Documents, script: str, part: str) -> list[Mapping[str, Any]]:
    """Return the rows of a part, none where it was not measured."""
    return documents.get(script, {}).get("parts", {}).get(part, {}).get("rows", [])
