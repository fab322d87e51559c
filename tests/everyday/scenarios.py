"""The everyday scenarios, by name. Each has a test of the same name, and each test belongs to one of them."""

from __future__ import annotations

SCENARIOS = {
    "git": "init, add, commit, worktree",
    "git_rebase": "rebase with a conflict that is resolved",
    "git_submodule": "a submodule from a local path",
    "git_mv": "git mv of a directory",
    "git_push": "git push over HTTPS with a token that the gate holds",
    "pip": "a virtual environment and pip install from the index",
    "uv": "uv venv, uv pip install from the index",
    "pytest": "pytest on a small project",
    "npm": "npm install from the registry, npm test",
    "node": "a node program",
    "tsc": "the TypeScript compiler, from the registry",
    "cargo": "cargo build and test without dependencies",
    "make": "make and gcc",
    "cmake": "cmake and ctest",
    "perl": "a perl program",
    "java": "javac and java",
    "sqlite": "sqlite3 with a write-ahead log",
    "archives": "tar and zip",
    "rsync": "rsync of a tree",
    "dev_server": "a development server, reached from the host and from a second command",
    "curl": "curl to an allowed host and to a refused one",
    "jvm_network": "a JVM program that knows no proxy",
    "ssh": "ssh, refused with a clear reason",
    "process_substitution": "bash with process substitution",
    "process_pool": "ProcessPoolExecutor",
}
