"""A secret that the gate holds comes to the hosts that it is for, and to nobody else: not to other hosts, not
into the sandbox, not into a report, a message or what the host shows of its processes.
"""

from __future__ import annotations

import base64
import dataclasses
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.harness import until
from tests.network.matrix import policy_text
from tests.network.web import ECHOES

if TYPE_CHECKING:
    from tests.cli.harness import Caller, Ended
    from tests.network.lab import Lab

pytestmark = [pytest.mark.security, pytest.mark.root]

NETWORK: dict[str, Any] = {
    "allow": ["allowed.example", "also.example", "other.example", "untrusted.example", "git.example"],
    "credentials": {
        "LAB_TOKEN": {"hosts": ["allowed.example", "untrusted.example"]},
        "LAB_KEY": {"hosts": ["also.example"], "as": "header:X-Key", "add": True},
    },
}


@dataclasses.dataclass
class Held:
    """Two secrets of the caller's environment, a policy about them, and what came of a run."""

    lab: Lab
    caller: Caller
    token: str
    key: str

    def run(self, script: str, network: dict[str, Any] | None = None, **more: str) -> Run:
        ws = self.caller.workspace()
        policy = self.caller.file(
            ws.parent / "policy.toml", policy_text({"mode": "allowlist", **(network or NETWORK)})
        )
        report = ws.parent / "report.json"
        mark = self.lab.mark()
        ended = self.caller.sh(
            ws, script, flags=("--policy", str(policy), "--report", str(report), "--no-daemon"),
            env={"LAB_TOKEN": self.token, "LAB_KEY": self.key, **more}, timeout=60,
        )  # fmt: skip
        assert ended.code == 0, ended
        text = report.read_text() if report.exists() else ""
        return Run(self, ended, self.lab.since(mark), text)


@dataclasses.dataclass
class Run:
    """One run: its end, what the lab saw, the report."""

    held: Held
    ended: Ended
    events: list[dict[str, Any]]
    report: str

    def heads(self, host: str) -> list[str]:
        """The requests that came to a host, with their bodies."""
        return [e["head"] + e["body"] for e in self.events if e["kind"] == "http" and e["host"] == host]

    def leaks(self) -> list[str]:
        """Where the secrets are that they must not be: the command's output, the report, other hosts."""
        found = []
        for name, value in (("token", self.held.token), ("key", self.held.key)):
            forms = {
                value,
                base64.b64encode(value.encode()).decode().rstrip("="),
                value[::-1],
                value.encode().hex(),
            }
            for place, text in (
                ("stdout", self.ended.out.decode("latin-1")), ("stderr", self.ended.err.decode("latin-1")),
                ("report", self.report),
            ):  # fmt: skip
                found += [f"{name} in {place}" for form in forms if form in text]
        return found

    def strangers(self) -> set[str]:
        """Hosts that have seen the token, however it was said."""
        return {
            str(e.get("host") or e.get("name") or e.get("to"))
            for e in self.events
            if self.held.token in str(e)
        }


@pytest.fixture
def held(lab: Lab, caller: Caller) -> Held:
    """Fresh secrets."""
    return Held(lab, caller, "tok" + secrets.token_hex(14), "key" + secrets.token_hex(14))


def test_the_value_comes_to_its_host(held: Held) -> None:
    """Control of all below: the placeholder that a program sends is the real value where it arrives."""
    run = held.run(
        'curl -sS -H "Authorization: Bearer $LAB_TOKEN" https://allowed.example/a && curl -sS https://also.example/b'
    )
    assert f"Authorization: Bearer {held.token}".lower() in run.heads("allowed.example")[0].lower()
    assert held.key in run.heads("also.example")[0]
    assert run.leaks() == []
    assert run.strangers() == {"allowed.example"}


