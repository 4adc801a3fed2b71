"""Whether a model or a head is to be had: folders, the hub's cache, and one question to the hub."""

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from specheads.errors import UserError
from specheads.pair.locations import check_available


@pytest.fixture
def asked(monkeypatch):
    """Let the hub answer with headers or an error, `answers`.

    Return the questions, each with its timeout.
    """
    questions: list = []

    class Hub:
        answer: object = {}

        def head(self, url, timeout, **given):
            questions.append((url, timeout))
            if isinstance(self.answer, Exception):
                raise self.answer
            return SimpleNamespace(headers=self.answer)

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub, questions


def test_what_is_here_is_not_asked_for(asked, tmp_path):
    for location in (tmp_path, "embedded:nano/draft", "synthetic:tiny", "~"):
        check_available("target", location)
    assert asked[1] == []


@pytest.mark.parametrize("location", ["./none", "/nowhere/draft", "a/b/c", "two words"])
def test_a_folder_that_is_not_there_is_no_question_for_the_hub(asked, location):
    with pytest.raises(
        UserError, match=f"there is no draft folder '{location}'; correct model.draft="
    ):
        check_available("draft", location)
    assert asked[1] == []


def test_the_hub_is_asked_once_and_for_seconds(asked):
    hub, questions = asked
    check_available("target", "some/model", "v2")
    assert (
        len(questions) == 1
        and "some/model/resolve/v2/config.json" in questions[0][0]
        and questions[0][1] <= 5
    )
    hub.answer = {"X-Error-Code": "GatedRepo"}  # loading it says how to get access
    check_available("target", "some/model")
    hub.answer = {"X-Error-Code": "RepoNotFound"}
    with pytest.raises(
        UserError, match="the hub has no head of that name .* use head=latest, or log in"
    ):
        check_available("head", "some/head")


def test_without_an_answer_the_causes_and_remedies_are_told(asked):
    hub, _ = asked
    hub.answer = OSError("Name or service not known")
    told = (
        "does not answer: Name or service not known.*folder: correct model.target=.*hf download"
        " some/model.*HF_ENDPOINT"
    )
    with pytest.raises(UserError, match=told):
        check_available("target", "some/model")
