"""``casemate run --session`` and ``casemate session``: what stays between commands, as root and as a user."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.harness import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def sessions(caller: Caller, ws: Path, traceless: None) -> Iterator[None]:
    """Every session of the workspace is discarded in the end; nothing is left of any then."""
    yield
    for item in listed(caller, ws):
        ended = caller.cli("session", "discard", item["name"], cwd=ws)
        assert ended.code == 0, ended


def listed(caller: Caller, ws: Path) -> list[dict[str, Any]]:
    """What ``session list --json`` says."""
    ended = caller.cli("session", "list", "--json", cwd=ws)
    assert ended.code == 0, ended
    found: list[dict[str, Any]] = json.loads(ended.out)
    return found


def run(
    caller: Caller, ws: Path, script: str, *flags: str, session: str = "s", errors: bool = False
) -> bytes:
    """A shell script in a session that ends well, without a word on stderr unless ``errors``; its output."""
    ended = caller.sh(ws, script, flags=("--session", session, *flags))
    assert ended.code == 0, ended
    assert errors or not ended.err, ended
    return ended.out


def snapshot(caller: Caller, ws: Path, session: str = "s") -> str:
    """The name of a new snapshot."""
    ended = caller.cli("session", "snapshot", session, cwd=ws)
    assert ended.code == 0, ended
    return ended.out.decode().strip()


def test_view_and_home_stay(caller: Caller, ws: Path) -> None:
    """The next command finds HOME, caches in it and the view as they were left; the host does not change."""
    caller.file(ws / "f", "host\n")
    run(caller, ws, "echo one >>f; mkdir -p ~/.cache/tool; echo c >~/.cache/tool/c; echo n >new")
    out = run(caller, ws, "cat f new ~/.cache/tool/c; echo two >>f; rm new; touch /tmp/x")
    assert out == b"host\none\nn\nc\n"
    assert run(caller, ws, "cat f; ls; ls /tmp") == b"host\none\ntwo\nf\n"
    assert ((ws / "f").read_text(), os.listdir(ws)) == ("host\n", ["f"])
    assert caller.sh(ws, "cat f; ls -A ~/.cache").out == b"host\n", "another command is in no session"
    assert run(caller, ws, "cat f; ls", session="other") == b"host\nf\n"


def test_settings_in_home_are_the_present_ones(caller: Caller, ws: Path) -> None:
    """What the policy puts into HOME comes anew for each command, unless the session has its own."""
    config = caller.file(caller.home / ".gitconfig", "[user]\n name = One\n email = o@example.invalid\n")
    try:
        assert run(caller, ws, "git config user.name") == b"One\n"
        caller.file(config, "[user]\n name = Two\n email = o@example.invalid\n")
        assert run(caller, ws, "git config user.name") == b"Two\n"
        run(caller, ws, "git config --global user.name Mine")
        caller.file(config, "[user]\n name = Three\n email = o@example.invalid\n")
        assert run(caller, ws, "git config user.name") == b"Mine\n"
    finally:
        config.unlink()


def test_the_host_shows_through(caller: Caller, ws: Path) -> None:
    """What the host changes below a session shows in it, where it has nothing of its own."""
    caller.file(ws / "f", "1\n")
    caller.file(ws / "g", "1\n")
    run(caller, ws, "echo own >>f")
    caller.file(ws / "f", "2\n")
    caller.file(ws / "g", "2\n")
    assert run(caller, ws, "cat f g") == b"1\nown\n2\n"


def test_snapshots_branches_roll_back(caller: Caller, ws: Path) -> None:
    """A roll-back gives the state of its snapshot, HOME included; branches part from each other."""
    run(caller, ws, "echo 1 >f; echo 1 >~/h")
    first = snapshot(caller, ws)
    run(caller, ws, "echo 2 >>f; echo 2 >>~/h; mkdir d")
    second = snapshot(caller, ws)
    assert caller.cli("session", "branch", "s", "twin", cwd=ws).code == 0
    assert caller.cli("session", "branch", "s", "old", "--at", first, cwd=ws).code == 0
    run(caller, ws, "echo s >>f")
    assert run(caller, ws, "cat f ~/h; ls", session="twin") == b"1\n2\n1\n2\nd\nf\n"
    assert run(caller, ws, "cat f ~/h; ls", session="old") == b"1\n1\nf\n"
    run(caller, ws, "echo t >>f", session="twin")
    assert caller.cli("session", "rollback", "s", second, cwd=ws).code == 0
    assert run(caller, ws, "cat f") == b"1\n2\n"
    assert caller.cli("session", "rollback", "s", first, cwd=ws).code == 0
    assert run(caller, ws, "cat f ~/h; ls") == b"1\n1\nf\n"
    assert run(caller, ws, "cat f", session="twin") == b"1\n2\nt\n", "its layers are still there"
    assert caller.cli("session", "rollback", "s", "start", cwd=ws).code == 0
    assert run(caller, ws, "ls; ls ~") == b""
    gone = caller.cli("session", "rollback", "s", second, cwd=ws)
    assert gone.code == 125, gone
    assert b"[no-snapshot]" in gone.err, gone
    names = {item["name"]: [each["id"] for each in item["snapshots"]] for item in listed(caller, ws)}
    assert names == {"s": ["start"], "twin": ["start", first, second], "old": ["start", first]}


def test_flatten(caller: Caller, ws: Path) -> None:
    """Flattening changes nothing that is seen, and leaves one layer; the last snapshot stays."""
    caller.file(ws / "gone", "x")
    for number in range(4):
        made = f"mkdir -p d{number}; echo {number} >d{number}/f"
        run(caller, ws, f"{made}; rm -rf gone d{number - 2}; echo >>~/h")
        last = snapshot(caller, ws)
    before = run(caller, ws, "find . | sort; cat ~/h; echo now >now")
    assert caller.cli("session", "flatten", "s", cwd=ws).code == 0
    (item,) = listed(caller, ws)
    assert item["layers"] == 1
    assert [each["id"] for each in item["snapshots"]] == ["start", last]
    assert run(caller, ws, "rm now; find . | sort; cat ~/h") == before
    assert caller.cli("session", "rollback", "s", last, cwd=ws).code == 0
    assert run(caller, ws, "find . | sort; cat ~/h") == before


def test_two_commands_of_a_session_wait_for_each_other(caller: Caller, ws: Path) -> None:
    """The second says for whom it waits and goes on from what the first has left; --no-wait refuses."""
    first = started(caller, ws, "echo 1 >f; echo up; read x; echo 2 >>f")
    refused = caller.sh(ws, "true", flags=("--session", "s", "--no-wait"))
    assert refused.code == 126, refused
    assert b"[busy]" in refused.err, refused
    assert caller.cli("session", "snapshot", "s", "--no-wait", cwd=ws).code == 126
    assert listed(caller, ws)[0]["running"]
    second = caller.start("run", "--session", "s", "--", "/bin/cat", "f", cwd=ws)
    assert second.stderr is not None
    line = second.stderr.readline()
    assert line.startswith(b"casemate: waiting for another command"), line
    assert line.endswith(b"; a command of another session, or of none, need not wait\n"), line
    assert run(caller, ws, "ls", session="beside") == b"", "other sessions go on"
    assert caller.sh(ws, "echo x >applied", flags=("--no-wait",)).code == 0, "and so do single commands"
    first.communicate(b"\n", timeout=20)
    out, err = second.communicate(timeout=20)
    assert (second.returncode, out) == (0, b"1\n2\n"), err


def started(caller: Caller, ws: Path, script: str, *flags: str) -> subprocess.Popen[bytes]:
    """A command of the session that has said ``up``."""
    words = ("run", "--session", "s", *flags, "--", "/bin/sh", "-c", script)
    process = caller.start(*words, cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_read_only_commands_see_the_session(caller: Caller, ws: Path) -> None:
    """With a read-only workspace the session's view is still what is shown; HOME is kept all the same."""
    caller.file(ws / "f", "host\n")
    run(caller, ws, "echo one >>f")
    snapshot(caller, ws)
    run(caller, ws, "echo two >>f")
    ended = caller.sh(ws, "cat f; echo h >~/h; echo x >>f", flags=("--session", "s", "--preset", "read-only"))
    assert (ended.code, ended.out) == (2, b"host\none\ntwo\n"), ended
    assert run(caller, ws, "cat f ~/h") == b"host\none\ntwo\nh\n"


