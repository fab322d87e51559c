"""The reader of git's configuration agrees with git itself, and its verdicts hold for whatever it accepts."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from casemate.workspace.gitconfig import Item, Unsure, parse, safe_url, unsafe

ENV = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent"}

# Pieces of the grammar, so that most texts are nearly right.
PIECES = st.sampled_from(
    ["[core]", '[remote "a b"]', '[remote "a\\"b\\\\"]', "[branch.x]", "[a.B]", '[ "x"]', "[core", "[]",
     "]", "[",
     "\n", "\n\n", "\r\n", "\t", " ", "  ", "=", " = ", "key", "Key-2", "bare", "k1", "2k", "true",
     "value", '"',
     '"q u"', "\\n", "\\t", "\\\\", '\\"', "\\x", "\\\n", "\\", "#", ";", "# c\n", "; c\n", "é", "a b",
     "\0", "\r", '[submodule "x"] path = y', "url = https://h/p", "-", ".", "x=", '"a#b"', "a;b",
     "[core]\n\tbare = false\n"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=14).map("".join)


def by_git(path: str) -> list[tuple[str, str | None]] | None:
    """What git reads, or None if it refuses."""
    done = subprocess.run(
        ["git", "config", "--no-includes", "--list", "-z", "--file", path],
        capture_output=True, env=ENV, check=False,
    )  # fmt: skip
    if done.returncode:
        return None
    found: list[tuple[str, str | None]] = []
    for entry in done.stdout.split(b"\0")[:-1]:
        name, newline, value = entry.partition(b"\n")
        found.append((os.fsdecode(name), os.fsdecode(value) if newline else None))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file to write to."""
    return str(tmp_path_factory.mktemp("config") / "config")


def agree(path: str, data: bytes) -> bool:
    """Compare both readers; whether ours was sure."""
    with open(path, "wb") as file:
        file.write(data)
    try:
        ours = [(item.name, item.value) for item in parse(data)]
    except Unsure:
        return False
    assert by_git(path) == ours, data
    return True


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS)
@example("[core]\n\tbare = a # c\n")
@example("[a]b=\\\n c")
@example('[a "b"]c = "x\\\n y" z ')
@example("\ufeff[a]b")
@example("[a]\nb = c\\")
@example("[a]b # c")
def test_we_never_read_what_git_does_not(path: str, text: str) -> None:
    """Whatever our reader accepts, git accepts, with the same names and values in the same order."""
    agree(path, text.encode())


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_bytes(path: str, data: bytes) -> None:
    """The same for arbitrary bytes behind a section header."""
    agree(path, b"[core]\n" + data)


WORD = st.text(st.sampled_from("abcXYZ019-"), min_size=1, max_size=8).map(lambda word: "k" + word)
VALUE = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WORD, st.none() | VALUE.filter(lambda sub: "\n" not in sub), WORD, VALUE)
def test_what_git_writes_is_understood(
    tmp_path: object, path: str, section: str, sub: str | None, key: str, value: str
) -> None:
    """A setting that git has written itself is always read, and as the same one."""
    name = f"{section}.{key}" if sub is None else f"{section}.{sub}.{key}"
    with open(path, "wb"):
        pass
    done = subprocess.run(
        ["git", "config", "--file", path, name, value], env=ENV, check=False, capture_output=True
    )
    if done.returncode:  # a name that git does not take
        return
    with open(path, "rb") as file:
        data = file.read()
    assert agree(path, data)
    assert parse(data) == [Item(section.lower(), sub, key.lower(), value)]


@given(st.text(max_size=40))
@example("ext::sh -c id")
@example("foo://x")
@example("ssh://-oProxyCommand=x/y")
@example("-u")
@example("https://h/%0aHost:evil")
def test_safe_urls_run_nothing(url: str) -> None:
    """An accepted address has one of git's own schemes and cannot become an option or a line of its own."""
    if safe_url(url):
        assert url[0] not in "-!"
        assert url.isprintable()
        helper = url.partition("::")[0] if "::" in url else ""
        assert not (helper and helper.replace("+", "").replace("-", "").replace(".", "").isalnum())
        if "://" in url:
            assert url.partition("://")[0].lower() in {
                "https",
                "http",
                "ssh",
                "git",
                "file",
                "git+ssh",
                "ssh+git",
            }


