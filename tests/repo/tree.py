"""What the repository tests share: the files, parsed once."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "casemate"


@cache
def listed() -> tuple[Path, ...]:
    """Every file that git tracks or would track, so that leftovers of a build are nobody's business."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = sorted(name.decode() for name in done.stdout.split(b"\0") if name)
    return tuple(ROOT / name for name in names if (ROOT / name).is_file())


@cache
def python_files(*tops: str) -> tuple[Path, ...]:
    """The Python files below these folders of the repository."""
    return tuple(p for p in listed() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in tops)


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    """``src/casemate/sys/bpf.py`` -> ``casemate.sys.bpf``."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def short(path: Path) -> str:
    """The path as it is written in lists and messages."""
    return path.relative_to(ROOT).as_posix()
