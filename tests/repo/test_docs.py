"""The documents are true: generated ones are fresh, and what they point to exists."""

from __future__ import annotations

import re

import pytest

from docs.generate import documents
from tests.repo.tree import ROOT, listed, short

PATH = re.compile(r"`((?:src|tests|scripts|docs|bench|bin|changelog\.d|\.ci)/[\w./-]+)`|\]\(([\w./-]+)\)")


@pytest.mark.parametrize("name", documents())
def test_generated_documents_are_fresh(name: str) -> None:
    """A generated document is what ``scripts/docs`` would write now."""
    assert (ROOT / name).read_text() == documents()[name], "run scripts/docs"


def test_what_documents_point_to_exists() -> None:
    """Every path of the repository that a document names is there."""
    missing = []
    for path in listed():
        if path.suffix != ".md":
            continue
        for match in PATH.finditer(path.read_text()):
            name = match[1] or match[2]
            if not ((ROOT / name).exists() or (path.parent / name).exists()):
                missing.append(f"{short(path)}: {name}")
    assert missing == []