def test_more_directories(caller: Caller, ws: Path) -> None:
    """Another writable directory is kept as well, and comes back when it is named again."""
    other = caller.workspace()
    caller.file(other / "o", "o\n")
    flags = ("--write", str(other))
    run(caller, ws, f"echo 1 >>{other}/o; echo 1 >f", *flags)
    snapshot(caller, ws)
    assert run(caller, ws, f"cat f; ls {other} 2>/dev/null || echo none") == b"1\nnone\n"
    assert run(caller, ws, f"echo 2 >>{other}/o; cat {other}/o", *flags) == b"o\n1\n2\n"
    assert (other / "o").read_text() == "o\n"
    assert listed(caller, ws)[0]["views"] == [str(ws), str(other)]


def test_words(caller: Caller, ws: Path) -> None:
    """Names that are none, sessions and verbs that do not exist are said to be so; nothing is made."""
    for name in ("", ".", "../x", "a/b", "-x", "x" * 65, "a b", "ä"):
        ended = caller.sh(ws, "true", flags=(f"--session={name}",))
        assert ended.code == 126, (name, ended)
        assert b"[session-name]" in ended.err, ended
    for words, code in (
        (("snapshot", "nope"), 125), (("discard", "nope"), 125), (("nope",), 2), ((), 2), (("list", "x"), 2),
        (("branch", "s"), 2), (("rollback", "s"), 2), (("flatten", "s", "--at", "x"), 2), (("gc",), 0),
    ):  # fmt: skip
        assert caller.cli("session", *words, cwd=ws).code == code, words
    assert listed(caller, ws) == []
    run(caller, ws, "true")
    assert caller.cli("session", "branch", "s", "s", cwd=ws).code == 125
    full = caller.sh(ws, "true", flags=("--session", "s", "--preset", "full-access"))
    assert full.code == 126, full
    assert caller.cli("session", "--help", cwd=ws).out.startswith(b"usage: casemate session")


