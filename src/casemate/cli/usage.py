"""What ``casemate run --help`` prints."""

__all__ = ["HELP"]

HELP = """usage: casemate run [OPTION…] [--] CMD [ARG…]

Runs CMD in a copy-on-write view of the workspace; unprotected changes are applied when it ends.

  -C, --workspace DIR     the workspace (default: the present directory)
  --preset NAME           read-only | workspace-write (default) | full-access (no boundary at all)
  --policy FILE           a policy file in the place of your own
  --read PATH             one more readable path          (may be repeated, like the next six)
  --write DIR             one more writable directory (a view too, applied at the end)
  --deny PATH             hide a path
  --protect NAME          one more protected name
  --cache NAME            keep this package manager's cache for the workspace: pip, npm, cargo, …
  --env NAME[=VALUE]      pass a variable, or set it
  --degrade WORD          give up one protection by its word
  --direct                change the workspace at once instead of a view (servers, watchers); nothing is
                          kept back to be looked at, and what is protected is refused
  --network MODE          none (default) | allowlist | full (every public address) | host (degraded)
  --allow HOST[:PORT]     reach this host: github.com, '*.example.org:443', 10.0.0.0/8:5432  (these may be
                          repeated; without --network they make none an allowlist)
  --deny-host HOST        do not reach this one, whatever allows it
  --ask                   ask about hosts that no rule names
  --reviewer PROGRAM      have a program answer instead (JSON on stdin and stdout; see docs/use.md)
  -p, --publish [HOST:]PORT   a port inside that the host's loopback reaches
  --socket PATH           a unix socket of the host
  --ssh-agent HOST        log in to HOST with the keys of your ssh-agent
  --credential NAME[:AS][+add]=HOST[,HOST…]   the gate holds $NAME and puts it into requests to HOST;
                          AS: bearer (default) | basic[:USER] | header:NAME | query:KEY
  --parent-proxy URL      everything through this proxy (needs --degrade parent-proxy)
  --session NAME          keep HOME and the view for the next command of the session; nothing is applied
                          at the end (`casemate session --help`)
  --timeout TIME          30s, 5m, 1h
  --memory SIZE  --disk SIZE  --file-size SIZE  --output SIZE      512M, 2G
  --pids N  --open-files N  --cpu N
  --scope auto|tree       tree: refuse to run where a limit cannot hold for the whole process tree
  --tty auto|yes|no       a pty of its own for the command (auto: if stdin and stdout are terminals)
  --apply ask|all|none    what becomes of the changes: all (default) | ask shows them and asks |
                          none lets them wait (`casemate diff`, `casemate apply`, `casemate discard`)
  --no-wait               refuse instead of waiting when another command holds the workspace
  --no-daemon             do not ask a resident daemon
  --json                  print one JSON object on stdout when the command has ended
                          (the command's stdout then goes to stderr)
  --report FILE           write the same object to FILE
  --quiet                 no summary after the command

Exit code: the command's own, 128+n after signal n; 123 a limit ended it, 124 timeout, 125 the sandbox
failed, 126 refused, 127 no such command, 2 usage.
"""
