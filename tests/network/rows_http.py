"""Rows on names inside a conversation: proxies, Host, SNI, framing. No name but the decided one goes out."""

from __future__ import annotations

from typing import Any

from tests.network import zone
from tests.network.row import Case, Event, Row, get

FRONT = "front.allowed.example"
OTHER = ("http", "bytes", "sni")


def _raw(part: str, *pieces: str, port: int = 80, host: str = FRONT, **more: Any) -> dict[str, Any]:
    """Bytes to the allowed host; ``@`` in them is a host that no rule has."""
    name = f"<m:{part}>.other.example"
    return {
        "part": part,
        "to": [host, port],
        "pieces": [piece.replace("@", name) for piece in pieces],
        **more,
    }


def _good(part: str, *pieces: str, **more: Any) -> dict[str, Any]:
    """The same with the name that was dialled."""
    name = f"<m:{part}>.allowed.example"
    pieces = tuple(piece.replace("@", name).replace(FRONT, name) for piece in pieces)
    return {**_raw(part, *pieces, **more), "to": [name, more.get("port", 80)]}


def _tunnel(part: str, target: str, send: str = "", **more: Any) -> dict[str, Any]:
    return {"part": part, "target": target, "send": send or get(target, f"<m:{part}>"), **more}


def _socks(part: str, host: str, port: int, **more: Any) -> dict[str, Any]:
    return {"part": part, "host": host, "port": port, "send": get(host, f"<m:{part}>"), **more}


def _absolute(part: str, host: str, header: str = "") -> dict[str, Any]:
    return {"part": part, "send": get(header or host, f"<m:{part}>", f"http://{host}/<m:{part}>")}


def _hello(shape: str, **more: Any) -> dict[str, Any]:
    part = shape.replace("-", "")
    return {"part": part, "shape": shape, "to": [FRONT, more.pop("port", zone.RAW)],
            "sni": f"<m:{part}>.other.example", "good": FRONT, "finish": True, **more}  # fmt: skip


def _right(part: str, shape: str, **more: Any) -> dict[str, Any]:
    name = f"<m:{part}>.allowed.example"
    return {**_hello(shape, **more), "part": part, "to": [name, more.get("port", zone.RAW)], "sni": name}


ONE = f"GET /a HTTP/1.1\r\nHost: {FRONT}\r\n\r\n"
BAD = "GET /b HTTP/1.1\r\nHost: @\r\nConnection: close\r\n\r\n"
PLAIN = (
    ("first", (BAD,)), ("pipelined", (ONE + BAD,)), ("absolute", ("GET http://@/ HTTP/1.1\r\nHost: @\r\n\r\n",
     )),
    ("mixed", (f"GET http://@/ HTTP/1.1\r\nHost: {FRONT}\r\nConnection: close\r\n\r\n",)),
    ("afterpost", (f"POST /a HTTP/1.1\r\nHost: {FRONT}\r\nContent-Length: 3\r\n\r\nabc" + BAD,)),
    ("afterchunks", (f"POST /a HTTP/1.1\r\nHost: {FRONT}\r\nTransfer-Encoding: chunked\r\n\r\n"
                     "1\r\nx\r\n0\r\n\r\n" + BAD,)),
    ("old", ("GET / HTTP/1.0\r\nHost: @\r\n\r\n",)),
)  # fmt: skip
ODD = (
    ("twice", (f"GET / HTTP/1.1\r\nHost: {FRONT}\r\nHost: @\r\n\r\n",)),
    ("twiceback", (f"GET / HTTP/1.1\r\nHost: @\r\nHost: {FRONT}\r\n\r\n",)),
    ("spacecolon", ("GET / HTTP/1.1\r\nHost : @\r\n\r\n",)),
    ("folded", (f"GET / HTTP/1.1\r\nHost: {FRONT}\r\n @\r\n\r\n",)),
    ("foldedempty", ("GET / HTTP/1.1\r\nHost:\r\n @\r\n\r\n",)),
    ("leading", ("\r\n\r\nGET / HTTP/1.1\r\nHost: @\r\n\r\n",)),
    ("barelf", ("GET / HTTP/1.1\nHost: @\n\n",)),
    ("lower", ("get / HTTP/1.1\r\nHost: @\r\n\r\n",)),
    ("odd", ("FROB / HTTP/1.1\r\nHost: @\r\n\r\n",)),
    ("nine", ("GET /@\r\n",)),
    ("version", ("GET / HTTP/7.3\r\nHost: @\r\n\r\n",)),
    ("userinfo", (f"GET / HTTP/1.1\r\nHost: {FRONT}@@\r\n\r\n",)),
    ("comma", (f"GET / HTTP/1.1\r\nHost: {FRONT}, @\r\n\r\n",)),
    ("crhost", (f"GET / HTTP/1.1\r\nHost: {FRONT}\rHost: @\r\n\r\n",)),
    ("tabs", ("GET\t/\tHTTP/1.1\r\nHost:\t@\r\n\r\n",)),
    ("nulhost", (f"GET / HTTP/1.1\r\nHost: {FRONT}\0@\r\n\r\n",)),
    ("spaces", ("GET  /  HTTP/1.1\r\nHost: @\r\n\r\n",)),
    ("connect", ("CONNECT @:80 HTTP/1.1\r\nHost: @:80\r\n\r\n",)),
    ("h2c", ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
             "\0\0\x2e\1\5\0\0\0\1\x82\x84\x86\x41\x2a@",)),
    ("upgrade", (f"GET / HTTP/1.1\r\nHost: {FRONT}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
                 "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n", BAD)),
    ("websocket", (f"GET / HTTP/1.1\r\nHost: {FRONT}\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n", BAD)),
    ("slow", ("G", "ET / HTTP/1.1\r\nHost: @\r\n\r\n")),
    ("slowodd", ("FROB /", " HTTP/1.1\r\nHost: @\r\n\r\n")),
    ("slowcontrol", ("FROB /\x01", " HTTP/1.1\r\nHost: @\r\n\r\n")),
    ("longmethod", ("F" * 40 + " / HTTP/1.1\r\nHost: @\r\n\r\n",)),
    ("longline", ("FROB /" + "a" * 9000, " HTTP/1.1\r\nHost: @\r\n\r\n")),
    ("manylines", ("\r\n" * 4200, "GET / HTTP/1.1\r\nHost: @\r\n\r\n")),
    ("oddmethod", ("FR(OB / HTTP/1.1\r\nHost: @\r\n\r\n",)),
    ("late", ("", BAD)),
)  # fmt: skip

