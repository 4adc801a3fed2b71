from importlib.metadata import PackagePath

import pytest

from specheads.embedded import notice
from specheads.embedded.notice import LIBRARY, is_of_the_whole, licence_texts


@pytest.mark.parametrize("name", [LIBRARY, "numpy", "pydantic", "torch"])
def test_installed_packages_have_their_licence(name):
    assert any("copyright" in text.lower() for text in licence_texts(name))


def test_a_source_without_a_licence_file_is_named_with_what_it_states(monkeypatch):
    monkeypatch.setattr(notice, "licence_texts", lambda name: [])
    text = notice.notice([{"name": "numpy", "version": "9.9", "licence": "BSD-3-Clause", "functions": 1, "sha256": ""}])
    assert "numpy 9.9" in text and "Its licence, as stated: BSD-3-Clause. Authors: Travis E. Oliphant et al." in text


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("one-1.0.dist-info/LICENSE", True),
        ("one-1.0.dist-info/licenses/LICENSE.txt", True),
        ("one-1.0.dist-info/licenses/third_party/two/LICENSE", False),
        ("one/LICENSE", False),
    ],
)
def test_licences_of_parts_are_told_apart(file, expected):
    assert is_of_the_whole(PackagePath(file)) == expected
