"""How well a response answers, by the response in the data set: `data.score=`."""

import re
from collections.abc import Sequence
from decimal import Decimal

from specheads.errors import UserError

SIGN = r"(?:(?<![\w)])-)?\$?"  # after a letter, a digit or a bracket it is a hyphen or a minus between two numbers
NUMBER = re.compile(rf"{SIGN}(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|{SIGN}(?<![\d.])\.\d+")
FINAL_ANSWER = "####"  # which precedes it in GSM8K's responses


def exact_number(response: str, reference: str) -> float:
    """Return 1 if the last number of a response is that of the reference, else 0; a response without a number is wrong.

    Source: Cobbe et al. 2021 (GSM8K), whose references end with `#### 42`.
    """
    number = last_number(response)
    return float(number is not None and number == last_number(reference.rpartition(FINAL_ANSWER)[2]))


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, None if there is none; commas group digits, and $ may precede them."""
    numbers = NUMBER.findall(text.replace("\u2212", "-"))
    return Decimal(re.sub("[,$]", "", numbers[-1])) if numbers else None


def rouge_l(response: str, reference: str) -> float:
    """Return the F-measure of the longest common subsequence of words, from 0 to 1; case and signs are left out.

    Source: Lin 2004 (ROUGE-L), as torchmetrics computes it, without stemming.
    """
    from torchmetrics.functional.text import rouge_score  # slow to import

    return float(rouge_score(response, reference, rouge_keys="rougeL")["rougeL_fmeasure"])


SCORES = {"exact_number": exact_number, "rouge_l": rouge_l}  # the values of data.score


def check_references(score: str, references: Sequence[str | None]) -> None:
    """Raise UserError if no reference is there, or if one has no number where numbers are compared."""
    given = [reference for reference in references if reference is not None]
    if not given:
        raise UserError(
            f"data.score={score} compares responses with those of the data set, but none of {len(references)} prompts has one in "
            "the fields of data.response_template; give other fields, or use data.score=null."
        )
    if score == "exact_number":
        for reference in given:
            if last_number(reference.rpartition(FINAL_ANSWER)[2]) is None:
                raise UserError(
                    f"data.score=exact_number compares numbers, but a response of the data set has none: {reference[-60:]!r}; "
                    "give other fields in data.response_template, or use data.score=rouge_l or null."
                )