def test_a_full_session(caller: Caller, ws: Path) -> None:
    """Layers count against --disk: a writer is ended, a full session can be tidied, and all is said."""
    flags = ("--session", "s", "--disk", "40M")
    ended = caller.sh(ws, "head -c 20M /dev/zero >a; sync", flags=(*flags, "--json"))
    assert (ended.code, ended.json["session"]) == (0, "s"), ended
    assert ended.json["disk"]["limit"] == 40 << 20
    assert 20 << 20 <= ended.json["disk"]["used"] < 21 << 20
    assert ended.json["scopes"]["disk"] == "watched"
    snapshot(caller, ws)
    script = "i=0; while [ $i -lt 400 ]; do head -c 2M /dev/zero >b$i; sleep 0.02; i=$((i+1)); done"
    ended = caller.sh(ws, script, flags=(*flags, "--json"))
    assert (ended.code, ended.json["limit"]) == (123, "disk"), ended
    assert 40 << 20 <= ended.json["disk"]["used"] < 80 << 20
    assert listed(caller, ws)[0]["used"] == ended.json["disk"]["used"]
    assert listed(caller, ws)[0]["limit"] == 40 << 20
    more = caller.sh(ws, "head -c 2M /dev/zero >more; ls more", flags=flags)
    # By the file's own limit, or by the watcher if that was quicker.
    assert b"File size limit exceeded" in more.err or b"ended by the limit: disk" in more.err, more
    assert caller.sh(ws, "rm b* more; ls", flags=flags).out == b"a\n", "a full session can be tidied"
    assert caller.sh(ws, "head -c 15M /dev/zero >b", flags=flags).code == 0
    full = caller.sh(ws, "rm a", flags=("--session", "s", "--disk", "20M"))
    assert full.code == 125, full
    assert b"[session-full]" in full.err, full


