"""What a launcher is told: both forms of a command say the same, and nonsense is refused."""

from __future__ import annotations

import json

import pytest

from casemate.errors import SandboxError
from casemate.isolation.process.spec import Late, encode
from casemate.sys import packets

LATE = [
    Late(["true"], {}, "/w", False),
    Late(["a", "", "b\nc", "\udcff"], {"A": "1=2", "B": "", "C=D": "x"}, "/w/ü", True, "/dev/pts/0", 0o77),
    Late(["5", "2"], {"HOME": "/h"}, "", False, umask=0),
]


@pytest.mark.parametrize("late", LATE)
def test_a_command_comes_back_from_its_words(late: Late) -> None:
    """A child is given the very command that its launcher was told, as a keeper is by its client."""
    words = packets.split(encode(late.as_words()))
    assert Late.from_words(words).as_dict() == late.as_dict()
    assert Late.from_dict(json.loads(json.dumps(late.as_dict()))).as_dict() == late.as_dict()


@pytest.mark.parametrize("field", ["argv", "env", "cwd"])
def test_nul_reaches_no_child(field: str) -> None:
    """A NUL in an argument, a variable or a path is refused in both forms, and not taken for two words."""
    late = Late(["a"], {"A": "1"}, "/w", False)
    assert encode(late.as_words())  # control
    if field == "argv":
        late.argv = ["a", "b\0c"]
    elif field == "env":
        late.env = {"A": "1\0LD_PRELOAD"}
    else:
        late.cwd = "/w\0/x"
    with pytest.raises(SandboxError, match="NUL"):
        encode(late.as_words())
    with pytest.raises(SandboxError, match="NUL"):
        Late.from_dict(late.as_dict())


@pytest.mark.parametrize("window", [[24, 80], [24, 80, 0, 0, 0], [-1, 80, 0, 0], [24, 1 << 16, 0, 0]])
def test_a_terminals_size_is_checked(window: list[int]) -> None:
    """A size that no terminal can have is refused, and does not end the keeper that would set it."""
    data = Late(["a"], {}, "/w", True, window=(24, 80, 0, 0)).as_dict()
    assert Late.from_dict(data).window == (24, 80, 0, 0)  # control
    assert Late.from_dict({**data, "window": []}).window == ()
    with pytest.raises(SandboxError, match="window"):
        Late.from_dict({**data, "window": window})
