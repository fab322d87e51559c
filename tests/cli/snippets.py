"""Small Python programs that print the same lines behind the boundary as without it, by name.

Each is a whole file; the ones that start processes keep to what `spawn` needs.
"""

from __future__ import annotations

SNIPPETS: dict[str, str] = {
    "process-pools": """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor

def square(x):
    return x * x

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with ProcessPoolExecutor(2, mp_context=mp.get_context(method)) as pool:
            print(method, list(pool.map(square, range(5))))
""",
    "shared-memory": """
import os
from multiprocessing import Process, shared_memory

def write(name):
    other = shared_memory.SharedMemory(name=name)
    other.buf[:5] = b"hello"
    other.close()

if __name__ == "__main__":
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    child = Process(target=write, args=(memory.name,))
    child.start()
    child.join()
    print(bytes(memory.buf[:5]), memory.name in os.listdir("/dev/shm"))
    memory.close()
    memory.unlink()
    print(memory.name in os.listdir("/dev/shm"))
""",
    "semaphores": """
import ctypes, os, threading
from multiprocessing import BoundedSemaphore, Event, Process, Queue
libc = ctypes.CDLL(None, use_errno=True)
libc.sem_open.restype = ctypes.c_void_p

def work(queue, turn, go):
    go.wait()
    with turn:
        queue.put(1)

if __name__ == "__main__":
    name = b"/casemate-test-%d" % os.getpid()
    made = libc.sem_open(name, os.O_CREAT | os.O_EXCL, 0o600, 1)
    print(bool(made), libc.sem_wait(ctypes.c_void_p(made)), libc.sem_trywait(ctypes.c_void_p(made)))
    print(libc.sem_unlink(name))
    queue, turn, go = Queue(), BoundedSemaphore(1), Event()
    children = [Process(target=work, args=(queue, turn, go)) for _ in range(3)]
    for child in children:
        child.start()
    go.set()
    print(sum(queue.get() for _ in children))
    for child in children:
        child.join()
    print([child.exitcode for child in children])
""",
    "temporary-files": """
import os, tempfile
with tempfile.NamedTemporaryFile() as a, tempfile.TemporaryFile() as b, tempfile.TemporaryDirectory() as c:
    b.write(b"x" * 100000)
    print(tempfile.gettempdir(), os.path.dirname(a.name), os.path.isdir(c), b.tell())
handle = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o644)
os.write(handle, b"made without a name")
os.link(f"/proc/self/fd/{handle}", "named", src_dir_fd=os.open("/", os.O_PATH), follow_symlinks=True)
print(open("named").read())
with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
    file.write(b"replaced")
os.replace(file.name, "named")
print(open("named").read())
""",
    "sqlite": """
import sqlite3
for mode in ("delete", "wal"):
    base = sqlite3.connect(f"{mode}.db")
    print(base.execute(f"pragma journal_mode={mode}").fetchone())
    base.execute("create table t (x integer primary key, y)")
    with base:
        base.executemany("insert into t (y) values (?)", [(str(i),) for i in range(500)])
    print(base.execute("select count(*), sum(y) from t").fetchone())
    base.execute("vacuum")
    base.close()
""",
    "loopback-servers": """
import asyncio

async def answer(reader, writer):
    writer.write((await reader.readline()).upper())
    await writer.drain()
    writer.close()

async def main():
    for host in ("127.0.0.1", "::1", "0.0.0.0", "::"):
        server = await asyncio.start_server(answer, host, 0)
        target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        reader, writer = await asyncio.open_connection(target, server.sockets[0].getsockname()[1])
        writer.write(b"hello\\n")
        print(host, await reader.read())
        writer.close()
        server.close()
    server = await asyncio.start_unix_server(answer, "socket")
    reader, writer = await asyncio.open_unix_connection("socket")
    writer.write(b"hello\\n")
    print(await reader.read())
    writer.close()
    server.close()
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    print(await child.communicate(b"through a pipe"))

asyncio.run(main())
import os
os.unlink("socket")
""",
    "datagrams": """
import socket
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    with socket.socket(family, socket.SOCK_DGRAM) as a, socket.socket(family, socket.SOCK_DGRAM) as b:
        a.bind((address, 0))
        b.connect(a.getsockname())
        b.send(b"datagram")
        print(a.recv(99))
a, b = socket.socketpair()
socket.send_fds(a, [b"one"], [0])
print(len(socket.recv_fds(b, 9, 1)[1]))
with socket.socket(socket.AF_UNIX) as a, socket.socket(socket.AF_UNIX) as b:
    a.bind(b"\\0casemate-everyday")
    a.listen()
    b.connect(b"\\0casemate-everyday")
    print(b.getpeername())
print(sorted({info[4][0] for info in socket.getaddrinfo("127.0.0.1", 80)}))
""",
    "signals-and-timers": """
import os, select, signal, subprocess, threading, time
caught = []
for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(number, lambda n, frame: caught.append(signal.Signals(n).name))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
os.kill(os.getpid(), signal.SIGUSR1)
child = subprocess.Popen(["sleep", "60"])
pidfd = os.pidfd_open(child.pid)
signal.pidfd_send_signal(pidfd, signal.SIGTERM)
select.select([pidfd], [], [])
print(child.wait(), caught)
group = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
os.killpg(group.pid, signal.SIGKILL)
print(group.wait())
print(os.nice(3) - os.nice(0), os.getpriority(os.PRIO_PROCESS, 0) == os.nice(0))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(len(os.sched_getaffinity(0)))
""",
    "files": """
import ctypes, fcntl, mmap, os, shutil
open("a", "w").write("content")
os.link("a", "hard")
os.symlink("a", "soft")
os.mkfifo("fifo")
os.unlink("fifo")
os.makedirs("d/e/f")
open("d/e/f/g", "w").close()
os.rename("d/e", "moved")
os.rename("moved", "d/back")
shutil.copytree("d", "copy", symlinks=True)
shutil.rmtree("d")
os.setxattr("a", "user.note", b"kept")
print(os.getxattr("a", "user.note"), os.stat("a").st_nlink, sorted(os.listdir(".")))
with open("locked", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
with open("mapped", "w+b") as file:
    os.posix_fallocate(file.fileno(), 0, 8192)
    with mmap.mmap(file.fileno(), 8192) as memory:
        memory[4096:4100] = b"here"
    print(os.pread(file.fileno(), 4, 4096))
with open("sparse", "wb") as file:
    file.truncate(1 << 30)
print(os.stat("sparse").st_blocks)
os.truncate("sparse", 5)
libc = ctypes.CDLL(None, use_errno=True)
watch = libc.inotify_init1(0)
print(libc.inotify_add_watch(watch, b".", 0x100), open("new", "w").close(), len(os.read(watch, 4096)))
os.chmod("new", 0o640)
os.utime("new", (1, 1))
print(os.stat("new").st_mtime, oct(os.stat("new").st_mode))
""",
    "terminals": """
import os, pty, subprocess, termios, fcntl, struct
leader, follower = pty.openpty()
fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
print(os.ttyname(follower).startswith("/dev/pts/"), os.get_terminal_size(follower))
code = "import os; print(os.isatty(0), os.ctermid(), open('/dev/tty', 'w').isatty())"
child, terminal = pty.fork()
if not child:
    os.execvp("/usr/bin/python3", ["python3", "-c", code])
said = b""
try:
    while data := os.read(terminal, 999):
        said += data
except OSError:
    pass
print(said, os.waitpid(child, 0)[1])
""",
}
