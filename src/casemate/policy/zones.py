"""Names below which anybody can have a name: allowing all of them would allow everybody.

A short built-in table of what people do write, not the Public Suffix List: it catches mistakes, and an
attacker who can register a name below a zone that is missing here still has to find it allowed.
"""

from __future__ import annotations

__all__ = ["shared"]

# Second labels that stand for everybody's names below the top-level domain of a country.
_SECOND = frozenset("ac co com edu go gob gov gouv id ltd me mil ne net nom or org plc sch web".split())
# Services where whoever signs up gets a name (or a bucket) below.
_ZONES = frozenset((
    "amplifyapp.com", "appspot.com", "awsapprunner.com", "azure-api.net", "azurecontainer.io",
    "azurecontainerapps.io", "azureedge.net", "azurefd.net", "azurestaticapps.net", "azurewebsites.net",
    "b-cdn.net", "backblazeb2.com", "bitbucket.io", "blogspot.com", "cloudapp.azure.com", "cloudapp.net",
    "cloudflarestorage.com", "cloudfront.net", "cloudfunctions.net", "cloudworkstations.dev", "codeberg.page",
    "deno.dev", "digitaloceanspaces.com", "duckdns.org", "dyndns.org", "edgekey.net", "elasticbeanstalk.com",
    "fastly.net", "fastlylb.net", "firebaseapp.com", "firebaseio.com", "fly.dev", "ghost.io", "github.dev",
    "github.io", "githubusercontent.com", "gitlab.io", "gitpod.io", "glitch.me", "googleapis.com",
    "googleusercontent.com", "herokuapp.com", "hf.space", "interact.sh", "lhr.life", "linodeobjects.com",
    "loca.lt", "lovable.app", "netlify.app", "ngrok-free.app", "ngrok-free.dev", "ngrok.app", "ngrok.dev",
    "ngrok.io", "nip.io", "no-ip.org", "oast.fun", "oast.live", "oast.me", "oast.online", "oast.pro",
    "oast.site", "on.aws", "onrender.com", "oraclecloud.com", "pages.dev", "pythonanywhere.com", "r2.dev",
    "railway.app", "readthedocs.io", "repl.co", "replit.app", "replit.dev", "requestcatcher.com", "run.app",
    "serveo.net", "shopifypreview.com", "sslip.io", "statichost.eu", "surge.sh", "trafficmanager.net",
    "trycloudflare.com", "ts.net", "up.railway.app", "vercel.app", "wasabisys.com", "web.app",
    "webhook.site", "windows.net", "wixsite.com", "wordpress.com", "workers.dev", "xip.io", "zapto.org",
    "akamaihd.net", "akamaized.net", "akamaiedge.net", "amazonaws.com", "amazonaws.com.cn",
))  # fmt: skip
# Labels below amazonaws.com that name a service or a place and not a customer.
_AMAZON = ("s3", "s3-website", "s3-accelerate", "s3-control", "s3-accesspoint", "dualstack", "elb", "compute",
           "compute-1", "execute-api", "elasticbeanstalk")  # fmt: skip


def shared(suffix: str) -> str:
    """Why ``*.suffix`` would take in anybody's names, or ``""``. ``suffix`` is normalised."""
    labels = suffix.split(".")
    if len(labels) == 1:
        return f"everybody can have a name below {suffix}"
    if len(labels) == 2 and len(labels[1]) == 2 and labels[0] in _SECOND:
        return f"everybody can have a name below {suffix}"
    for zone in _ZONES:
        if zone == suffix or zone.endswith(f".{suffix}"):
            return f"everybody can have a name below {zone}"
    if suffix.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        below = suffix[: suffix.index(".amazonaws.com")].split(".")
        if all(label in _AMAZON or _is_region(label) for label in below):
            return f"everybody can have a name below {suffix}"
    return ""


def _is_region(label: str) -> bool:
    """``eu-west-1``, ``us-gov-east-1``, and ``s3-eu-west-1``."""
    parts = label.removeprefix("s3-website-").removeprefix("s3-").split("-")
    return len(parts) >= 3 and len(parts[0]) == 2 and parts[-1].isdigit() and all(map(str.isalnum, parts))
