"""What enters beside the files a policy names: variables, settings, and the files of a fresh HOME."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from casemate.policy import environment, paths, registries
from casemate.policy.tools import Tools

if TYPE_CHECKING:
    from casemate.policy.environment import Inside
    from tests.unit.policy.conftest import Caller

TOOLS = Tools(path=("/usr/bin", "/bin"))


def inside(caller: Caller, environ: dict[str, str], *, tools: Tools = TOOLS, **flags: object) -> Inside:
    """What a caller with these variables brings in."""
    policy = caller.load(**flags).policy  # type: ignore[arg-type]
    return environment.collect(
        {"HOME": caller.places.home, **environ},
        policy,
        tools,
        workspace=caller.workspace,
        home=caller.places.home,
        guard=paths.guard(caller.places),
    )


def test_the_environment_starts_empty(caller: Caller) -> None:
    """Of a caller full of secrets nothing enters but what the sandbox decides."""
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "s", "GITHUB_TOKEN": "s", "SSH_AUTH_SOCK": "/run/x", "PYTHONPATH": "/x",
        "EDITOR": "vi",
        "LD_PRELOAD": "/x.so", "PIP_CLIENT_CERT": "/k", "UV_INDEX_CORP_PASSWORD": "s",
        "CARGO_REGISTRY_TOKEN": "s",
        "CARGO_REGISTRIES_CORP_TOKEN": "s", "NPM_TOKEN": "s", "npm_config__auth": "s",
        "HTTP_PROXY": "http://p",
        "npm_config_//host/:_authToken": "s", "XDG_RUNTIME_DIR": "/run/user/0",
        "DBUS_SESSION_BUS_ADDRESS": "unix:",
        "CASEMATE_SANDBOX": "no", "CASEMATE_X": "s", "BASH_FUNC_x%%": "() { :; }", "PATH": "/evil",
        "HOME_X": "s",
        "PIP_CONFIG_FILE": "/x", "UV_CONFIG_FILE": "/x", "NODE_OPTIONS": "--require x",
        "GIT_CONFIG_COUNT": "1",
    }  # fmt: skip
    env = inside(caller, secrets).env
    assert env == {
        "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": "/home/sandbox", "USER": "sandbox",
        "LOGNAME": "sandbox",
        "TMPDIR": "/tmp", "SHELL": env["SHELL"], "CASEMATE_SANDBOX": "process",
    }  # fmt: skip


def test_the_short_list_passes(caller: Caller) -> None:
    """Language, terminal and the switches of common tools enter as they are."""
    plain = {
        "LANG": "de_DE.UTF-8", "LC_ALL": "C", "TZ": "UTC", "TERM": "xterm", "NO_COLOR": "1", "CI": "true",
        "PYTHONUNBUFFERED": "1", "PIP_DEFAULT_TIMEOUT": "60", "GIT_AUTHOR_NAME": "A B",
    }  # fmt: skip
    env = inside(caller, plain).env
    assert {name: env[name] for name in plain} == plain


def test_pass_and_set_are_the_operators_word(caller: Caller) -> None:
    """Named variables pass as they are, patterns their prefix, and set wins over all but the boundary."""
    environ = {"TOKEN": "t", "APP_A": "a", "APP_B": "b", "APPX": "x", "PIP_INDEX_URL": "https://u:s@h/x"}
    env = inside(
        caller, environ, pass_=("TOKEN", "APP_*", "PATH", "PIP_INDEX_URL"), set={"APP_B": "mine",
        "PATH": "/p"}
    ).env
    assert (env["TOKEN"], env["APP_A"], env["APP_B"]) == ("t", "a", "mine")
    assert "APPX" not in env
    assert env["PATH"] == "/p"
    assert env["PIP_INDEX_URL"] == "https://u:s@h/x"  # asked for by name, so as it is
    mine = {"PATH": "/evil", "PWD": "/x", "SHELL": "/x"}
    decided = inside(caller, mine, pass_=tuple(mine)).env
    assert decided["PATH"] == "/usr/bin:/bin"
    assert decided["SHELL"] != "/x"
    assert "PWD" not in decided


def test_index_settings_pass_without_credentials(caller: Caller) -> None:
    """URLs of indexes enter without user, password, token or query; what cannot be told apart does not."""
    environ = {
        "PIP_INDEX_URL": "https://u:secret@host/simple",
        "PIP_EXTRA_INDEX_URL": "https://a:secret@b/x https://c/y",
        "UV_INDEX": "corp=https://u:secret@h/s", "npm_config_registry": "https://h/npm/?x=secret",
        "GOPROXY": "https://u:secret@h,direct", "CARGO_REGISTRIES_CORP_INDEX": "sparse+https://u:secret@h/i/",
        "npm_config_@corp:registry": "https://u:secret@h/", "UV_DEFAULT_INDEX": "https://u:sec/secret@h/",
    }  # fmt: skip
    found = inside(caller, environ)
    env = found.env
    assert "secret" not in repr(found)
    assert env["PIP_INDEX_URL"] == "https://host/simple"
    assert env["PIP_EXTRA_INDEX_URL"] == "https://b/x https://c/y"
    assert (env["UV_INDEX"], env["GOPROXY"]) == ("corp=https://h/s", "https://h,direct")
    assert env["CARGO_REGISTRIES_CORP_INDEX"] == "sparse+https://h/i/"
    assert env["npm_config_@corp:registry"] == "https://h/"
    assert "UV_DEFAULT_INDEX" not in env
    assert any("UV_DEFAULT_INDEX" in note for note in found.notes)


def test_proxies_pass_only_with_the_hosts_network(caller: Caller) -> None:
    """Without a network a proxy only confuses; with the host's it is needed, without its password."""
    environ = {"HTTPS_PROXY": "http://u:secret@proxy:3128", "no_proxy": "localhost"}
    assert "HTTPS_PROXY" not in inside(caller, environ).env
    env = inside(caller, environ, network="host").env
    assert (env["HTTPS_PROXY"], env["no_proxy"]) == ("http://proxy:3128", "localhost")


