"""Changes are told in fragments, so that parallel work never meets in one file."""

from __future__ import annotations

import re

import casemate
from tests.repo.tree import ROOT, listed

KINDS = ("added", "changed", "fixed", "removed", "security")


def test_fragments_are_well_formed() -> None:
    """A fragment is ``name.kind.md``, holds list items, and speaks to users: no file names of the source."""
    for path in listed():
        if path.parent.name != "changelog.d" or path.name == "README.md":
            continue
        assert re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(KINDS)})\.md", path.name), path.name
        text = path.read_text()
        assert text.startswith("- "), path.name
        assert "src/" not in text, path.name


def test_released_versions_are_told() -> None:
    """The changelog has the unreleased part on top, and the version is one that could be released."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(r"\d+\.\d+\.\d+", casemate.__version__)
