"""Rows on connections and packets: everything that a program can send without a name or a proxy."""

from __future__ import annotations

from tests.network import zone
from tests.network.row import ROOT, Row, get

# A port, and what one says there. The lab listens on each.
PORTS = (9, 21, 22, 25, 80, 443, 587, 853, 2375, 3128, 5432, 6379, 8080, 8443, 9000, 27017, 65535)
_TLS = dict.fromkeys(zone.WEB_TLS, "")
_SIXES = {f"<{field}>" for field in ("v6", "nat64", "local64", "sixtofour", "teredo", "compatible")}


def _to(host: str, port: int, part: str, **more: object) -> dict[str, object]:
    """Connect and say what suits the port."""
    name = str(more.pop("name", f"[{host}]" if ":" in host or host in _SIXES else host))
    web = port in zone.WEB or port in _TLS
    send = get(name, f"<m:{part}>") if web else f"<m:{part}>\n"
    made = {"part": part, "to": [host, port], "send": send, "finish": not web, **more}
    return {**made, "tls": ""} if port in _TLS else made


def _datagrams(*places: tuple[str, str, int]) -> tuple[dict[str, object], ...]:
    return tuple({"part": part, "to": [host, port], "send": f"<m:{part}>"} for part, host, port in places)


V6 = "<v6>"

# Sockets of every family that carries packets: name, family, type, protocol.
_OTHER_SOCKETS = (("udplite", 2, 2, 136), ("ping", 2, 2, 1), ("rawicmp", 2, 3, 1), ("rawtcp", 2, 3, 6))

ROWS: tuple[Row, ...] = (
    Row("connect-v4", f"TCP to an IPv4 address that no rule names, {len(PORTS)} ports", "tcp.send",
        tuple(_to("<v4>", port, f"p{port}") for port in PORTS), "policy", allow=("<v4>:*",), packets=("v4",)),
    Row("connect-v6", f"TCP to an IPv6 address that no rule names, {len(PORTS)} ports", "tcp.send",
        tuple(_to(V6, port, f"p{port}") for port in PORTS), "policy", allow=("[<v6>]:*",), packets=("v6",)),
    Row("other-port", "a named host on a port that its rule does not have", "tcp.send",
        (_to("also.example", 8080, "p8080"), _to("also.example", 22, "p22"), _to("also.example", 9000,
         "p9000")),
        "policy", allow=("also.example:8080", "also.example:22", "also.example:9000")),
    Row("fastopen", "TCP Fast Open: data in the first packet", "tcp.fastopen",
        ({"part": "v4", "to": ["<v4>", 8080], "send": get("<v4>", "<m:v4>")},
         {"part": "v6", "to": [V6, 8080], "send": get("[<v6>]", "<m:v6>")}),
        "bare", packets=("v4", "v6")),
    Row("fastopen-option", "TCP Fast Open by the socket's option", "tcp.send",
        (_to("<v4>", 8080, "v4", fastopen="option"), _to(V6, 8080, "v6", fastopen="option")),
        "bare", packets=("v4", "v6")),
    Row("mptcp", "Multipath TCP", "tcp.send",
        (_to("<v4>", 8080, "v4", mptcp=True), _to(V6, 8080, "v6", mptcp=True)), "bare", packets=("v4", "v6")),
    Row("mapped", "an IPv4 address in the IPv6 form ::ffff:", "tcp.send",
        (_to("::ffff:<v4>", 8080, "a", name="<v4>:8080"), _to("::ffff:<v4>", 22, "b")), "policy",
        allow=("<v4>:8080", "<v4>:22"), packets=("v4",)),
    Row("embedded", "IPv4 inside IPv6: NAT64 (both prefixes), 6to4, Teredo, IPv4-compatible", "tcp.send",
        tuple(_to(f"<{field}>", 8080, field) for field in
              ("nat64", "local64", "sixtofour", "teredo", "compatible")),
        "bare", packets=("nat64", "local64", "sixtofour", "teredo", "compatible")),
    Row("address-of-a-name", "the address of an allowed name, without the name", "tcp.send",
        (_to("93.184.216.37", 80, "v4"), _to("2606:2800:220:1::37", 80, "v6")), "policy",
        allow=("93.184.216.37", "[2606:2800:220:1::37]")),
    Row("udp", "UDP to unlisted addresses", "tcp.datagram",
        _datagrams(("ntp", "<v4>", 123), ("any", "<v4>", 51820), ("v6", V6, 4433), ("high", V6, 65535)),
        "bare", packets=("v4", "v6")),
    Row("quic", "UDP 443, as QUIC has it, also to the address of an allowed name", "tcp.datagram",
        tuple({"part": part, "to": [host, 443], "send": "\xc3\0\0\0\1\x08" + f"<m:{part}>".ljust(1200)}
              for part, host in (("unlisted", "<v4>"), ("named", "93.184.216.37"), ("v6", V6))),
        "bare", packets=("v4", "v6")),
    Row("other-sockets", "UDP-Lite, ping and raw IP sockets", "tcp.packet",
        tuple({"part": name, "to": ["<v4>", 4444], "send": "\x08\0\0\0\0\0\0\0" + f"<m:{name}>",
         "family": family,
               "type": kind, "protocol": protocol}
              for name, family, kind, protocol in _OTHER_SOCKETS),
        "bare", told=True, packets=("v4",), control_modes=ROOT),
    Row("packet-socket", "frames straight to a device", "tcp.packet",
        ({"part": "frame", "to": ["lo", 0x0800], "send": "\0" * 64, "family": 17, "type": 3, "protocol": 0},),
        "bare", told=True, control_modes=ROOT),
    Row("guarded", "private, shared, link-local and metadata addresses, the host's own; mode full",
     "tcp.send",
        tuple(_to(host, port, part) for part, host, port in (
            ("metadata", zone.METADATA, 80), ("aliyun", "100.100.100.200", 80), ("azure", "168.63.129.16",
             80),
            ("oracle", "192.0.0.192", 80), ("ec2v6", "fd00:ec2::254", 80), ("ten", "10.1.2.3", 5432),
            ("b172", "172.16.9.9", 8080), ("c192", "192.168.7.7", 8080), ("shared", "100.64.1.2", 8080),
            ("linklocal", "169.254.9.9", 8080), ("ula", "fd12:3456::1", 8080), ("own4", zone.HOST4, 7003),
            ("own6", zone.HOST6, 7003), ("benchmark", "198.19.255.254", 8080),
        )), "bare", group="full"),
    Row("guarded-named", "the same, each of which a rule may name", "tcp.send",
        (_to(zone.METADATA, 80, "metadata"), _to("10.1.2.4", 5432, "ten"), _to("fd12:3456::2", 8080, "ula"),
         _to("192.168.7.8", 8080, "c192"), _to("100.64.1.3", 8080, "shared")),
        "policy", group="full",
        allow=(f"{zone.METADATA}:80", "10.0.0.0/8:5432", "[fd12:3456::/32]:8080", "192.168.7.8:8080",
               "100.64.1.3:8080")),
    Row("loopback", "the host's loopback and its wildcard services by loopback addresses; mode full",
     "tcp.send",
        (_to("127.0.0.1", 7001, "v4"), _to("::1", 7001, "v6"), _to("127.8.8.8", 7003, "other"),
         _to("::ffff:127.0.0.1", 7003, "mapped"), _to("0.0.0.0", 7003, "zero"), _to("::", 7003,
          "unspecified"),
         _to("localhost", 7003, "name")),
        "bare", group="full"),
)  # fmt: skip
