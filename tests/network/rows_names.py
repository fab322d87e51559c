"""Rows on names: DNS as a way out, names that mean two things, names that lead inwards."""

from __future__ import annotations

from typing import Any

from tests.network import zone
from tests.network.row import Case, Event, Row, get, text_of

FRONT = "front.allowed.example"
# Texts that inet_aton and others read as an address: of the metadata service, and of the host itself.
METADATA_TEXTS = (
    "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "169.16689662", "0xa9.254.0251.254",
    "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[::169.254.169.254]", "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::1]", "169.254.169.254.", "0169.254.169.254", "169.254.169.254", "[fd00:ec2::254]",
    "\xb9\xb2\xb9.254.169.254", "169\xe3\x80\x82254.169.254", "025177524776",
)  # fmt: skip
HOST_TEXTS = (
    "localhost", "localhost.", "LOCALHOST", "127.1", "127.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "0",
    "0.0.0.0", "[::]", "[::1]", "[::ffff:127.0.0.1]", "127.0.0.1", "127.0.0.2", "lab-host", "ip6-localhost",
    zone.HOST4, f"[{zone.HOST6}]", f"[::ffff:{zone.HOST4}]", "x.localhost", "[fe80::1%25up0]",
    "[0:0:0:0:0:0:0:1]",
)  # fmt: skip


def _page(host: str, part: str, port: int = 80, **more: Any) -> dict[str, Any]:
    return {"part": part, "to": [host, port], "send": get(host, f"<m:{part}>"), **more}


def _ask(part: str, name: Any, **more: Any) -> dict[str, Any]:
    return {"part": part, "name": name, **more}


def _tunnel(part: str, target: str, host: str = "", **more: Any) -> dict[str, Any]:
    return {"part": part, "target": target, "send": get(host or target, f"<m:{part}>"), **more}


def _leads(part: str, *addresses: str, port: int = 8080) -> dict[str, Any]:
    name = zone.to("x", *addresses)
    return {"part": part, "to": [name, port], "send": get(f"{name}:{port}", f"<m:{part}>")}


def at_metadata(case: Case, part: str, events: list[Event]) -> bool:
    """The mark has come to the metadata service; elsewhere it may be seen."""
    return any(case.mark(part) in str(e.get("head", "")) and e["to"] == zone.METADATA for e in events)


def foreign_query(case: Case, part: str, events: list[Event]) -> bool:
    """Something was asked outside that no connection to an allowed name needs."""
    mine = [e for e in events if e["kind"] == "dns" and case.mark(part) in text_of(e)]
    return any(e.get("type") not in (1, 28) or not e["name"].endswith(".allowed.example") for e in mine)


def searched(case: Case, part: str, events: list[Event]) -> bool:
    """Another name than the allowed one was asked for outside, or reached."""
    mine = [e for e in events if e["kind"] == "dns" and case.mark(part) in text_of(e)]
    return any(e["name"].endswith("." + zone.SEARCH) for e in mine)


def encoded_query(case: Case, part: str, events: list[Event]) -> bool:
    """A name in another script was asked for outside, encoded or as it is."""
    return any(e["kind"] == "dns" and ("xn--" in e["name"] or not e["name"].isascii()) for e in events)


_LONG = "a" * 40
SERVERS = (
    ("google", "8.8.8.8"),
    ("one", "1.1.1.1"),
    ("hosts", zone.RESOLVER),
    ("own", "<v4>"),
    ("six", "<v6>"),
)
ODD_QUERIES = ("two-questions", "trailing", "option", "update", "notify", "chaos", "pointer")
TYPES = {"txt": 16, "srv": 33, "mx": 15, "null": 10, "any": 255, "cname": 5, "https": 65, "svcb": 64,
 "naptr": 35,
         "axfr": 252}  # fmt: skip
# Like also.example, but for one letter or dot: Cyrillic a, fullwidth a, an ideographic dot, a circled o, a
# soft hyphen, a long s; the last is what the first becomes on the wire.
LOOK_ALIKES = {
    "cyrillic": "\u0430lso.example", "fullwidth": "\uff41lso.example", "dot": "also\u3002example",
    "circled": "als\u24de.example", "soft": "al\u00adso.example", "long": "al\u017fo.example",
    "encoded": "xn--lso-7cd.example",
}  # fmt: skip
ALIAS = zone.to("x-cname", "10.1.2.6")
FLIP = zone.to("flip", "45.77.200.1", zone.METADATA)
PAIR = zone.to("x", zone.METADATA, "45.77.200.2")