@pytest.mark.parametrize("text", ["x", "-----BEGIN CERTIFICATE-----\n-----BEGIN RSA PRIVATE KEY-----\n"])
def test_only_certificates_come_in_as_certificates(caller: Caller, text: str) -> None:
    """A variable for certificates brings in a file of certificates and nothing else, keys least of all."""
    file = caller.file("home/certs/ca.pem", text)
    found = inside(caller, {"SSL_CERT_FILE": file})
    assert found.binds == ()
    assert "SSL_CERT_FILE" not in found.env
    control = caller.file("home/certs/ca.pem", "-----BEGIN CERTIFICATE-----\n")
    assert inside(caller, {"SSL_CERT_FILE": control}).binds == (control,)


def test_paths_in_settings_are_bound_if_they_may_be(caller: Caller) -> None:
    """Certificates, wheels and constraints are reported; what is too broad is dropped with a note."""
    bundle = caller.file("home/certs/ca.pem", "-----BEGIN CERTIFICATE-----\n")
    wheels = caller.directory("wheels")
    limits = caller.file("limits.txt", "x")
    caller.file("home/.ssh/id", "x")
    found = inside(
        caller,
        {
            "SSL_CERT_FILE": bundle, "PIP_CERT": bundle, "CURL_CA_BUNDLE": "/etc/hostname",
            "PIP_FIND_LINKS": f"{wheels} https://u:p@h/links", "PIP_CONSTRAINT": f"file://{limits}",
            "UV_FIND_LINKS": f"{caller.places.home},{wheels}", "REQUESTS_CA_BUNDLE": "/no/such.pem",
            "NODE_EXTRA_CA_CERTS": f"{caller.places.home}/.ssh", "SSL_CERT_DIR": f"/etc/ssl:{wheels}:/no:rel",
        },
    )  # fmt: skip
    assert set(found.binds) == {bundle, wheels, limits}
    env = found.env
    assert (env["SSL_CERT_FILE"], env["PIP_CERT"], env["CURL_CA_BUNDLE"]) == (bundle, bundle, "/etc/hostname")
    assert env["PIP_FIND_LINKS"] == f"{wheels} https://h/links"
    assert env["PIP_CONSTRAINT"] == f"file://{limits}"
    assert env["UV_FIND_LINKS"] == wheels
    assert "REQUESTS_CA_BUNDLE" not in env
    assert "NODE_EXTRA_CA_CERTS" not in env
    assert env["SSL_CERT_DIR"].split(":")[-1] == wheels
    assert sum("too broad" in note or "private files" in note for note in found.notes) == 2


def test_hidden_and_visible_paths_in_settings(caller: Caller) -> None:
    """A hidden path is not brought in by a setting, and one that is visible is not bound again."""
    wheels = caller.directory("wheels")
    environ = {"PIP_FIND_LINKS": wheels}
    hidden = inside(caller, environ, deny=(wheels,))
    assert (hidden.binds, "PIP_FIND_LINKS" in hidden.env) == ((), False)
    shown = inside(caller, environ, read=(wheels,))
    assert (shown.binds, shown.env["PIP_FIND_LINKS"]) == ((), wheels)
    mine = caller.directory("work/project/wheels")
    assert inside(caller, {"PIP_FIND_LINKS": mine}).binds == ()


