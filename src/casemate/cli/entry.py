"""Where the installed command starts: an isolated interpreter without ``site``.

It finds its own package, so neither PYTHONPATH nor a .pth file has a say, and asks a resident daemon
first if there is one, which takes none of the imports of the rest.
"""

import _signal
import sys

__all__ = ["main"]


def _find_packages(here: str) -> None:
    """Put the package's parent on the path, and the site-packages of an editable install's interpreter."""
    root = here.rsplit("/", 3)[0]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefix = sys.executable.rsplit("/", 2)[0]
    sys.path.append(root)
    # msgspec imports it where it is there, and needs it for older interpreters only: 7 ms of every start.
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    site_packages = f"{prefix}/lib/{version}/site-packages"
    if site_packages != root:
        sys.path.append(site_packages)


def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code."""
    # Until somebody takes it over Ctrl-C is the plain death that every program dies of: an exception in the
    # middle of an import shows as a traceback, and crashes msgspec's.
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    try:
        if argv[:1] == ["run"]:
            from casemate.cli import thin

            code = thin.try_daemon(argv[1:])
            if code is not None:
                return code
            import gc

            # Loading the rest makes many objects and no garbage: looking for some is 2 ms of every start.
            gc.disable()  # until the command runs
        from casemate.cli.main import dispatch

        return dispatch(argv)
    except KeyboardInterrupt:
        return 130
    except Exception:
        # Our own mistake must not look like the command's end, whose exit code could be 1.
        import traceback

        traceback.print_exc()
        sys.stderr.write("casemate: internal error; nothing is known of the command [internal]\n")
        return 125


if __name__ == "__main__":
    import os

    _find_packages(__file__)
    # All output is written by then, unbuffered; taking the interpreter apart would cost 6 ms.
    os._exit(main(sys.argv[1:]))
