"""A gate whose policy changes under its connections, and whose questions are answered at any time."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from casemate.policy.model import RequestRule
from tests.cli.harness import until
from tests.unit.egress import wire
from tests.unit.egress.gatelab import ALLOWED, ALSO, GUARDED, OTHER, all_of, echo, exactly, gone
from tests.unit.egress.test_gate import ANSWER, HELLO, say, web

if TYPE_CHECKING:
    from tests.unit.egress.gatelab import Lab, Served

RULE = f"{ALLOWED}:9000"


def answer(served: Served, host: str, port: int, *, allow: bool = True, scope: str = "once") -> None:
    """What the front end passes on."""
    served.lab.call(lambda: served.gate.answer(host, port, allow=allow, scope=scope))


def asked(served: Served, count: int = 1) -> list[tuple[str, int]]:
    """The questions so far, when there are so many."""

    def found() -> list[tuple[str, int]]:
        return [(m["host"], m["port"]) for m in [*served.said] if m["event"] == "question"]

    until(lambda: len(found()) >= count, 5, "questions")
    return found()


# -- revoking ------------------------------------------------------------------------------------------


def test_what_is_revoked_is_cut(lab: Lab) -> None:
    """A rule that goes cuts the connections that it allowed and no others; new ones are refused."""
    with lab.server(echo, 9000) as server, lab.gate(RULE, f"{ALSO}:9000") as served:
        with served.connect(ALLOWED, 9000) as cut, served.connect(ALSO, 9000) as kept:
            assert say(cut) == say(kept) == b"hello\n"
            served.update(f"{ALSO}:9000")
            assert gone(cut) in ("end", "reset")
            assert say(kept) == b"hello\n"
            event = served.told(reason="revoked")
            assert (event["host"], event["allow"]) == (ALLOWED, f'network.allow = ["{RULE}"]')
            until(lambda: served.open() == 1)
            with served.connect(ALLOWED, 9000) as again:
                assert gone(again) == "reset"
        assert len(server.connections) == 2


def test_an_address_that_is_revoked_is_cut(lab: Lab) -> None:
    """So is a connection by the address that it has, whichever way it is not allowed any more; another goes
    on. Control: as long as a rule names the address.
    """
    allow = (f"{GUARDED}:9000", "10.1.2.0/24:9000", f"{ALSO}:9000")
    with lab.server(echo, 9000), lab.gate(*allow) as served, served.connect(ALSO, 9000) as kept:
        with served.connect(GUARDED, 9000) as client:
            assert say(client) == b"hello\n"
            served.update(*allow, deny=("evil.example",))
            assert say(client) == b"hello\n"
            served.update(f"{GUARDED}:9000", f"{ALSO}:9000")
            assert gone(client) in ("end", "reset")
        with served.connect(GUARDED, 9000) as again:
            assert gone(again) == "reset"
        served.update(*allow)
        with served.connect(GUARDED, 9000) as client:
            assert say(client) == b"hello\n"
            served.update(*allow, deny=("10.1.2.3",))
            assert gone(client) in ("end", "reset")
        assert say(kept) == b"hello\n"


def test_denying_cuts_too(lab: Lab) -> None:
    """A new denial cuts what another rule allows still; with mode none everything is cut."""
    with (
        lab.server(echo, 9000),
        lab.gate(RULE, f"{ALSO}:9000") as served,
        served.connect(ALLOWED, 9000) as first,
        served.connect(ALSO, 9000) as second,
    ):
        assert say(first) == say(second) == b"hello\n"
        served.update(RULE, f"{ALSO}:9000", deny=(ALLOWED,))
        assert gone(first) in ("end", "reset")
        assert say(second) == b"hello\n"
        served.update(mode="none")
        assert gone(second) in ("end", "reset")


def test_an_update_that_changes_nothing(lab: Lab) -> None:
    """Connections in every state outlive a change that does not concern them."""
    with lab.server(echo, 9000), lab.server(web, 80), lab.gate(RULE, f"https://{ALLOWED}", ALLOWED) as served:
        with (
            served.connect(ALLOWED, 9000) as relayed,
            served.connect(ALLOWED, 80) as flowing,
            served.connect(ALLOWED, 9000) as silent,
            served.connect(ALLOWED, 443) as begun,
        ):
            assert say(relayed) == b"hello\n"
            flowing.sendall(HELLO)
            exactly(flowing, len(ANSWER))
            hello = wire.hello(wire.sni(ALLOWED))
            begun.sendall(hello[:20])
            until(lambda: served.open() == 4)
            with lab.server(echo, 443):
                served.update(RULE, f"https://{ALLOWED}", ALLOWED, deny=("evil.example",))
                assert say(relayed) == say(silent) == b"hello\n"
                flowing.sendall(HELLO)
                exactly(flowing, len(ANSWER))
                begun.sendall(hello[20:])
                assert exactly(begun, len(hello)) == hello
        assert served.reasons() == []


def test_a_flow_of_requests_is_cut(lab: Lab) -> None:
    """A connection that is read request by request is cut as well, idle or in the middle of an answer."""

    def slow(end: socket.socket) -> None:
        while end.recv(65536):
            end.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of it")

    with lab.server(slow, 80) as server, lab.gate(ALLOWED) as served, served.connect(ALLOWED, 80) as client:
        client.sendall(HELLO)
        until(lambda: b"half of it" in client.recv(65536, socket.MSG_PEEK))
        served.update(ALSO)
        assert gone(client) in ("end", "reset")
        until(lambda: served.open() == 0)
        assert gone(server.connections[0]) in ("end", "reset")


def test_the_policy_at_the_first_word_counts(lab: Lab) -> None:
    """A client that waits with its first word goes by the policy of then, and may be refused."""
    with lab.server(web, 80) as server, lab.gate(ALLOWED) as served:
        with served.connect(ALLOWED, 80) as client:
            until(lambda: served.open() == 1)
            served.update(f"https://{ALLOWED}:80")
            client.sendall(HELLO)
            assert all_of(client).startswith(b"HTTP/1.1 403 ")
        with served.connect(ALLOWED, 443) as client:
            until(lambda: served.open() == 1)
            served.update(ALSO)
            assert gone(client) in ("end", "reset")
        assert all(gone(connection) for connection in server.connections)


def test_rules_about_requests_that_come_with_the_answer(lab: Lab) -> None:
    """A rule that comes while a person is asked about a connection holds for it: it is looked into, and not
    relayed as it is. Control: without the rule it is.
    """
    hello = wire.hello(wire.sni(ALLOWED))
    rule = RequestRule(host=ALLOWED, allow=("GET /",), layer="user")
    with lab.server(echo, 443) as server, lab.gate(ask=True) as served:
        for number, requests in enumerate(((), (rule,)), 1):
            served.update(ask=True)
            with served.connect(ALLOWED, 443) as client:
                client.sendall(hello)
                asked(served, number)
                served.update(ask=True, requests=requests)
                answer(served, ALLOWED, 443)
                if requests:
                    assert all_of(client) == bytes((21, 3, 3, 0, 2, 2, 49))  # no authority was made for it
                else:
                    assert exactly(client, len(hello)) == hello
        assert served.told(verdict="deny")["reason"] == "no-authority"
        assert len(server.connections) == 1


def test_rules_about_requests_that_come_later(lab: Lab) -> None:
    """An opaque TLS connection does not outlive a rule about requests to its host; one elsewhere does."""
    hello = wire.hello(wire.sni(ALLOWED))
    rule = RequestRule(host=ALLOWED, allow=("GET /",), layer="user")
    with (
        lab.server(echo, 443),
        lab.gate(ALLOWED, ALSO) as served,
        served.connect(ALLOWED, 443) as client,
        served.connect(ALSO, 443) as other,
    ):
        for end, said in ((client, hello), (other, wire.hello(wire.sni(ALSO)))):
            end.sendall(said)
            assert exactly(end, len(said)) == said
        served.update(ALLOWED, ALSO, requests=(rule,))
        assert gone(client) in ("end", "reset")
        other.sendall(b"more")
        assert exactly(other, 4) == b"more"


def test_revoked_while_it_is_dialled(lab: Lab) -> None:
    """A connection whose way is just being made is cut, too: nothing arrives."""
    with lab.names(), lab.server(echo, 9000) as server:
        name = "slow-x.to.example"
        with lab.gate(f"{name}:9000") as served, served.connect(name, 9000) as client:
            client.sendall(b"words\n")
            until(lambda: served.open() == 1)
            served.update(ALSO)
            assert gone(client) in ("end", "reset")
            until(lambda: served.open() == 0)
        assert server.connections == []


# -- questions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["once", "session", "saved"])
def test_an_approval(lab: Lab, scope: str) -> None:
    """An approved connection goes on; whether the next one is asked about depends on how long it holds."""
    with lab.server(echo, 9000), lab.gate(ask=True) as served:
        with served.connect(ALLOWED, 9000) as client:
            client.sendall(b"hello\n")
            assert asked(served) == [(ALLOWED, 9000)]
            answer(served, ALLOWED, 9000, scope=scope)
            assert exactly(client, 6) == b"hello\n"
        with served.connect(ALLOWED, 9000) as client:
            client.sendall(b"hello\n")
            if scope == "once":
                assert len(asked(served, 2)) == 2
                answer(served, ALLOWED, 9000)
            assert exactly(client, 6) == b"hello\n"
        assert len(asked(served)) == (2 if scope == "once" else 1)


def test_a_refusal(lab: Lab) -> None:
    """What the reviewer refuses is refused, now and later, and told."""
    with lab.server(echo, 9000) as server, lab.gate(ask=True) as served:
        for _ in range(2):
            with served.connect(ALLOWED, 9000) as client:
                client.sendall(b"hello\n")
                if not server.connections:
                    asked(served)
                    answer(served, ALLOWED, 9000, allow=False)
                assert gone(client) == "reset"
        assert served.told(reason="not-approved")["allow"] == f'network.allow = ["{RULE}"]'
        assert len(asked(served)) == 1
        assert server.connections == []


def test_many_wait_for_one_answer(lab: Lab) -> None:
    """Connections to the same host and port wait for the same answer; one to another port for its own."""
    with lab.server(echo, 9000), lab.gate(ask=True) as served:
        clients = [served.connect(ALLOWED, 9000) for _ in range(5)]
        other = served.connect(ALLOWED, 9001)
        for client in (*clients, other):
            client.sendall(b"hello\n")
        assert sorted(asked(served, 2)) == [(ALLOWED, 9000), (ALLOWED, 9001)]
        answer(served, ALLOWED, 9001, allow=False)
        assert gone(other) == "reset"
        answer(served, ALLOWED, 9000)
        for client in clients:
            assert exactly(client, 6) == b"hello\n"
        for client in (*clients, other):
            client.close()


def test_nobody_waits_any_more(lab: Lab) -> None:
    """An answer that comes when its client has gone does no harm, and counts for the next one if it may."""
    with lab.server(echo, 9000), lab.gate(ask=True) as served:
        with served.connect(ALLOWED, 9000) as client:
            client.sendall(b"hello\n")
            asked(served)
        answer(served, ALLOWED, 9000, scope="session")
        until(lambda: served.open() == 0)
        with served.connect(ALLOWED, 9000) as client:
            assert say(client) == b"hello\n"
        answer(served, ALLOWED, 9000)
        answer(served, "never.asked.example", 1)


def test_a_question_over_a_change(lab: Lab) -> None:
    """A change of policy leaves an open question open. Denied meanwhile, the approval comes too late."""
    with lab.server(echo, 9000) as server, lab.gate(ask=True) as served:
        with served.connect(ALLOWED, 9000) as first, served.connect(OTHER, 9000) as second:
            first.sendall(b"hello\n")
            second.sendall(b"hello\n")
            asked(served, 2)
            served.update(ALSO, ask=True)
            answer(served, ALLOWED, 9000)
            assert exactly(first, 6) == b"hello\n"
            served.update(ALSO, ask=True, deny=(OTHER,))
            assert gone(second) in ("end", "reset")
            answer(served, OTHER, 9000, scope="session")
            until(lambda: served.open() == 1)
            with served.connect(OTHER, 9000) as third:
                third.sendall(b"hello\n")
                assert gone(third) == "reset"
            assert say(first) == b"hello\n"
        assert len(server.connections) == 1


@pytest.mark.parametrize("scope", ["once", "session"])
def test_what_was_approved_can_be_denied(lab: Lab, scope: str) -> None:
    """Deny wins over an approval and cuts what it allowed; the end of another rule is no denial."""
    with (
        lab.server(echo, 9000),
        lab.gate(f"{ALSO}:9000", ask=True) as served,
        served.connect(ALLOWED, 9000) as client,
    ):
        client.sendall(b"hello\n")
        asked(served)
        answer(served, ALLOWED, 9000, scope=scope)
        exactly(client, 6)
        served.update(ask=True)
        assert say(client) == b"hello\n"
        served.update(ask=True, deny=(RULE,))
        assert gone(client) in ("end", "reset")


def test_the_end_of_questions(lab: Lab) -> None:
    """A gate that ends while questions are open leaves nothing behind."""
    with lab.gate(ask=True) as served, served.connect(ALLOWED, 9000) as client:
        client.sendall(b"hello\n")
        asked(served)
        served.close()
        assert gone(client) in ("end", "reset")
        assert served.lab.call(lambda: len(served.gate._connections)) == 0


def test_dns_does_not_ask(lab: Lab) -> None:
    """A query for a name that nobody has decided about gets its address, asks nobody and leaves nothing."""
    with lab.names() as names, lab.gate(ask=True) as served:
        with served.inside.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
            endpoint.connect(("198.18.0.1", 53))
            endpoint.send(wire.query(wire.name(OTHER)))
            assert endpoint.recv(4096)[3] & 15 == 0
        until(lambda: not served.resolver._asking)
        assert names == []
        assert [m for m in served.said if m["event"] == "question"] == []


def test_saved_approvals_are_there_from_the_start(lab: Lab) -> None:
    """What was saved before is allowed at once, unless it is denied."""
    with (
        lab.server(echo, 9000),
        lab.gate(approved=(RULE, f"{OTHER}:9000"), deny=(OTHER,), ask=True) as served,
    ):
        with served.connect(ALLOWED, 9000) as client:
            assert say(client) == b"hello\n"
        with served.connect(OTHER, 9000) as client:
            assert gone(client) == "reset"
        assert [m for m in served.said if m["event"] == "question"] == []
