"""What is published says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest

from casemate.errors import PolicyError
from casemate.policy import parse, reference
from casemate.policy.model import CACHES, DEGRADE_WORDS, PRESETS

DOC = Path(__file__).parents[3] / "docs" / "policy.md"


def test_the_reference_is_fresh() -> None:
    """docs/policy.md is what ``casemate policy schema --markdown`` prints."""
    assert DOC.read_text() == reference.markdown()


def test_the_reference_does_not_tell_of_the_machine_it_was_made_on() -> None:
    """The defaults in it are rules, not this host's numbers."""
    assert "3/4 of the machine" in reference.markdown()
    for word in (*PRESETS, *DEGRADE_WORDS, *CACHES):
        assert f"`{word}`" in reference.markdown()


@pytest.mark.parametrize("managed", [False, True])
def test_the_schema_is_closed(managed: bool) -> None:
    """No table of the schema takes a key that it does not name, bar the variables that a person names."""
    schema = cast("dict[str, Any]", reference.json_schema(managed=managed))
    for name, table in schema["$defs"].items():
        assert table["additionalProperties"] is False, name
        for key, facts in table["properties"].items():
            assert "$ref" in facts or facts.get("description"), f"{name}.{key} has no description"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("memory", ["8G", "512 MiB", "1.5g", "unlimited", "4194304"], ["8X", "-1", "", "1 0G", "G"]),
        ("timeout", ["90s", "1h30m", "90", "unlimited", "1.5h"], ["soon", "1 h", "-1s", "h"]),
        ("pids", ["16", "unlimited"], ["1.5", "-1", "many"]),
        ("cpu", ["1.5", "2", "unlimited"], ["two", "-1", ""]),
    ],
)
def test_the_schemas_patterns_agree_with_the_parser(field: str, good: list[str], bad: list[str]) -> None:
    """A text that the schema takes is one that ``load`` takes, and the other way round."""
    from casemate.policy import units

    parsers = {
        "memory": lambda text: units.parse_size(text, least=0), "timeout": units.parse_duration,
        "pids": lambda text: units.parse_count(text, least=1), "cpu": units.parse_cpu,
    }  # fmt: skip
    schema = cast("dict[str, Any]", reference.json_schema())
    options = schema["$defs"]["RawResources"]["properties"][field]["anyOf"]
    (pattern,) = [option["pattern"] for option in options if option["type"] == "string"]
    for text in good:
        parsers[field](text)
        assert re.search(pattern, text), text
    for text in bad:
        with pytest.raises(ValueError, match=r"."):
            parsers[field](text)
        assert not re.search(pattern, text), text


def test_the_example_in_the_reference_is_a_valid_policy() -> None:
    """What a reader copies works."""
    (example,) = re.findall(r"```toml\n(.*?)```", reference.markdown(), re.DOTALL)
    parse.policy(example.encode(), "p.toml", name="user")
    with pytest.raises(PolicyError):
        parse.policy(example.replace("deny", "denny").encode(), "p.toml", name="user")