def test_other_hosts_get_the_placeholder(held: Held) -> None:
    """Sent elsewhere, in clear text, or to a host whose certificate nobody signed, it stays a placeholder."""
    run = held.run("""
        echo "inside: $LAB_TOKEN"
        curl -sS -H "Authorization: Bearer $LAB_TOKEN" https://other.example/
        curl -sS -H "Authorization: Bearer $LAB_TOKEN" http://other.example/
        curl -sS -H "Authorization: Bearer $LAB_TOKEN" http://allowed.example/
        curl -sS -k -H "Authorization: Bearer $LAB_TOKEN" https://untrusted.example/
        curl -sS -k -H "Authorization: Bearer $LAB_TOKEN" -H "Host: other.example" https://allowed.example/
        curl -sS -H "X-Key: $LAB_KEY" https://allowed.example/
        true
    """)
    placeholder = run.ended.out.decode().partition("inside: ")[2].split()[0]
    assert len(placeholder) == len(held.token)
    assert len(run.heads("other.example")) == 2  # both arrived, as they were
    assert all(placeholder in head for head in run.heads("other.example"))
    assert run.strangers() == set()
    assert held.key not in str(run.events)
    assert run.leaks() == []


def test_only_where_tokens_stand(held: Held) -> None:
    """In a path, a query, a body or another header the placeholder is text like any other."""
    run = held.run("""
        curl -sS "https://allowed.example/$LAB_TOKEN?q=$LAB_TOKEN" -H "X-Other: $LAB_TOKEN" -d "$LAB_TOKEN"
        curl -sS "https://allowed.example/" -H "Cookie: a=$LAB_TOKEN" -A "$LAB_TOKEN"
    """)
    assert len(run.heads("allowed.example")) == 2
    assert run.strangers() == set()


def test_answers_do_not_bring_it_in(held: Held) -> None:
    """A host that echoes what it was sent, plainly, compressed, in a header or in part, tells nothing."""
    run = held.run("""
        auth="Authorization: Bearer $LAB_TOKEN"
        for path in echo encoded location; do curl -sS -i -H "$auth" "https://allowed.example/$path"; done
        curl -sS --compressed -H "$auth" https://allowed.example/encoded
        curl -sS -r 0-100 -H "$auth" https://allowed.example/echo
        curl -sS -X TRACE -H "$auth" https://allowed.example/echo
        printf 'GET /echo HTTP/1.1\\r\\nHost: %s\\r\\n%s\\r\\nConnection: close\\r\\n\\r\\n' \
            allowed.example "$auth" |
            openssl s_client -quiet -connect allowed.example:443 -servername allowed.example 2>/dev/null
        curl -sS -u "user:$LAB_TOKEN" https://allowed.example/echo
        curl -sS https://also.example/echo
    """)
    assert sum(held.token in head for head in run.heads("allowed.example")) >= 5
    assert held.key in run.heads("also.example")[0]
    assert run.leaks() == []
    assert b"HTTP/1.1 200" in run.ended.out


@pytest.mark.slow
def test_every_part_of_an_answer(held: Held) -> None:
    """Wherever in an answer a host says again what it was asked with, it is taken out; other words stay."""
    words = {"secret": "$LAB_TOKEN", "plain": "word" + held.token[3:][::-1]}
    calls = "".join(
        f'curl -sS -i -m 8 {raw} -H "TE: trailers" -H "Authorization: Bearer {word}"'
        f" https://allowed.example{path} >{kind}{path[1:]}{raw} &\n"
        for path in ECHOES for kind, word in words.items() for raw in ("", "--raw")
    )  # fmt: skip
    run = held.run(f"mkdir told; cd told; {calls} wait; head -c 100000 *")
    heads = run.heads("allowed.example")
    assert sum(held.token in head for head in heads) == len(heads) / 2 == 2 * len(ECHOES)
    # The control: in all but those that say it in another form, and those that h11 does not pass on.
    told = run.ended.out.decode("latin-1").replace("\r\n1\r\n", "")
    assert told.count(words["plain"]) >= 2 * (len(ECHOES) - 5), told
    assert run.leaks() == []
    assert held.token not in told


