"""What a policy's network part asks of the boundary and of the gate. Light: every run comes through here."""

from __future__ import annotations

from casemate.errors import PolicyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from casemate.policy.model import Network

__all__ = [
    "RESOLV_CONF",
    "needed_at_once",
    "needs_authority",
    "ports_of",
    "secrets_of",
    "wants_capture",
    "wants_gate",
    "without_secrets",
]

#: What a sandbox with a gate has as /etc/resolv.conf: the gate answers, whatever address is asked.
RESOLV_CONF = "nameserver 198.18.0.1\noptions edns0 timeout:3 attempts:2\n"
_MOST_PORTS = 64


def wants_gate(network: Network) -> bool:
    """Whether a policy asks for anything that the gate does."""
    return wants_capture(network) or bool(network.publish)


def wants_capture(network: Network) -> bool:
    """Whether connections from inside are the gate's. Where there is no network they fail by themselves."""
    return network.mode in ("allowlist", "full")


def needs_authority(network: Network) -> bool:
    """Whether the gate has to look inside of TLS for this policy."""
    return wants_capture(network) and bool(network.credentials or network.requests)


def needed_at_once(network: Network) -> bool:
    """Whether a command needs the gate before it starts, and not only once it uses the network."""
    return needs_authority(network) or bool(network.publish or network.ssh_agent)


def ports_of(network: Network) -> list[int]:
    """Ports that the rules name one by one: to be listened on where not all can be captured."""
    from casemate.policy import rules

    found: set[int] = {int(rest) for text in network.ssh_agent if (rest := text.rpartition(":")[2]).isdigit()}
    for text in network.allow:
        for low, high in rules.parse(text).ports:
            if high - low < _MOST_PORTS:
                found.update(range(low, high + 1))
    return sorted(found)[:_MOST_PORTS]


def secrets_of(network: Network, environ: Mapping[str, str]) -> dict[str, str]:
    """The values of the credentials, from the caller's environment or its files. Raises PolicyError."""
    from casemate.egress.credentials import complaint

    found: dict[str, str] = {}
    for credential in network.credentials:
        kind, _, where = credential.source.partition(":")
        value = environ.get(where, "")
        if kind == "file":
            try:
                with open(where, encoding="utf-8") as file:
                    value = file.read(16384).strip()
            except (OSError, ValueError) as error:
                raise PolicyError(
                    f"the credential {credential.name} cannot be read from {where}: "
                    f"{getattr(error, 'strerror', None) or 'it is no text'}",
                    code="credential-missing",
                    hint="check the file, or take the credential out of the policy",
                ) from None
        if not value:
            raise PolicyError(
                f"the credential {credential.name} has no value: {credential.source} is empty or not set",
                code="credential-missing",
                hint="set it for Casemate, not for the command, or take the credential out of the policy",
            )
        if why := complaint(value):
            raise PolicyError(
                f"the value of the credential {credential.name} cannot be used: {why}",
                code="credential-unusable",
                hint="check what is in it",
            )
        found[credential.name] = value
    return found


def without_secrets(env: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that hold a credential's value, whatever their names are."""
    values = [value for value in secrets.values() if value]
    return {name: text for name, text in env.items() if not any(value in text for value in values)}
