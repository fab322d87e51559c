"""Takes credentials out of settings that hold URLs.

The rule is not to find secrets but to let through only what has a known, harmless shape: a URL whose
authority is a host and a port, a path, or a plain word. What has another shape is refused as a whole, so a
password with odd characters makes a setting disappear rather than leak in part.

No regular expressions: compiling them would cost every run more than all the settings it has.
"""

from __future__ import annotations

__all__ = ["clean", "local_path", "looks_secret", "split"]

_SEPARATORS = frozenset(" \t\n\r\f\v,|")
_ALNUM = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_NAME = _ALNUM | frozenset("._-")
_SCHEMES = frozenset(
    (
        "http", "https", "file", "ftp", "ssh", "git", "socks4", "socks5", "socks5h", "sparse+https",
        "sparse+http", "registry+https", "git+https", "git+http", "git+ssh", "git+file", "hg+https",
        "svn+https",
    )
)  # fmt: skip
_WORD = _ALNUM | frozenset("_.:*+=<>!~%[]-")
# Tokens that say so themselves.
_TOKENS = (
    "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "gldt-", "npm_", "pypi-", "AKCp", "eyJ",
    "sk-", "xoxa-", "xoxb-", "xoxp-", "xoxr-", "dop_v1_", "hf_", "AKIA",
)  # fmt: skip
_TOKEN_LENGTH = 18


def split(value: str) -> list[str]:
    """The parts of a setting, without what separates them."""
    return [piece for piece in _pieces(value) if piece[0] not in _SEPARATORS]


def clean(value: str) -> str | None:
    """``value`` without credentials, or None when that cannot be said of every part of it."""
    cleaned: list[str] = []
    pieces = _pieces(value)
    mixed = len(pieces) > 1
    for piece in pieces:
        part = piece if piece[0] in _SEPARATORS else _clean_part(piece, mixed)
        if part is None:
            return None
        cleaned.append(part)
    return "".join(cleaned)


def _pieces(value: str) -> list[str]:
    """Runs of separators and runs of everything else, in turn."""
    pieces: list[str] = []
    start = 0
    for at in range(1, len(value) + 1):
        if at == len(value) or (value[at] in _SEPARATORS) != (value[start] in _SEPARATORS):
            pieces.append(value[start:at])
            start = at
    return pieces


def _clean_part(part: str, mixed: bool) -> str | None:
    local = part.startswith("file:///") or (part.startswith("file:/") and not part.startswith("file://"))
    if local or (part.startswith(("/", "~/")) and not part.startswith("//")):
        # An @ after a separator may end a password that held the separator, with or without a scheme.
        return None if _odd(part) or (mixed and "@" in part) else part
    scheme, found, rest = part.partition("://")
    if found:
        # `name=` before the scheme is how uv writes an index.
        name, equals, bare = scheme.rpartition("=")
        known = bare.lower() in _SCHEMES and (not equals or (bool(name) and _only(name, _NAME)))
        return _clean_url(f"{scheme}://", rest) if known else None
    return part if _only(part, _WORD) and len(part) <= 256 and not looks_secret(part) else None


def _clean_url(scheme: str, rest: str) -> str | None:
    if _odd(rest):
        return None
    end = _first(rest, "/?#")
    user, at, host = rest[:end].rpartition("@")
    after = rest[end:]
    path = after[: _first(after, "?#")]
    if not _is_host(host):
        return None
    # A second @ may end a password that held a slash or a question mark; what we took for the host would
    # then be a piece of it.
    if "@" in after[len(path) :] or (at and "@" in path):
        return None
    for segment in path.split("/"):
        scope = segment.startswith("@") and len(segment) > 1 and _only(segment[1:], _NAME)
        if ("@" in segment and not scope) or looks_secret(segment):
            return None
    # Queries carry tokens, and an index needs none. The user's name goes too: it may be a token as well.
    del user
    return f"{scheme}{host}{path}"


def _is_host(text: str) -> bool:
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        good = bool(bracket) and _only(host, _HEX | {":", "."})
        colon, port = port[:1], port[1:]
    else:
        host, colon, port = text.partition(":")
        good = _only(host, _NAME)
    if colon:
        good = good and colon == ":" and bool(port) and len(port) <= 5 and _only(port, _DIGITS)
    return good and 0 < len(host) <= 253


def looks_secret(word: str) -> bool:
    """Whether a word is a token by its form: some services put one into the path of a URL."""
    if word.startswith(_TOKENS) and len(word) >= _TOKEN_LENGTH and _only(word, _NAME):
        return True
    if len(word) >= 32 and _only(word, _HEX):
        return True
    if len(word) < 16 or not _only(word, _ALNUM):
        return False
    return not (word.islower() or word.isupper()) and not _DIGITS.isdisjoint(word)


def local_path(part: str, home: str) -> str | None:
    """The absolute path that a cleaned part names, or None when it names none."""
    if part.startswith("file:"):
        path = part[5:]
        path = _unquote(path[2:] if path.startswith("///") else path)
        return path if path.startswith("/") and not path.startswith("//") and "\0" not in path else None
    if part.startswith("~/"):
        return home + part[1:]
    return part if part.startswith("/") else None


def _unquote(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return unquote(text)


def _only(text: str, allowed: frozenset[str]) -> bool:
    return allowed.issuperset(text)


def _odd(text: str) -> bool:
    return "\\" in text or any(c <= " " or c == "\x7f" for c in text)


def _first(text: str, stops: str) -> int:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=len(text))
