"""The table of protected names."""

from __future__ import annotations

import pytest

from casemate.workspace.protected import Protected


@pytest.mark.parametrize(
    "path",
    [".bashrc", "deep/er/.zshrc", ".git", "x/.git/hooks/pre-commit", ".gitmodules", ".envrc", ".envrc.local",
     ".mcp.json", ".vscode/tasks.json", ".idea", ".devcontainer", ".devcontainer.json", "a/x.code-workspace",
     ".husky/pre-commit", ".pre-commit-config.yaml", ".claude/settings.json", ".codex", ".cursor/rules",
     ".gemini",
     "casemate.toml", "sub/casemate.toml", ".casemate", ".casemate-apply.tmp", ".npmrc", ".yarnrc",
     ".yarnrc.yml",
     ".pnpmfile.cjs", "pip.conf", ".pypirc", ".cargo/config", "x/.cargo/config.toml", "bunfig.toml",
     ".github/workflows/ci.yml", ".gitlab-ci.yml", ".circleci/config.yml", "Jenkinsfile",
     "azure-pipelines.yml",
     ".gitconfig", ".ripgreprc", ".yarn/plugins/x.cjs", "GIT~1", ".hg/hgrc"],
)  # fmt: skip
def test_protected(path: str) -> None:
    """Names that act on the host without being asked, at any depth."""
    assert Protected().judge(path) is not None


@pytest.mark.parametrize(
    "path",
    ["README.md", "src/main.py", "Makefile", "package.json", ".gitignore", ".gitattributes", "setup.cfg",
     ".github/ISSUE_TEMPLATE.md", "workflows/ci.yml", "cargo/config.toml", ".env", "git", "x.git/HEAD",
     "node_modules/p/.github/workflows/ci.yml", ".editorconfig", "vscode/tasks.json", "config",
     ".eslintrc.js",
     "tsconfig.json", "venv/bin/activate", ".python-version", "docs/casemate.md", "casemate.toml.md"],
)  # fmt: skip
def test_free(path: str) -> None:
    """The control: names of ordinary work."""
    assert Protected().judge(path) is None


@pytest.mark.parametrize(
    "path",
    [".cargo", "x/.CARGO", ".hg", ".github", ".jj/repo", ".jj", "x/fish", "db", "a", "one/two", "one"],
)
def test_ways(path: str) -> None:
    """A link that is a part of a protected path brings that path about, whatever it leads to."""
    protected = Protected(["db/schema.sql", "/a/b?", "*/any"])
    protected.add_path("one/two/three")
    above, _, name = path.rpartition("/")
    assert protected.way(above, name) is not None


@pytest.mark.parametrize(
    "path", ["src", "README.md", "repo", "x/a", "x/one", "two", "node_modules/p/.gitea", "node_modules"]
)
def test_no_ways(path: str) -> None:
    """The control: links of other names, and at other places."""
    protected = Protected(["db/schema.sql", "/a/b?", "*/any"])
    protected.add_path("one/two/three")
    above, _, name = path.rpartition("/")
    assert protected.way(above, name) is None


@pytest.mark.parametrize("path", ["CLAUDE.md", "pkg/AGENTS.md", "GEMINI.md", ".cursorrules", "Claude.md"])
def test_prose_is_asked_about(path: str) -> None:
    """Instructions for agents are held as a question."""
    rule = Protected().judge(path)
    assert rule is not None
    assert rule.ask


def test_a_policy_adds_names() -> None:
    """Patterns of the policy: by name, with wildcards, by path at any depth, from the root only."""
    protected = Protected(["*.lock", "secrets/", "db/schema.sql", "/deploy", "/a/b?"])
    for path in (
        "Cargo.lock",
        "x/y.LOCK",
        "secrets/k",
        "x/secrets/k",
        "x/db/schema.sql",
        "deploy/run",
        "a/bc",
    ):
        rule = protected.judge(path)
        assert rule is not None, path
        assert rule.kind == "policy"
    for path in ("lock", "x/deploy/run", "schema.sql", "db/x/schema.sql", "x/a/bc", "a/b", "a/bcd"):
        assert protected.judge(path) is None, path


def test_an_empty_pattern_protects_nothing() -> None:
    """No pattern, an empty one and a lone slash add nothing."""
    for extra in ([], [""], ["/"], ["./"]):
        assert Protected(extra).judge("x") is None


def test_ci_is_configurable() -> None:
    """CI files can be made ordinary; the rest of the table stays."""
    free = Protected(ci=False)
    assert free.judge(".github/workflows/ci.yml") is None
    assert free.judge("Jenkinsfile") is None
    assert free.judge(".vscode") is not None