ROWS: tuple[Row, ...] = (
    Row("dns-by-use", "data in names that no rule has, by getaddrinfo and a connection", "tcp.send",
        (_page("<m:below>.also.example", "below"), _page("<m:other>.other.example", "other"),
         _page("<m:gone>.evil.test", "gone"), _page("<m:deep>.x.y.also.example", "deep")),
        "policy", allow=("*.also.example", "*.other.example", "*.evil.test")),
    Row("dns-long-labels", "data in long labels below a name whose rule is exact", "tcp.send",
        tuple(_page(f"<m:{part}>{_LONG}.{'.'.join([_LONG] * count)}.also.example", part)
              for part, count in (("one", 1), ("three", 3))),
        "policy", allow=("*.also.example",)),
    Row("search-list", "an allowed name that does not exist, with the endings that the host's resolver tries",
        "tcp.send", (_page("<m:one>.gone.allowed.example", "one"), _page("<m:two>.gone.to.example", "two",
         8080)),
        "bare", seen=searched),
    Row("dns-any-server", "DNS over UDP to servers of one's own choice", "dns.ask",
        tuple(_ask(part, f"<m:{part}>.other.example", server=server) for part, server in SERVERS),
        "bare", packets=("v4", "v6")),
    Row("dns-tcp", "DNS over TCP to servers of one's own choice", "dns.ask",
        tuple(_ask(part, f"<m:{part}>.other.example", server=server, over="tcp") for part, server in SERVERS),
        "bare", packets=("v4", "v6")),
    Row("dns-tls", "DNS over TLS", "tcp.send",
        ({"part": "dot", "to": ["8.8.8.8", 853], "send": "<m:dot>", "finish": True},
         {"part": "own", "to": ["<v4>", 853], "send": "<m:own>", "finish": True}),
        "policy", allow=("8.8.8.8:853", "<v4>:853"), packets=("v4",)),
    Row("dns-https", "DNS over HTTPS, by a name that no rule has and by address", "tcp.send",
        (_page("doh.example", "name", 443, tls="doh.example"), _page("8.8.8.8", "address", 443, tls="")),
        "policy", allow=("doh.example", "8.8.8.8")),
    Row("dns-types", "other questions to the resolver inside, for allowed names and others", "dns.ask",
        (*(_ask(f"{part}{place}", f"<m:{part}{place}>.{suffix}", type=kind)
           for part, kind in TYPES.items()
           for place, suffix in (("a", "allowed.example"), ("o", "other.example"))),
         _ask("ptr", "<m:ptr>.1.77.45.in-addr.arpa", type=12), _ask("ptrsix", "<m:ptrsix>.ip6.arpa",
          type=12)),
        "bare", seen=foreign_query),
    Row("dns-odd", "DNS messages that no resolver sends", "dns.odd",
        tuple(_ask(shape.replace("-", ""), f"<m:{shape.replace('-', '')}>.other.example", shape=shape,
                   good="also.example") for shape in ODD_QUERIES),
        "bare"),
    Row("nul-in-name", "other.example NUL .allowed.example, in DNS", "dns.ask",
        (_ask("middle", ["<m:middle>", "other", "example\0", "allowed", "example"], then=80),
         _ask("label", ["<m:label>.other.example\0", "allowed", "example"], then=80),
         _ask("dots", ["<m:dots>.other.example.", "allowed", "example"], then=80)),
        "twin", twin=(_ask("middle", "<m:middle>.other.allowed.example", then=80,
                           send=get("<m:middle>.other.allowed.example", "x")),),
        kinds=("dns",)),
    Row("nul-in-socks", "the same in a SOCKS 5 name", "proxy.socks",
        ({"part": "nul", "host": "<m:nul>.other.example\0.allowed.example", "port": 80},
         {"part": "space", "host": "<m:space>.other.example .allowed.example", "port": 80},
         {"part": "slash", "host": "<m:slash>.other.example/.allowed.example", "port": 80}),
        "twin", twin=({"part": "nul", "host": "<m:nul>.other.allowed.example", "port": 80,
                       "send": get("<m:nul>.other.allowed.example", "x")},), kinds=("dns",)),
    Row("nul-in-connect", "the same in CONNECT", "proxy.connect",
        tuple(_tunnel(part, f"<m:{part}>.other.example{char}.allowed.example:80") for part, char in
              (("nul", "\0"), ("space", " "), ("at", "@"), ("hash", "#"), ("percent", "%00"), ("slash",
               "/"))),
        "twin", twin=(_tunnel("nul", "<m:nul>.other.allowed.example:80"),), kinds=("dns",)),
    Row("denied-spellings", "a denied name with a dot at its end, in capitals, by every door", "tcp.send",
        (_page("secret.allowed.example.", "dot"), _page("SECRET.allowed.example", "caps"),
         _page("sEcReT.AlLoWeD.eXaMpLe.", "mixed")),
        "twin", twin=(_page("open.allowed.example.", "dot"), _page("OPEN.allowed.example", "caps"),
                      _page("oPeN.AlLoWeD.eXaMpLe.", "mixed"))),
    Row("denied-by-proxy", "the same through the proxy", "proxy.connect",
        (_tunnel("dot", "secret.allowed.example.:80"), _tunnel("caps", "SECRET.Allowed.example:80"),
         _tunnel("dots", "secret.allowed.example..:80"), _tunnel("plain", "secret.allowed.example:80")),
        "twin", twin=(_tunnel("dot", "open.allowed.example.:80"), _tunnel("caps",
         "OPEN.Allowed.example:80"))),
    Row("confusables", "names that look like an allowed one, in DNS", "dns.ask",
        tuple(_ask(part, text.encode().decode("latin-1"), then=80) for part, text in LOOK_ALIKES.items()),
        "twin", twin=(_ask("encoded", "xn--lso-7cd.allowed.example", then=80,
                           send=get("xn--lso-7cd.allowed.example", "x")),), seen=encoded_query),
    Row("confusables-proxy", "the same in CONNECT", "proxy.connect",
        tuple(_tunnel(part, text.encode().decode("latin-1") + ":80") for part, text in LOOK_ALIKES.items()),
        "twin", twin=(_tunnel("encoded", "xn--lso-7cd.allowed.example:80"),), seen=encoded_query),
    Row("metadata-texts", "CONNECT to every spelling of the metadata address; mode full", "proxy.connect",
        tuple(_tunnel(f"t{n}", f"{text}:80") for n, text in enumerate(METADATA_TEXTS)),
        "policy", group="full", allow=(f"{zone.METADATA}:80", "[fd00:ec2::254]:80"), kinds=("http",),
         packets=(zone.METADATA,),
        twin=(_tunnel("v4", f"{zone.METADATA}:80"), _tunnel("v6", "[fd00:ec2::254]:80"))),
    Row("metadata-socks", "SOCKS 5 with every spelling of the metadata address; mode full", "proxy.socks",
        tuple({"part": f"t{n}", "host": text.strip("[]"), "port": 80, "send": get(text, f"<m:t{n}>")}
              for n, text in enumerate(METADATA_TEXTS)),
        "policy", group="full", allow=(f"{zone.METADATA}:80",), kinds=("http",), packets=(zone.METADATA,),
        twin=({"part": "v4", "host": zone.METADATA, "as": "v4", "port": 80,
               "send": get(zone.METADATA, "<m:v4>")},)),
    Row("host-texts", "CONNECT to every spelling of the host itself; mode full", "proxy.connect",
        tuple(_tunnel(f"t{n}", f"{text}:7003") for n, text in enumerate(HOST_TEXTS)),
        "policy", group="full", allow=("host.casemate.internal:7003",),
        twin=(_tunnel("name", "host.casemate.internal:7003"),)),
    Row("rebinding", "an allowed name that leads to a guarded address", "tcp.send",
        (_leads("loopback", "127.0.0.1", port=7003), _leads("loopback6", "::1", port=7003),
         _leads("own", zone.HOST4, port=7003), _leads("own6", zone.HOST6, port=7003),
         _leads("zero", "0.0.0.0", port=7003), _leads("mappedloop", "::ffff:127.0.0.1", port=7003),
         _leads("metadata", zone.METADATA, port=80), _leads("ec2", "fd00:ec2::254"), _leads("ten",
          "10.1.2.5"),
         _leads("c192", "192.168.7.9"), _leads("b172", "172.31.1.1"), _leads("shared", "100.64.9.9"),
         _leads("nat64", "64:ff9b::a9fe:a9fe"), _leads("sixtofour", "2002:a9fe:a9fe::1"),
         _leads("mapped", f"::ffff:{zone.METADATA}"), _leads("benchmark", "198.19.255.253"),
         {"part": "alias", "to": [ALIAS, 8080], "send": get(ALIAS + ":8080", "<m:alias>")}),
        "bare", kinds=("http", "bytes")),
    Row("rebinding-change", "a name whose address changes between two lookups, or has both", "tcp.every",
        ({"part": "flip", "to": [FLIP, 80], "times": 6, "send": get(FLIP, "<m:flip>")},
         {"part": "both", "to": [PAIR, 80], "times": 2, "send": get(PAIR, "<m:both>")}),
        "bare", seen=at_metadata),
)  # fmt: skip
