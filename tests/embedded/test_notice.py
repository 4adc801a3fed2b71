from importlib.metadata import PackagePath

import pytest

from specheads.embedded.notice import LIBRARY, is_of_the_whole, licence_texts


@pytest.mark.parametrize("name", [LIBRARY, "numpy", "pydantic", "torch"])
def test_installed_packages_have_their_licence(name):
    assert any("copyright" in text.lower() for text in licence_texts(name))


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