_HIDDEN = "GET /<m:%s> HTTP/1.1\r\nHost: <m:%s>.other.example\r\nX: "


def _smuggle(
    part: str, headers: str, body: str, *, port: int = 80, before: str = "POST / HTTP/1.1"
) -> dict[str, Any]:
    """A request whose body holds another: ``%H`` is that one, ``%L`` the length of everything."""
    hidden = _HIDDEN % (part, part)
    body = body.replace("%H", hidden)
    # The token has a known length: eight digits of hexadecimal after a letter.
    length = len(body.replace(f"<m:{part}>", f"k12345678z{part}z"))
    text = f"{before}\r\nHost: {FRONT}\r\n{headers}\r\n\r\n".replace("%L", str(length)) + body
    return {"part": part, "to": [FRONT, port], "send": text, "finish": True}


SMUGGLED = (
    _smuggle("clte", "Content-Length: %L\r\nTransfer-Encoding: chunked", "0\r\n\r\n%H"),
    _smuggle("tecl", "Transfer-Encoding: chunked\r\nContent-Length: 4", "93\r\n%H\r\n0\r\n\r\n", port=8080),
    _smuggle("tespace", "Content-Length: %L\r\nTransfer-Encoding : chunked", "0\r\n\r\n%H"),
    _smuggle("tecase", "Content-Length: %L\r\ntRANSFER-eNCODING: CHUNKED", "0\r\n\r\n%H"),
    _smuggle("tetab", "Content-Length: %L\r\nTransfer-Encoding:\tchunked", "0\r\n\r\n%H"),
    _smuggle("tefold", "Content-Length: %L\r\nTransfer-Encoding:\r\n chunked", "0\r\n\r\n%H"),
    _smuggle("telist", "Content-Length: %L\r\nTransfer-Encoding: identity, chunked", "0\r\n\r\n%H"),
    _smuggle("tetwice", "Content-Length: %L\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x",
     "0\r\n\r\n%H"),
    _smuggle("tex", "Content-Length: %L\r\nTransfer-Encoding: xchunked", "0\r\n\r\n%H"),
    _smuggle("clcl", "Content-Length: 0\r\nContent-Length: %L", "%H"),
    _smuggle("clthree", "Content-Length: 0\r\nContent-Length: 0\r\nContent-Length: %L", "%H"),
    _smuggle("cllist", "Content-Length: 0, %L", "%H"),
    _smuggle("clsign", "Content-Length: +0", "%H"),
    _smuggle("chunksize", "Transfer-Encoding: chunked", "0x0\r\n\r\n%H"),
    _smuggle("chunkover", "Transfer-Encoding: chunked", "10000000000000000\r\n\r\n%H"),
    _smuggle("chunkext", "Transfer-Encoding: chunked", "0;a=b\n\r\n%H"),
    _smuggle("oldte", "Transfer-Encoding: chunked", "0\r\n\r\n%H", before="POST / HTTP/1.0"),
    _smuggle("getbody", "X: y", "%H", before="GET / HTTP/1.1"),
)  # fmt: skip