def test_roots_pass_where_the_sandbox_sees_them(caller: Caller) -> None:
    """JAVA_HOME and the like enter if what they name is visible, and not otherwise."""
    java = caller.directory("jdk/bin")
    root = f"{caller.root}/jdk"
    assert "JAVA_HOME" not in inside(caller, {"JAVA_HOME": root}).env
    tools = Tools(binds=(java, f"{root}/lib"), path=("/usr/bin",))
    assert inside(caller, {"JAVA_HOME": root}, tools=tools).env["JAVA_HOME"] == root
    venv = f"{caller.workspace}/.venv"
    assert inside(caller, {"VIRTUAL_ENV": venv}).env["VIRTUAL_ENV"] == venv
    assert "VIRTUAL_ENV" not in inside(caller, {"VIRTUAL_ENV": ".venv"}).env


def test_caches_have_a_place_and_their_variables(caller: Caller) -> None:
    """Each cache of the closed list is mounted below the fresh HOME and found by its program."""
    assert inside(caller, {}).caches == ()
    found = inside(caller, {}, cache=tuple(environment.CACHES))
    places = [place for _, place in found.caches]
    assert len(set(places)) == len(places)
    assert all(place.startswith("/home/sandbox/") for place in places)
    assert len({name for name, _ in found.caches}) == len(places)
    assert found.env["PIP_CACHE_DIR"] == "/home/sandbox/.cache/pip"


def test_tools_bring_their_variables(caller: Caller) -> None:
    """What a version manager needs to find itself is in the environment."""
    tools = Tools(path=("/x/shims", "/usr/bin"), env={"PYENV_ROOT": "/x"})
    env = inside(caller, {"PYENV_ROOT": "/other"}, tools=tools).env
    assert (env["PYENV_ROOT"], env["PATH"]) == ("/x", "/x/shims:/usr/bin")


# ---------------------------------------------------------------- files of the fresh HOME


def test_the_identity_of_commits_enters_and_nothing_else_of_git(caller: Caller) -> None:
    """Name, mail and first branch are copied and the workspace is safe; nothing else comes along."""
    caller.file("home/.config/git/config", "[user]\n\tname = Old\n\temail = old@x.example\n")
    caller.file(
        "home/.gitconfig",
        '[user]\n\tname = "A \\"Q\\" B" ; c\n\tsigningkey = SECRET\n[user "x"]\n\temail = wrong\n'
        "[init] defaultBranch = trunk\n[credential]\n\thelper = store --file SECRET\n"
        "[include]\n\tpath = ~/SECRET\n"
        "[alias]\n\tx = !SECRET\n[url \"https://u:SECRET@h/\"]\n\tinsteadOf = x\n",
    )
    text = inside(caller, {}).home_files[".gitconfig"].decode()
    assert text == (
        '[user]\n\tname = "A \\"Q\\" B"\n\temail = "old@x.example"\n[init]\n\tdefaultBranch = "trunk"\n'
        f'[safe]\n\tdirectory = "{caller.workspace}"\n'
    )


def test_git_reads_back_what_was_written(caller: Caller) -> None:
    """Names with every odd character survive, by git's own judgement."""
    import shutil
    import subprocess

    if shutil.which("git") is None:
        pytest.fail("git is missing: scripts/setup installs it")
    odd = 'q " b \\ t\t n\n # ; é'
    data = registries.git_config([], ["/w/a b", '/w/"q"'], {"GIT_AUTHOR_NAME": odd,
    "GIT_AUTHOR_EMAIL": "a@b"})
    file = caller.file("written", data)

    def get(key: str) -> list[str]:
        done = subprocess.run(
            ["git", "config", "--file", file, "-z", "--get-all", key], capture_output=True, text=True,
            check=True
        )
        return done.stdout.split("\0")[:-1]

    assert get("user.name") == [odd]
    assert get("safe.directory") == ["/w/a b", '/w/"q"']
    again = registries.git_config([data.decode()], [], {})
    assert again == registries.git_config([], [], {"GIT_AUTHOR_NAME": odd, "GIT_AUTHOR_EMAIL": "a@b"})


