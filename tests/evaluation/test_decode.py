"""Which settings an evaluation decodes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from specheads.evaluation.candidates import fixed_length
from specheads.evaluation.decode import best_of_kinds
from specheads.evaluation.report import MEASURED


def test_a_decoded_setting_stands_for_its_kind_where_another_one_is_hardly_faster():
    """Four turns of decoding once chose between settings that were 1 % apart."""
    head = replace(fixed_length(1), family="head_threshold", name="head 0.6", head="some")
    rules = [fixed_length(3), fixed_length(4), fixed_length(5), head, replace(head, name="head 0.7")]
    speeds = {MEASURED: [1.50, 1.52, 1.40, 1.45, 1.55]}
    outcome: Any = SimpleNamespace(candidates=rules, speeds=speeds, achievable=lambda ratio: [1, 4])

    def chosen(*decoded):
        return [rule.name for rule in best_of_kinds(outcome, decoded)]

    assert chosen() == ["fixed_length(num_tokens=4)", "head 0.7"]
    assert chosen("fixed_length(num_tokens=3)", "fixed_length(num_tokens=5)", "head 0.6") == [
        "fixed_length(num_tokens=3)",
        "head 0.7",
    ]  # a head 7 % slower is not enough
    assert chosen("fixed_length(num_tokens=5)") == ["fixed_length(num_tokens=4)", "head 0.7"]