def test_processes_do_not_show_it(held: Held) -> None:
    """No process of the run shows it, inside or on the host: no environment, no command line, no file."""
    lab, caller = held.lab, held.caller
    ws = caller.workspace()
    policy = caller.file(ws.parent / "policy.toml", policy_text({"mode": "allowlist", **NETWORK}))
    script = """
        cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c -e "$1" -e "$2"
        env | grep -c -e "$1" -e "$2"
        find / -xdev -type f -size -64k -newer /proc/1 -readable 2>/dev/null |
            xargs grep -l -e "$1" 2>/dev/null
        curl -sS -H "Authorization: Bearer $LAB_TOKEN" https://allowed.example/ >/dev/null
        touch ready; read line
    """
    # The two halves of each, so that the arguments of the command are no find.
    halves = (held.token[:12], held.key[:12])
    process = caller.start(
        "run", "--policy", str(policy), "--no-daemon", "--", "sh", "-c", script, "sh",
        *(half[:6] + "[" + half[6] + "]" + half[7:] for half in halves),
        cwd=ws, env={"LAB_TOKEN": held.token, "LAB_KEY": held.key},
    )  # fmt: skip
    mark = lab.mark()
    assert lab.until(mark, lambda event: event["kind"] == "http" and held.token in event["head"], 20)
    shown = {}
    for place in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline"):
            try:
                if held.token.encode() in (place / name).read_bytes():
                    shown[f"{place.name} {name}"] = (place / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
    out, err = process.communicate(b"\n", 20)
    caller.end(process)
    # The caller's own command was given it by its environment. Nobody else.
    assert [words for words in shown.values() if b"run" not in words] == [], shown
    assert out.split() == [b"0", b"0"], (out, err)


def test_requests_are_kept_to_their_rules(held: Held) -> None:
    """A host with rules about requests gets those and no others, however their paths are written."""
    network = {
        "allow": ["allowed.example"],
        "requests": {"allowed.example": ["GET /repos/**", "POST /graphql"]},
    }
    run = held.run(
        """
        for path in repos/a repos/a/b; do curl -sS "https://allowed.example/$path"; done
        curl -sS -d x https://allowed.example/graphql
        for path in user repos repos/../user repos/%2e%2e/user repos/a/..%2f..%2fuser \
            //repos/a/../../user 'repos/a;/../../user' 'repos\\..\\user' graphql REPOS/a; do
            curl -sS --path-as-is "https://allowed.example/$path"
        done
        curl -sS -X DELETE https://allowed.example/repos/a
        curl -sS -X post -d x https://allowed.example/graphql
        curl -sS -H 'X-HTTP-Method-Override: DELETE' http://allowed.example/user
        curl -sS --request-target http://allowed.example/user https://allowed.example/repos/a
        curl -sS --request-target '*' -X OPTIONS https://allowed.example/
        true
        """,
        network,
    )
    arrived = [(e["method"], e["target"]) for e in run.events if e["kind"] == "http"]
    assert arrived == [("GET", "/repos/a"), ("GET", "/repos/a/b"), ("POST", "/graphql")], run.ended
    assert b"403" in run.ended.out or b"casemate" in run.ended.out


def test_git_pushes_with_a_held_token(held: Held, tmp_path: Path) -> None:
    """git push over HTTPS works while the token stays outside; without the credential the server refuses."""
    lab, name = held.lab, f"push-{secrets.token_hex(4)}.git"
    repository = lab.repository(name)
    script = f"""
        git init -q -b main . && echo text >file && git add file
        git -c user.name=t -c user.email=t@example.invalid commit -q -m pushed
        GIT_TERMINAL_PROMPT=0 git push -q https://git.example/git/{name} main && echo pushed || echo not
    """
    allow = {"allow": ["git.example"]}
    refused = held.run(script, allow)
    assert refused.ended.out.split() == [b"not"], refused.ended
    credentials = {"GIT_TOKEN": {"hosts": ["git.example"], "as": "basic", "add": True}}
    done = held.run(script, {**allow, "credentials": credentials}, GIT_TOKEN=lab.token)
    assert done.ended.out.split() == [b"pushed"], done.ended
    assert lab.token.encode() not in done.ended.out + done.ended.err + done.report.encode()
    heads = until(lambda: list((repository / "refs/heads").iterdir()), 5)
    assert [head.name for head in heads] == ["main"]
