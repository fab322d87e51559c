"""What a row of the attack table is, and how its templates become a plan for one run."""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import re
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH = ("root", "uid1000")
ROOT = ("root",)
Event = dict[str, Any]
_NUMBERS = itertools.count(1)
_FIELD = re.compile(r"<(\w+)(?::([a-z0-9]+))?>")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row in one run: its own token and its own addresses, so that whatever arrives has a sender."""

    row: Row
    token: str
    fields: dict[str, str]
    tries: tuple[dict[str, Any], ...]

    def mark(self, part: str) -> str:
        """The word by which a part is known wherever it turns up; also a good label of a name."""
        return f"{self.token}z{part}z"


@dataclasses.dataclass(frozen=True)
class Row:
    """One attack: what is tried inside, and what of it must not be seen outside.

    Each try has a ``part``; a part got through when its mark is in an event of the lab (of the ``kinds``, if
    any are named). With ``packets`` any first packet to one of the row's own addresses is a part, too.

    ``control`` says how the acts succeed: ``policy``, in a sandbox whose policy also has ``allow``; ``twin``,
    in a sandbox, without what is wrong with them; ``bare``, on the lab host without a sandbox, for what no
    policy allows. The control takes the tries of ``twin``, where there are any.
    """

    id: str
    title: str
    act: str
    tries: tuple[dict[str, Any], ...]
    control: str
    allow: tuple[str, ...] = ()
    twin: tuple[dict[str, Any], ...] = ()
    group: str = "list"
    kinds: tuple[str, ...] = ()
    packets: tuple[str, ...] = ()
    control_modes: tuple[str, ...] = BOTH
    seen: Callable[[Case, str, list[Event]], bool] | None = None
    # Parts that the inside must tell, since nothing outside can see them: did the call succeed?
    told: bool = False

    def case(self, twin: bool = False) -> Case:
        """A fresh token and fresh addresses."""
        number = next(_NUMBERS)
        v4 = ipaddress.IPv4Address(f"45.77.{number >> 8}.{number & 255}")
        inner = f"{v4.packed[:2].hex()}:{v4.packed[2:].hex()}"
        fields = {
            "v4": str(v4), "v6": f"2a00:77::{number:x}", "nat64": f"64:ff9b::{inner}",
            "local64": f"64:ff9b:1::{inner}", "sixtofour": f"2002:{inner}::1", "compatible": f"::{inner}",
            "teredo": f"2001::{inner}:0:0:0:1", "hex4": v4.packed.hex(), "reversed": v4.reverse_pointer,
        }  # fmt: skip
        fields = {
            key: value if "." in value or ":" not in value else str(ipaddress.ip_address(value))
            for key, value in fields.items()
        }
        token = "k" + secrets.token_hex(4)
        made = Case(self, token, fields, ())
        tries = self.twin if twin and self.twin else self.tries
        return dataclasses.replace(made, tries=tuple(expand(one, made) for one in tries))

    def parts(
        self, case: Case, events: list[Event], report: dict[str, Any], twin: bool = False
    ) -> dict[str, bool]:
        """What got through."""
        found: dict[str, bool] = {}
        for one in case.tries:
            part = one["part"]
            if self.told:
                found[part] = "got" in report.get(part, {})
            else:
                found[part] = (self.seen or marked)(case, part, events)
        for field in self.packets if self.control != "twin" or not twin else ():
            place = case.fields.get(field, field)
            found["packet-" + field] = any(e["kind"] == "packet" and e.get("to") == place for e in events)
        return found


def marked(case: Case, part: str, events: list[Event]) -> bool:
    """The part's mark is in an event, as text or in capitals or in hexadecimal."""
    mark, kinds = case.mark(part), case.row.kinds
    return any(mark in text_of(event) for event in events if not kinds or event["kind"] in kinds)


def joined(events: list[Event]) -> list[Event]:
    """The events, and for each connection with raw bytes all of them in one, with and without the headers of
    TLS records: a mark may come in pieces.
    """
    streams: dict[int, Event] = {}
    for event in events:
        if event["kind"] == "bytes" and "conn" in event:
            whole = streams.setdefault(event["conn"], {**event, "data": ""})
            whole["data"] += event["data"]
    bare = [{**whole, "data": _unrecorded(whole["data"])} for whole in streams.values()]
    return [*events, *streams.values(), *bare]


def _unrecorded(data: str) -> str:
    found, at = [], 0
    while at + 5 <= len(data):
        size = ord(data[at + 3]) << 8 | ord(data[at + 4])
        found.append(data[at + 5 : at + 5 + size])
        at += 5 + size
    return "".join(found)


def text_of(event: Event) -> str:
    """All of an event's words."""
    return " ".join(str(value) for value in event.values()).lower()


def expand(value: Any, case: Case) -> Any:
    """``<v4>``, ``<m:part>`` and so on, in every text of a template; anything else stays as it is."""
    if isinstance(value, str):
        return _FIELD.sub(lambda found: _field(found, case), value)
    if isinstance(value, dict):
        return {key: expand(inner, case) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [expand(inner, case) for inner in value]
    return value


def _field(found: re.Match[str], case: Case) -> str:
    if found[1] == "m" and found[2]:
        return case.mark(found[2])
    return case.fields.get(found[1], found[0])


def get(host: str, mark: str, path: str = "") -> str:
    """A plain request that carries a mark."""
    return f"GET {path or '/' + mark} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
