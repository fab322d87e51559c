"""Which host a program could not reach: read in what common programs say, as a rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.policy import rules
from casemate.sandbox.unreached import unreached


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        # As they were seen inside, without a network.
        (b"curl: (6) Could not resolve host: p.example", "p.example"),
        (b"curl: (7) Failed to connect to 10.1.2.3 port 8080 after 0 ms: Couldn't connect to server",
         "10.1.2.3:8080"),
        (b"curl: (7) Failed to connect to 2606:4700::1111 port 8080 after 0 ms: Couldn't connect to server",
         "[2606:4700::1111]:8080"),
        (b"wget: unable to resolve host address \xe2\x80\x98p.example\xe2\x80\x99", "p.example"),
        (b"Resolving p.example (p.example)... failed: Temporary failure in name resolution.", "p.example"),
        (b"fatal: unable to access 'https://g.example/a/b/': Could not resolve host: g.example", "g.example"),
        (b"fatal: unable to access 'https://g.example:8443/a/': Could not resolve host: g.example",
         "g.example:8443"),
        (b"fatal: unable to look up g.example (port 9418) (Temporary failure in name resolution)",
         "g.example:9418"),
        (b"ssh: Could not resolve hostname g.example: Name or service not known\r", "g.example:22"),
        (b"ssh: connect to host 1.2.3.4 port 22: Network is unreachable\r", "1.2.3.4:22"),
        (b"urllib3.exceptions.NameResolutionError: <HTTPSConnection object at 0x7f>: Failed to resolve "
         b"'p.example' ([Errno -3] Temporary failure in name resolution)", "p.example"),
        (b"ConnectionError: HTTPSConnectionPool(host='p.example', port=8443): Max "
         b"retries exceeded with url: / (Caused by NameResolutionError(\"<Connection>: Failed to "
         b"resolve 'p.example' ([Errno -3] Temporary failure in name resolution)\"))", "p.example:8443"),
        (b"WARNING: Retrying (Retry(total=4)) after connection broken by "
         b"'NameResolutionError(\"<X>: Failed to "
         b"resolve 'p.example' ([Errno -3] Temporary failure in name resolution)\")': /x/", "p.example"),
        (b"Cannot connect to host p.example:443 ssl:default [Name or service not known]", "p.example"),
        (b"  [cause]: Error: getaddrinfo EAI_AGAIN packages.example", "packages.example"),
        (b"npm error request to https://packages.example/x failed, reason: getaddrinfo ENOTFOUND "
         b"packages.example", "packages.example"),
        (b"npm ERR! getaddrinfo ENOTFOUND packages.example packages.example:443", "packages.example"),
        (b" WARN  GET https://packages.example/x error (EAI_AGAIN). Will retry", "packages.example"),
        (b"Error: connect ENETUNREACH 1.2.3.4:443 - Local (0.0.0.0:0)", "1.2.3.4"),
        (b"warning: spurious network error (3 tries remaining): [6] Could not resolve hostname (Could not "
         b"resolve host: crates.example)", "crates.example"),
        (b"Exception in thread \"main\" java.net.UnknownHostException: maven.example",
         "maven.example"),
        (b"Caused by: java.net.UnknownHostException: nexus: Temporary failure in name resolution", "nexus"),
        (b"go: x@v1: Get \"https://proxy.example/x\": dial tcp: lookup proxy.example on 127.0.0.53:53: "
         b"no such host", "proxy.example"),
        (b"dial tcp 1.2.3.4:5432: connect: network is unreachable", "1.2.3.4:5432"),
        (b"Failed to open TCP connection to gems.example:443 (getaddrinfo: Name or service not known)",
         "gems.example"),
        (b"could not translate host name \"db.example\" to address: Name or service not known", "db.example"),
        (b"Err:1 http://deb.example/debian bookworm InRelease\n  Temporary failure resolving "
         b"'deb.example'", "deb.example"),
        (b"bash: line 1: p.example: Temporary failure in name resolution", "p.example"),
        (b"bash: line 1: /dev/tcp/1.2.3.4/5432: Network is unreachable", "1.2.3.4:5432"),
        # The network is spoken of, and no host.
        (b"socket.gaierror: [Errno -3] Temporary failure in name resolution", ""),
        (b"OSError: [Errno 101] Network is unreachable", ""),
        (b"npm error errno ENOTFOUND", ""),
        (b"curl: (6) Could not resolve host: localhost", ""),
        (b"connect ENETUNREACH 169.254.169.254:80 - Local (0.0.0.0:0)", ""),
        # And these are about something else.
        (b"curl: (7) Failed to connect to localhost port 3000 after 0 ms: Couldn't connect to server", None),
        (b"curl: (7) Failed to connect to 127.0.0.1 port 3000 after 0 ms: Couldn't connect to server", None),
        (b"connection to db.example:5432 refused", None),
        (b"Could not resolve 'lodash.get' from src/index.js", None),
        (b"Could not resolve com.example:library:1.0.", None),
        (b"see https://docs.example.org/", None),
        (b"", None),
    ],
)  # fmt: skip
def test_what_is_read(line: bytes, rule: str | None) -> None:
    """The host that the line names, with its port where that is none of the web's; never one that is not."""
    assert unreached(line) == rule


@pytest.mark.parametrize(
    ("line", "command", "rule"),
    [
        (b"ssh: Could not resolve hostname a.example: x", "ssh git@a.example", "a.example:22"),
        (b"ssh: Could not resolve hostname a.example: x", "ssh -p 2222 git@a.example", "a.example:2222"),
        (b"ssh: Could not resolve hostname a.example: x", "git clone ssh://git@a.example:29418/x",
         "a.example:29418"),
        (b"curl: (6) Could not resolve host: a.example", "curl http://a.example:8080/x", "a.example:8080"),
        (b"curl: (6) Could not resolve host: a.example", "curl http://b.example:8080/x", "a.example"),
        (b"curl: (6) Could not resolve host: host.casemate.internal", "curl http://host.casemate.internal:81",
         "host.casemate.internal:81"),
        # Without a port this is no rule.
        (b"curl: (6) Could not resolve host: host.casemate.internal", "curl x", ""),
    ],
)  # fmt: skip
def test_the_port_that_the_command_names(line: bytes, command: str, rule: str) -> None:
    """Most programs say the host alone; the port stands in what they were given."""
    assert unreached(line, command) == rule


BEFORE = (b"ssh: Could not resolve hostname ", b"getaddrinfo ENOTFOUND ")


@given(st.binary(max_size=200), st.sampled_from(BEFORE))
def test_whatever_comes_out_is_a_rule(host: bytes, before: bytes) -> None:
    """A command that makes its words up gets a rule that parses, or none."""
    found = unreached(before + host)
    assert found is not None
    assert not found or rules.parse(found).text == found