def test_a_limit_for_the_whole_tree(caller: Caller, ws: Path) -> None:
    """--scope tree refuses a session whose disk limit would only be measured."""
    ended = caller.sh(ws, "true", flags=("--session", "s", "--scope", "tree"))
    assert ended.code == 126, ended
    if not caller.uid:
        assert b"resources.disk" in ended.err or b"disk limit of a session" in ended.err, ended
        words = ("--session", "s", "--scope", "tree", "--disk", "unlimited")
        assert caller.sh(ws, "true", flags=words).code == 0


def test_disk_of_a_single_command(caller: Caller, ws: Path) -> None:
    """The report of a command outside of sessions has what it used of the disk, too."""
    ended = caller.sh(ws, "head -c 3M /dev/zero >big", flags=("--json", "--disk", "64M"))
    assert ended.json["disk"]["limit"] == 64 << 20, ended
    assert 3 << 20 <= ended.json["disk"]["used"] < 8 << 20, ended
    assert ended.json["session"] == ""


@pytest.mark.slow
@pytest.mark.usefixtures("tidy")
def test_kill_at_any_moment(caller: Caller, ws: Path) -> None:
    """kill -9 while a command of a session is made, runs or ends: what was done before is all there, the next
    command finds no obstacle, and nothing of the dead one is left.
    """
    run(caller, ws, "echo 0 >log; echo 0 >~/log")
    snapshot(caller, ws)
    for step in range(0, 90, 6):
        script = "echo x >>log; echo x >>~/log; exec sleep 0.02"
        process = caller.start("run", "--session", "s", "--", "/bin/sh", "-c", script, cwd=ws)
        end = time.monotonic() + 0.06 + step / 1000
        until(lambda end=end: time.monotonic() >= end)  # type: ignore[misc]
        process.kill()
        caller.end(process)
        out = run(caller, ws, "cat log; cmp log ~/log || echo differ; echo y >>log; echo y >>~/log")
        # The command itself may have been killed between its two lines.
        assert out.startswith(b"0\n"), out
        assert out.count(b"y\n") == step // 6, (step, out)
        run(caller, ws, "cp log ~/log")
    places = caller.den.mounts() if caller.den else []
    assert not [place for place in places if "/casemate/" in place]
    left = [name for name in caller.files() if "run " in name or "unnoted" in name or "/locks/" in name]
    assert not left, left


@pytest.mark.slow
@pytest.mark.usefixtures("tidy")
def test_kill_while_layers_change(caller: Caller, ws: Path) -> None:
    """kill -9 of snapshot, branch, rollback, flatten and discard: each has happened or not."""
    run(caller, ws, "for i in 1 2 3 4 5 6 7 8; do mkdir -p d$i; echo $i >d$i/f; done; echo h >~/h")
    first = snapshot(caller, ws)
    run(caller, ws, "rm -r d1; echo 2 >d2/f; mv d3 e3")
    second = snapshot(caller, ws)
    seen = run(caller, ws, "find . -type f | sort | xargs cat; find . | sort; cat ~/h")
    for step in range(24):
        for verb, *words in (
            ("snapshot", "s"), ("flatten", "s"), ("branch", "s", f"b{step}"),
            ("rollback", f"b{step}", second), ("discard", f"b{step}"),
        ):  # fmt: skip
            process = caller.start("session", verb, *words, cwd=ws)
            end = time.monotonic() + 0.03 + step * 0.006
            until(lambda end=end: time.monotonic() >= end)  # type: ignore[misc]
            process.kill()
            caller.end(process)
        if step % 6 == 5:
            assert run(caller, ws, "find . -type f | sort | xargs cat; find . | sort; cat ~/h") == seen
    names = {item["name"] for item in listed(caller, ws)}
    assert "s" in names
    assert caller.cli("session", "gc", cwd=ws).code == 0
    (store,) = (caller.state / "sessions").iterdir()
    assert not [name for name in os.listdir(store) if not name.endswith(".json") and name != "layers"]
    needed = set()
    for path in store.glob("*.json"):
        record = json.loads(path.read_text())
        needed |= {layer["directory"] for layer in record["layers"]} | {record["live"]}
    assert set(os.listdir(store / "layers")) == needed - {""}
    assert first
