"""Which real projects are run, and what of their tests.

Each brings its tests in its source distribution, whose content is pinned by its hash. Left out are whole
files that take minutes for no other kind of system call. No single test is left out: one that fails
outside has to fail inside as well.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Project:
    """One source distribution."""

    name: str
    version: str
    sha256: str
    modes: tuple[str, ...]
    tests: tuple[str, ...]
    """What pytest gets, relative to the source."""
    proofs: tuple[str, ...]
    """Tests that use what the project was chosen for: they must have passed."""
    at_least: int
    """So many tests must have passed."""
    requirements: tuple[str, ...] = ()
    build_inside: bool = False
    """Whether the sandbox compiles it, too."""

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def sdist(self) -> str:
        return f"{self.name}-{self.version}.tar.gz"


# Installed into every environment. Fixed, so that test ids stay what they are.
RUNNER = ("pytest==8.4.2", "pytest-timeout==2.4.0", "setuptools==75.8.0", "wheel==0.45.1",
          "flit_core==3.12.0")  # fmt: skip

# Not env, which does not wait for its child before it looks at its exit code, and not interact, which
# loses the end of its child's output now and then, as its own comments say: both fail outside, too.
PEXPECT = "constructor ctrl_chars filedescriptor isalive log misc popen_spawn repr unicode which winsize"

PROJECTS = (
    # Binds and connects on 127.0.0.1, ::1 and unix sockets, some of its servers in processes of their own.
    Project(
        name="waitress",
        version="3.0.2",
        sha256="682aaaf2af0c44ada4abfb70ded36393f0e307f4ab9456a215ce0020baefc31f",
        modes=("root", "uid1000"),
        tests=("tests",),
        proofs=(
            "tests.test_functional.TcpPipeliningTests::test_pipelining",
            "tests.test_functional.UnixPipeliningTests::test_pipelining",
            "tests.test_wasyncore.TestAPI_UseIPv6Poll::test_handle_connect",
        ),
        at_least=750,
    ),
    # Every test has a pty; control characters, signals, window sizes, shells that answer.
    Project(
        name="pexpect",
        version="4.9.0",
        sha256="ee7d41123f3c9911050ea2c2dac107568dc43b2d3b0c7557a33212c398ead30f",
        modes=("root",),
        tests=tuple(f"tests/test_{part}.py" for part in PEXPECT.split()),
        proofs=(
            "tests.test_ctrl_chars.TestCtrlChars::test_sendintr",
            "tests.test_isalive.IsAliveTestCase::test_forced_terminate",
            "tests.test_misc.TestCaseMisc::test_sighup",
            "tests.test_winsize.TestCaseWinsize::test_setwinsize",
        ),
        at_least=80,
        requirements=("ptyprocess==0.7.0",),
    ),
    # A C extension against Python.h and libffi; its tests compile more of them, and programs that embed.
    Project(
        name="cffi",
        version="1.17.1",
        sha256="1c39c6016c32bc48dd54561950ebd6836e1670f2ae46128f67cf49e789c52824",
        modes=("root",),
        tests=(
            "src/c/test_c.py",
            "testing/cffi0/test_ownlib.py",
            "testing/cffi0/test_zdistutils.py",
            "testing/cffi1/test_ffi_obj.py",
            "testing/cffi1/test_new_ffi_1.py",
            "testing/cffi1/test_zdist.py",
            "testing/embedding/test_basic.py",
        ),
        proofs=(
            "testing.cffi0.test_zdistutils.TestDistUtilsCPython::test_compile_module",
            "testing.embedding.test_basic.TestBasic::test_embedding_with_unicode",
        ),
        at_least=400,
        requirements=("pycparser==2.22",),
        build_inside=True,
    ),
    # Processes with pools, semaphores, queues, listeners and shared memory in /dev/shm.
    Project(
        name="multiprocess",
        version="0.70.18",
        sha256="f9597128e6b3e67b23956da07cf3d2e5cba79e2f4e0fba8d7903636663ec6d0d",
        modes=("uid1000",),
        # A copy for each version of Python.
        tests=("{python}/multiprocess/tests/test_multiprocessing_fork/test_processes.py",),
        proofs=(
            "WithProcessesTestSharedMemory::test_shared_memory_across_processes",
            "WithProcessesTestSemaphore::test_semaphore",
            "WithProcessesTestListenerClient::test_listener_client",
        ),
        at_least=130,
        requirements=("dill==0.4.0",),
    ),
)
