"""The options of ``casemate run`` and how a command line is split.

Plain data and no import: the daemon's client has to know what it must not hand on (``--no-daemon``,
``--report``), and a word may be an option or another one's value.
"""

__all__ = ["LISTS", "SWITCHES", "VALUES", "Split", "split"]

VALUES = {
    "--workspace": "workspace_dir", "-C": "workspace_dir", "--preset": "preset", "--policy": "policy",
    "--network": "network", "--timeout": "timeout", "--memory": "memory", "--disk": "disk",
    "--file-size": "file_size", "--output": "output", "--pids": "pids", "--open-files": "open_files",
    "--cpu": "cpu", "--scope": "scope", "--tty": "tty", "--report": "report", "--session": "session",
    "--reviewer": "reviewer", "--apply": "apply",
    "--parent-proxy": "parent_proxy",
}  # fmt: skip
LISTS = {
    "--read": "read", "--write": "write", "--deny": "deny", "--protect": "protect",
    "--cache": "cache", "--degrade": "degrade", "--env": "env",
    "--allow": "allow", "--deny-host": "deny_host", "--publish": "publish", "-p": "publish",
    "--socket": "sockets", "--ssh-agent": "ssh_agent", "--credential": "credential",
}  # fmt: skip
SWITCHES = {
    "--json": "json", "--quiet": "quiet", "-q": "quiet", "--no-wait": "no_wait", "--no-daemon": "no_daemon",
    "--help": "help", "-h": "help", "--ask": "ask", "--direct": "direct",
}  # fmt: skip


class Split:
    """A command line in parts; ``problem`` says what is wrong with it."""

    __slots__ = ("argv", "lists", "problem", "switches", "values")

    def __init__(self) -> None:
        self.argv: list[str] = []
        self.values: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.switches: set[str] = set()
        self.problem = ""


def split(words: list[str]) -> Split:
    """Take the options off the front; the rest is the command. The last of a repeated value counts."""
    found = Split()
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            index += 1
            break
        if not word.startswith("-") or word == "-":
            break
        name, equals, value = word.partition("=")
        if name in SWITCHES and not equals:
            found.switches.add(SWITCHES[name])
        elif name in VALUES or name in LISTS:
            if not equals:
                index += 1
                if index >= len(words):
                    found.problem = f"{name} needs a value"
                    break
                value = words[index]
            if name in VALUES:
                found.values[VALUES[name]] = value
            else:
                found.lists.setdefault(LISTS[name], []).append(value)
        else:
            found.problem = f"unknown option {name}{_near(name)}"
            break
        index += 1
    found.argv = words[index:]
    return found


def _near(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, [*VALUES, *LISTS, *SWITCHES], 1)
    return f"; did you mean {close[0]}?" if close else ""
