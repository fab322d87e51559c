"""Protected names: no spelling that some file system takes for the name escapes the table."""

from __future__ import annotations

import os

from hypothesis import assume, example, given
from hypothesis import strategies as st

from casemate.workspace.names import printable
from casemate.workspace.protected import TABLE, Protected, fold, wildcard

PROTECTED = Protected()
LITERAL = sorted(
    name for names in TABLE.values() for name in names.split() if "*" not in name and "/" not in name
)
IGNORED = st.sampled_from(
    "\u200b\u200c\u200d\u200e\u202a\u202e\u206a\ufeff\u00ad\u2060\ufe0f\u180b\U000e0001"
)
DIRECTORY = st.sampled_from(["", "a", "a/b", "src/deep/er", "node_modules/x"])


@st.composite
def spelled(draw: st.DrawFn) -> str:
    """A protected name in another case, with ignorable characters, wide letters, dots and spaces behind."""
    name = draw(st.sampled_from(LITERAL))
    spelling = ""
    for character in name:
        if draw(st.booleans()):
            character = character.upper()
        if character.isalpha() and draw(st.integers(0, 5)) == 0:
            character = chr(ord(character) - 0x20 + 0xFF00)  # fullwidth: compatible with the plain letter
        spelling += character + (draw(IGNORED) if draw(st.integers(0, 5)) == 0 else "")
    return spelling + draw(st.sampled_from(["", ".", " ", ". .", "::$INDEX_ALLOCATION", ":stream"]))


@given(DIRECTORY, spelled())
@example("", ".g\u200cit")
@example("", ".GIT...")
def test_no_spelling_escapes(directory: str, name: str) -> None:
    """Every spelling of a protected name is protected, wherever it is."""
    rule = PROTECTED.match(directory, name)
    if "node_modules" in directory and rule is None:
        assert fold(name) in {fold(ci) for ci in TABLE["ci"].split()}
    else:
        assert rule is not None, ascii(name)
    path = f"{directory}/{name}" if directory else name
    assert ("node_modules" in directory) or PROTECTED.judge(f"{path}/below/it") is not None


@given(st.text(min_size=1, max_size=30))
def test_fold_is_stable(name: str) -> None:
    """Folding twice is folding once."""
    assume("/" not in name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        assume(False)
    assert fold(fold(name)) == fold(name)


@given(st.from_regex(r"[a-z]{1,8}(_[a-z]{1,5})?\.(py|rs|js|txt|md|c)", fullmatch=True), DIRECTORY)
def test_ordinary_names_are_free(name: str, directory: str) -> None:
    """The control: ordinary source files are not protected, unless the table names them."""
    assume(name not in LITERAL)
    assert PROTECTED.match(directory, name) is None


@given(st.text("ab*?", max_size=8), st.text("ab", max_size=12))
def test_wildcards(pattern: str, name: str) -> None:
    """The matcher agrees with the plain definition of ``*`` and ``?``."""

    def slow(pattern: str, name: str) -> bool:
        if not pattern:
            return not name
        if pattern[0] == "*":
            return slow(pattern[1:], name) or (bool(name) and slow(pattern, name[1:]))
        return bool(name) and pattern[0] in ("?", name[0]) and slow(pattern[1:], name[1:])

    assert wildcard(name, pattern) == slow(pattern, name)


@given(st.binary(min_size=1, max_size=30), st.binary(min_size=1, max_size=30))
def test_printable_is_safe_and_unambiguous(one: bytes, other: bytes) -> None:
    """What is shown cannot move a cursor, and two different names never look the same."""
    shown = printable(os.fsdecode(one))
    assert shown.isprintable()
    assert (shown == printable(os.fsdecode(other))) == (one == other)