@pytest.mark.parametrize(
    "text",
    ["[core]fsmonitor=x", "[core]hooksPath=x", "[core]sshCommand=x", "[core]editor=x", "[core]pager=x",
     "[core]gitProxy=x", "[core]askPass=x", "[core]attributesFile=x", "[core]excludesFile=/etc/x",
     "[core]alternateRefsCommand=x", "[core]worktree=/etc", "[core]worktree", "[core]sharedRepository=0777",
     "[core]protectNTFS=false", "[include]path=x", '[includeIf "gitdir:/"]path=x',
     '[url "ext::x"]insteadOf=https://',
     "[alias]st=!x", '[filter "x"]clean=x', '[filter "x"]process=x', '[diff "x"]textconv=x',
     '[diff "x"]command=x',
     '[merge "x"]driver=x', "[diff]external=x", "[credential]helper=!x", '[credential "https://h"]helper=x',
     "[gpg]program=x", '[gpg "ssh"]program=x', "[gpg]format=ssh", "[user]signingkey=x", "[commit]gpgsign",
     "[sequence]editor=x", "[uploadpack]packObjectsHook=x", '[remote "o"]uploadpack=x',
     '[remote "o"]receivepack=x',
     '[remote "o"]vcs=x', '[remote "o"]proxy=x', '[remote "o"]url=ext::sh -c x', '[remote "o"]url=-x',
     '[remote "o"]push=+refs/heads/a:refs/heads/main', '[remote "o"]mirror=true', '[remote "-o"]url=https://h/',
     '[remote "../../x"]url=https://h/', '[branch "m"]remote=ext::sh', '[branch "m"]remote=foo://x',
     '[submodule "s"]update=!x', '[submodule "s"]url=ext::x', '[submodule "../x"]url=https://h/',
     '[submodule "s"]path=../x', '[submodule "s"]path=.git/hooks', "[protocol]allow=always",
     '[protocol "ext"]allow=always', "[http]proxy=x", "[http]sslVerify=false", "[http]cookieFile=x",
     '[http "https://h"]extraHeader=x', "[interactive]diffFilter=x", "[pager]log=x", "[man]viewer=x",
     '[browser "x"]cmd=x', '[mergetool "x"]cmd=x', '[difftool "x"]path=x', "[sendemail]smtpServer=x",
     "[receive]procReceiveRefs=x", "[trailer.x]cmd=x", "[ssh]variant=x", "[init]templateDir=x",
     "[extensions]partialClone=o", '[remote "o"]promisor=true', "[maintenance]auto=true", "[unknown]key=x",
     "[safe]directory=*", "[core]hookspath", "[CORE]FSMONITOR=x", "[core.]fsmonitor=x", "[lsp]x=y"],
)  # fmt: skip
def test_unsafe_settings(text: str) -> None:
    """Settings that make git run something, leave the workspace, or check less, are never safe."""
    try:
        items = parse(text.encode())
    except Unsure:
        return
    assert unsafe(items, lambda path: path == "fine") == items


def test_safe_settings() -> None:
    """The control: what git's own commands write is safe."""
    text = """
[core]
	repositoryformatversion = 0
	filemode = true
	bare = false
	logallrefupdates = true
	ignorecase = true
	precomposeunicode = true
	symlinks = false
	worktree = fine
[user]
	name = A. U. Thor
	email = "a@b"
[remote "origin"]
	url = git@example.org:path/to.git
	fetch = +refs/heads/*:refs/remotes/origin/*
	tagOpt = --no-tags
[remote "other"]
	url = https://example.org/x.git
	pushurl = ssh://git@example.org:2222/x.git
[remote "near"]
	url = ../near
[branch "topic/x"]
	remote = origin
	merge = refs/heads/topic/x
	rebase = true
[submodule "lib/x"]
	path = fine
	url = ./lib
	active = true
	update = checkout
	branch = main
[init]
	defaultBranch = main
[extensions]
	objectFormat = sha256
	worktreeConfig = true
"""
    assert unsafe(parse(text.encode()), lambda path: path == "fine") == []