def test_pips_settings_enter_without_credentials(caller: Caller) -> None:
    """Both of the user's files are read, the weightier one wins, and only keys of the list come through."""
    wheels = caller.directory("wheels")
    bundle = caller.file("home/ca.pem", "x")
    caller.file("home/.pip/pip.conf", "[global]\ntimeout = 5\nindex-url = https://old/\n")
    caller.file(
        "home/.config/pip/pip.conf",
        f"# c\n[global]\nindex_url: https://u:SECRET@host/simple\nextra-index-url =\n    https://a:SECRET@b/\n"
        f"    file://{wheels}\nfind-links = ~/.ssh\ncert = ~/ca.pem\nclient-cert = /SECRET\nproxy = http://u:SECRET@p\n"
        "[install]\nno-binary = :all:\n[odd section!]\ntimeout = 9\n",
    )
    found = inside(caller, {})
    text = found.home_files[".config/pip/pip.conf"].decode()
    assert text == (
        "[global]\ntimeout = 5\nindex-url = https://host/simple\nextra-index-url =\n    https://b/\n"
        f"    file://{wheels}\ncert = {bundle}\n[install]\nno-binary = :all:\n"
    )
    assert found.binds == (wheels, bundle)
    assert any("pip.conf" in note for note in found.notes)
    assert "SECRET" not in repr(found)


def test_npms_settings_enter_without_credentials(caller: Caller) -> None:
    """Registries and switches come through; tokens, passwords, certificates and variables do not."""
    caller.file(
        "home/.npmrc",
        "registry=https://u:SECRET@h/npm/\n@corp:registry = https://h/corp/\n//h/npm/:_authToken=SECRET\n_auth=SECRET\n"
        "_password=SECRET\nfund=false\nkey=SECRET\ncert=SECRET\nproxy=http://SECRET\n"
        "always-auth=${SECRET}\n; c\n"
        'save-prefix="~"\ncafile=/etc/hostname\n',
    )
    found = inside(caller, {})
    assert found.home_files[".npmrc"].decode().splitlines() == [
        "registry=https://h/npm/", "@corp:registry=https://h/corp/", "fund=false", "save-prefix=~",
        "cafile=/etc/hostname",
    ]  # fmt: skip
    assert "SECRET" not in repr(found)


def test_cargos_settings_enter_without_credentials(caller: Caller) -> None:
    """Sources and registries come through as TOML that says the same; tokens and odd tables do not."""
    import tomllib

    caller.file(
        "home/.cargo/config.toml",
        '[source.crates-io]\nreplace-with = "corp" # c\n[source."corp"]\nregistry = "sparse+https://u:SECRET@h/i/"\n'
        '[registries.corp]\nindex = "https://h/i"\ntoken = "SECRET"\n'
        '[registry]\ntoken = "SECRET"\ndefault = \'corp\'\n'
        '[net]\ngit-fetch-with-cli = true\nretry = 3\n[env]\nX = "SECRET"\n'
        '[http]\nproxy = "u:SECRET@h"\ncainfo = "/no"\n'
        '[target.x]\nrunner = "SECRET"\n[source.bad"\nregistry = "SECRET"\n',
    )
    found = inside(caller, {})
    assert tomllib.loads(found.home_files[".cargo/config.toml"].decode()) == {
        "source": {"crates-io": {"replace-with": "corp"}, "corp": {"registry": "sparse+https://h/i/"}},
        "registries": {"corp": {"index": "https://h/i"}},
        "registry": {"default": "corp"},
        "net": {"git-fetch-with-cli": True, "retry": 3},
    }
    assert "SECRET" not in repr(found)


def test_a_home_without_settings_gives_only_the_safe_directory(caller: Caller) -> None:
    """Nothing is made up."""
    out = caller.directory("out")
    found = inside(caller, {}, write=(out,))
    assert found.home_files == {
        ".gitconfig": f'[safe]\n\tdirectory = "{caller.workspace}"\n\tdirectory = "{out}"\n'.encode()
    }


@pytest.mark.parametrize("name", [".gitconfig", ".npmrc", ".config/pip/pip.conf", ".cargo/config.toml"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "binary", "huge"])
def test_strange_settings_files_neither_hang_nor_break(caller: Caller, name: str, kind: str) -> None:
    """A FIFO, a directory, bytes that are no text, a huge file: as if there were none."""
    import os

    path = f"{caller.places.home}/{name}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        os.mkdir(path)
    else:
        caller.file(path, b"\xff\0\xfe[" if kind == "binary" else b"[user]\nname = x\n" + b"#" * (1 << 20))
    assert set(inside(caller, {}).home_files) == {".gitconfig"}


def test_the_three_doors_say_the_same(caller: Caller) -> None:
    """``build``, ``files`` and ``home_files`` are parts of one look."""
    policy = caller.load().policy
    args = (caller.environ, policy, TOOLS)
    whole = environment.collect(*args, workspace=caller.workspace)
    assert environment.build(*args, workspace=caller.workspace) == whole.env
    assert environment.files(*args, workspace=caller.workspace) == whole.binds
    assert environment.home_files(*args, workspace=caller.workspace) == whole.home_files
    assert environment.caches(policy) == whole.caches
