"""What comes over a socket is checked field by field: every malformed value is one error, none a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.errors import SandboxError
from casemate.isolation.process.spec import Direct, Late, Spec, Stack, View, encode
from casemate.sys import packets

text = st.text(st.characters(exclude_characters="\0"), max_size=20)
number = st.integers(0, 1 << 62)

specs = st.builds(
    Spec,
    root=st.lists(st.lists(text, max_size=3), max_size=3),
    views=st.lists(
        st.builds(View, text, text, st.booleans(), st.none() | st.tuples(number, number)), max_size=3
    ),
    home=st.dictionaries(text, text, max_size=3),
    binds=st.lists(st.tuples(text, text), max_size=3),
    scratch=number,
    keep_base=text,
    tops_on_disk=st.booleans(),
    scratch_image=st.booleans(),
    rlimits=st.dictionaries(st.sampled_from(("CORE", "NOFILE", "NPROC", "FSIZE", "DATA")), number),
    memory=st.none() | number,
    pids=st.none() | number,
    cpu=st.none() | st.floats(0.01, 1000),
    words=st.lists(text, max_size=3),
    landlock=st.booleans(),
    memfd_exec=st.booleans(),
    network_host=st.booleans(),
    require_group=st.booleans(),
    hostname=text,
    devices=st.lists(text, max_size=2),
    hide=st.lists(text, max_size=2),
    stack=st.none() | st.builds(Stack, text, text, st.lists(text, max_size=3), st.lists(text, max_size=3)),
    direct=st.none()
    | st.builds(
        Direct, target=text, judge=text, paths=st.lists(text, max_size=2), protect=st.lists(text, max_size=2),
        readable=st.lists(text, max_size=2), git_path=text, lock=text,
    ),
)  # fmt: skip
lates = st.builds(
    Late,
    argv=st.lists(text, min_size=1, max_size=5),
    env=st.dictionaries(text, text, max_size=5),
    cwd=text,
    tty=st.booleans(),
    pts=text,
    umask=st.integers(0, 0o777),
    window=st.just(()) | st.tuples(*[st.integers(0, 65535)] * 4),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def over_the_wire(data: object) -> Any:
    return json.loads(json.dumps(data))


@given(specs)
def test_spec_round_trip(spec: Spec) -> None:
    """A specification comes back as it was."""
    assert over_the_wire(Spec.from_dict(over_the_wire(spec.as_dict())).as_dict()) == over_the_wire(
        spec.as_dict()
    )


@given(lates)
def test_late_round_trip(late: Late) -> None:
    """A command comes back as it was, as JSON and as words."""
    assert Late.from_dict(over_the_wire(late.as_dict())).as_dict() == late.as_dict()
    words = packets.split(encode(late.as_words()))
    assert Late.from_words(words).as_dict() == late.as_dict() | {"window": []}


def taken_or_refused(kind: Any, fields: object) -> Any:
    """What comes of the fields; None if they were refused, which is always by the same code."""
    caught = None
    try:
        return kind.from_dict(fields)
    except SandboxError as error:
        caught = error
    assert caught.code == "bad-request"
    return None


@given(specs, st.data())
def test_one_wrong_field(spec: Spec, data: st.DataObject) -> None:
    """Any field of a wrong kind, missing or added is refused with a code, and nothing else happens."""
    fields = over_the_wire(spec.as_dict())
    name = data.draw(st.sampled_from(sorted(fields)))
    kind = data.draw(st.sampled_from(("replace", "remove", "add")))
    if kind == "replace":
        fields[name] = data.draw(anything)
    elif kind == "remove":
        del fields[name]
    else:
        fields["nonsense"] = 1
    taken = taken_or_refused(Spec, fields)
    if taken is not None:
        assert kind == "replace", "a record has exactly its fields"
        assert over_the_wire(taken.as_dict()) == fields, "what is taken is taken as it is"


@given(lates, st.data())
def test_one_wrong_field_of_a_command(late: Late, data: st.DataObject) -> None:
    """The same for the command."""
    fields = over_the_wire(late.as_dict())
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(anything)
    taken = taken_or_refused(Late, fields)
    if taken is not None:
        if name == "umask":
            fields["umask"] &= 0o777
        assert over_the_wire(taken.as_dict()) == fields


@given(anything)
def test_anything_at_all(data: object) -> None:
    """Whatever JSON there is, it is a record or an error with a code."""
    for kind in (Spec, Late):
        with pytest.raises(SandboxError) as caught:
            kind.from_dict(data)
        assert caught.value.code == "bad-request"


def test_particular_mistakes() -> None:
    """Mistakes that matter: no command, NUL bytes, a number as a flag, an unknown limit, a fraction."""
    late = Late(["true"], {}, "/", False).as_dict()
    for name, value in (
        ("argv", []),
        ("argv", ["a\0b"]),
        ("env", {"A": "a\0b"}),
        ("cwd", "a\0b"),
        ("tty", 1),
        ("umask", True),
        ("umask", 1.5),
        ("env", [["A", "b"]]),
        ("window", [1, 2, 3]),
        ("window", [1, 2, 3, 70000]),
    ):
        with pytest.raises(SandboxError):
            Late.from_dict(late | {name: value})
    spec = Spec(
        root=[], views=[], home={}, binds=[], scratch=0, keep_base="/", tops_on_disk=False, rlimits={},
        memory=None, pids=None, cpu=None, words=[],
    ).as_dict()  # fmt: skip
    assert Spec.from_dict(over_the_wire(spec)).as_dict() == spec, "the control"
    for name, value in (
        ("rlimits", {"RTPRIO": 1}),
        ("rlimits", {"CORE": "0"}),
        ("memory", "512M"),
        ("memory", 1.0),
        ("cpu", "1"),
        ("views", [["/a", "/a", True]]),
        ("views", [["/a", "/a", 1, None]]),
        ("views", [["/a", "/a", True, [1]]]),
        ("root", [["dir", 1]]),
        ("root", ["dir"]),
        ("binds", [["/a"]]),
        ("tops_on_disk", None),
        ("scratch", True),
    ):
        with pytest.raises(SandboxError):
            Spec.from_dict(spec | {name: value})


def test_words_that_no_child_can_take() -> None:
    """Halves of characters and NUL bytes are an error with a code, not a crash in the launcher."""
    for word in ("a\0b", "\ud800"):
        with pytest.raises(SandboxError) as caught:
            encode(["true", word])
        assert caught.value.code == "bad-request"
    assert packets.split(encode(["a", "", "\udcff\n"])) == ["a", "", "\udcff\n"]