def smuggled(case: Case, part: str, events: list[Event]) -> bool:
    """The hidden request was one of its own at the server. In a body it may arrive."""
    return any(case.mark(part) in e["target"] for e in events if e["kind"] == "http")


def as_host(case: Case, part: str, events: list[Event]) -> bool:
    """The mark begins the Host of a request that arrived."""
    return any(e["host"].startswith(case.mark(part)) for e in events if e["kind"] == "http")


def redirected(case: Case, part: str, events: list[Event]) -> bool:
    """The request came to the metadata service in the end."""
    return any(
        case.mark(part) in e["target"] and e["to"] == zone.METADATA for e in events if e["kind"] == "http"
    )


def _proxied(one: dict[str, Any]) -> dict[str, Any]:
    """The same by an explicit proxy."""
    line, _, rest = one["send"].partition("\r\n")
    method, target, version = line.split(" ")
    return {
        "part": one["part"],
        "send": f"{method} http://{FRONT}{target} {version}\r\n{rest}",
        "finish": True,
    }


ROWS: tuple[Row, ...] = (
    Row("proxy-connect", "CONNECT to unlisted names and addresses", "proxy.connect",
        (_tunnel("name", "other.example:80"), _tunnel("v4", "<v4>:22", "<m:v4>\n"), _tunnel("v6",
         "[<v6>]:8080"),
         _tunnel("port", "also.example:25", "<m:port>\n"), _tunnel("tls", "other.example:443",
          tls="other.example"),
         _tunnel("lying", "other.example:80", host="also.example:80")),
        "policy", allow=("other.example", "<v4>:22", "[<v6>]:8080", "also.example:25"), packets=("v4", "v6")),
    Row("proxy-absolute", "absolute-form requests for unlisted names and addresses", "proxy.request",
        (_absolute("name", "other.example"), _absolute("v4", "<v4>"), _absolute("port", "also.example:8080"),
         _absolute("v6", "[<v6>]")),
        "policy", allow=("other.example", "<v4>", "[<v6>]", "also.example:8080"), packets=("v4", "v6")),
    Row("proxy-host", "an absolute-form request whose Host is another", "proxy.request",
        (_absolute("host", FRONT, "<m:host>.other.example"), _absolute("port", FRONT,
         "<m:port>.other.example:80")),
        "twin", twin=(_absolute("host", "<m:host>.allowed.example"),), seen=as_host),
    Row("socks", "SOCKS 5 to unlisted names and addresses", "proxy.socks",
        (_socks("name", "other.example", 80), _socks("v4", "<v4>", 80, **{"as": "v4"}),
         {**_socks("v6", "[<v6>]", 80, **{"as": "v6"}), "host": "<v6>"}, _socks("text", "<v4>", 8080)),
        "policy", allow=("other.example", "<v4>:*", "[<v6>]:80"), packets=("v4", "v6")),
    Row("tunnel-host", "plain HTTP with another Host in a tunnel", "proxy.connect",
        (_tunnel("connect", f"{FRONT}:80", get("<m:connect>.other.example", "x")),
         _tunnel("odd", f"{FRONT}:{zone.RAW}", get("<m:odd>.other.example", "x"))),
        "twin", twin=(_tunnel("connect", "<m:connect>.allowed.example:80",
                              get("<m:connect>.allowed.example", "x")),
                      _tunnel("odd", f"<m:odd>.allowed.example:{zone.RAW}",
                              get(f"<m:odd>.allowed.example:{zone.RAW}", "x"))), kinds=OTHER),
    Row("host", "plain HTTP whose Host or target is another name than the one that was dialled", "tcp.send",
        (*(_raw(part, *pieces) for part, pieces in PLAIN), _raw("pause", ONE, BAD, answer=True),
         _raw("p8080", BAD, port=8080), _raw("rawport", BAD, port=zone.RAW)),
        "twin", twin=(*(_good(part, *pieces) for part, pieces in PLAIN), _good("pause", ONE, BAD,
         answer=True),
                      _good("p8080", BAD.replace("@", "@:8080"), port=8080)),
        kinds=OTHER),
    Row("host-odd", "the same in requests that servers read differently", "tcp.send",
        tuple(_raw(part, *pieces, pause=1.2, finish=True) for part, pieces in ODD)
        + tuple(_raw(part + "raw", *pieces, port=zone.RAW, pause=1.2, finish=True) for part, pieces in ODD),
        "bare", kinds=OTHER),
    Row("sni", "TLS whose server name is another than the one that was dialled", "tls.hello",
        (_hello("plain"), _hello("records"), {**_hello("plain"), "part": "bytewise",
         "sni": "<m:bytewise>.other.example",
                             "bytewise": True}),
        "twin", twin=(_right("plain", "plain"), _right("records", "records"),
                      _right("bytewise", "plain", bytewise=True)), kinds=OTHER),
    Row("sni-client", "the same by a whole TLS client", "tcp.send",
        ({"part": "client", "to": [FRONT, 443], "tls": "<m:client>.other.example", "send": get(FRONT, "x")},
         {"part": "host", "to": [FRONT, 8443], "tls": "<m:host>.other.example",
          "send": get("<m:host>.other.example", "x")}),
        "twin", twin=({"part": "client", "to": ["<m:client>.allowed.example", 443],
                       "tls": "<m:client>.allowed.example", "send": get("<m:client>.allowed.example", "x")},),
        kinds=OTHER),
    Row("sni-tunnel", "the same through CONNECT", "tls.tunnelled",
        ({**_hello("plain"), "target": f"{FRONT}:{zone.RAW}"}, {**_hello("records"),
         "target": f"{FRONT}:{zone.RAW}"}),
        "twin", twin=({**_right("plain", "plain"), "target": f"<m:plain>.allowed.example:{zone.RAW}"},),
         kinds=OTHER),
    Row("sni-socks", "the same through SOCKS 5", "tls.socksed",
        ({**_hello("plain"), "host": FRONT, "port": zone.RAW}, {**_hello("records"), "host": FRONT,
         "port": zone.RAW}),
        "twin", twin=({**_right("plain", "plain"), "host": "<m:plain>.allowed.example", "port": zone.RAW},),
         kinds=OTHER),
    Row("hello-odd", "another server name in hellos that servers read differently", "tls.hello",
        tuple(_hello(shape) for shape in (
            "two-extensions", "two-names", "other-type-first", "other-type", "last-of-many", "giant",
            "after-alert", "after-ccs", "after-empty", "after-request", "second-hello", "truncated", "sslv2",
             "ssl3",
            "odd-record-version", "odd-record-high")),
        "bare", kinds=OTHER),
    Row("late-words", "another name in HTTP after a server has spoken first", "tcp.send",
        (_raw("http", "", BAD, port=22, answer=True),), "bare", kinds=OTHER),
    Row("late-hello", "the same in TLS", "tls.hello",
        (_hello("plain", late=True, port=22), _hello("records", late=True, port=22)), "bare", kinds=OTHER),
    Row("smuggling", "a request hidden in another's body, straight", "tcp.send", SMUGGLED, "bare",
     seen=smuggled),
    Row("smuggling-proxy", "the same through the proxy", "proxy.request",
        tuple(_proxied(one) for one in SMUGGLED if one["to"][1] == 80),
        "twin", twin=({"part": "two", "send": get("<m:two>.allowed.example", "<m:two>",
                                                  "http://<m:two>.allowed.example/<m:two>")},),
                                                   seen=smuggled),
    Row("redirect", "an allowed host that redirects to the metadata service", "proxy.redirect",
        tuple({"part": part, "host": FRONT, "path": f"/redirect?to=http://{zone.METADATA}/<m:{part}>",
               "proxied": part == "proxied"} for part in ("straight", "proxied")),
        "policy", allow=(f"{zone.METADATA}:80",),
        seen=redirected),
    Row("proxy-loop", "the gate's own addresses as a destination", "proxy.connect",
        tuple(_tunnel(f"t{n}", target) for n, target in enumerate((
            "198.18.0.1:3128", "198.18.0.1:53", "[fd53:656e:7472:79::1]:3128", "198.18.1.0:80",
             "198.19.255.255:80",
            f"{zone.to('x', '198.18.0.1')}:3128", f"{zone.to('x', 'fd53:656e:7472:79::1')}:3128"))),
        "twin", twin=(_tunnel("once", "<m:once>.allowed.example:80"),),
        packets=("198.18.0.1", "fd53:656e:7472:79::1", "198.18.1.0", "198.19.255.255")),
)  # fmt: skip
