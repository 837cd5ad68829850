"""Makes libzmq with CURVE as a static library, from the source that a pinned sdist of pyzmq carries.

``python build/libzmq.py`` prints the folder with ``libzmq.a``, ``include/zmq.h`` and the licences. It lies in the cache
of all checkouts and is made once. `build/pkg-config` gives its flags to cgo. libzmq 4.3.4 is LGPL-3 with an exception
for static linking; its own tweetnacl does CURVE, so nothing else is needed, and g++ is enough to compile it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SDIST = "pyzmq==25.1.1"
SHA256 = "259c22485b71abacdfa8bf79720cd7bcf4b9d128b30ea554f01ae71fdbfdaa23"
FOLDER = "pyzmq-25.1.1/bundled/zeromq/"
FLAGS = ["-fPIC", "-fvisibility=hidden", "-g0", "-ffunction-sections", "-fdata-sections", "-D_GNU_SOURCE", "-w"]
PATIENCE_S = 900  # pip runs the setup.py of the sdist, which takes a loaded machine minutes
# Small where the time is spent in the kernel anyway, fast where CURVE encrypts.
OPTIMIZE = {"tweetnacl.c": "-O2", "*": "-Os"}
LEFT_OUT = ("ws_", "wss_", "precompiled")

# What configure finds out on any Linux with glibc.
PLATFORM = """
#define ZMQ_IOTHREAD_POLLER_USE_EPOLL
#define ZMQ_IOTHREAD_POLLER_USE_EPOLL_CLOEXEC
#define ZMQ_POLL_BASED_ON_POLL
#define ZMQ_USE_CV_IMPL_STL11
#define ZMQ_CACHELINE_SIZE 64
#define ZMQ_HAVE_LINUX
#define ZMQ_HAVE_IPC
#define ZMQ_HAVE_SO_PEERCRED
#define ZMQ_HAVE_SOCK_CLOEXEC
#define ZMQ_HAVE_O_CLOEXEC
#define ZMQ_HAVE_EVENTFD
#define ZMQ_HAVE_EVENTFD_CLOEXEC
#define ZMQ_HAVE_IFADDRS
#define ZMQ_HAVE_UIO
#define ZMQ_HAVE_NOEXCEPT
#define ZMQ_HAVE_GETRANDOM
#define ZMQ_HAVE_SO_KEEPALIVE
#define ZMQ_HAVE_TCP_KEEPCNT
#define ZMQ_HAVE_TCP_KEEPIDLE
#define ZMQ_HAVE_TCP_KEEPINTVL
#define ZMQ_HAVE_TCP_KEEPALIVE
#define ZMQ_HAVE_TCP_USER_TIMEOUT
#define ZMQ_HAVE_SO_BINDTODEVICE
#define ZMQ_HAVE_SO_PRIORITY
#define ZMQ_HAVE_PTHREAD_SETNAME_2
#define ZMQ_HAVE_PTHREAD_SET_AFFINITY
#define ZMQ_HAVE_STRNLEN
#define ZMQ_HAVE_CURVE
#define ZMQ_USE_TWEETNACL
#define ZMQ_USE_BUILTIN_SHA1
#define HAVE_STRNLEN
#define HAVE_ACCEPT4
#define HAVE_FORK
#define HAVE_MKDTEMP
#define HAVE_CLOCK_GETTIME
"""

# What is changed in the source, by file. libc++ wants an allocator that rebinds to itself, which that one does not; it
# adds nothing to its base. The others put texts together with streams, for which iostream and its locales are linked.
CHANGES = [
    (
        "secure_allocator.hpp",
        "template <typename T> struct secure_allocator_t : std::allocator<T>\n{\n};",
        "template <typename T> using secure_allocator_t = std::allocator<T>;",
    ),
    (
        "address.cpp",
        """std::stringstream s;
        s << protocol << "://" << address;
        addr_ = s.str ();""",
        """addr_ = protocol + "://" + address;""",
    ),
    (
        "ctx.cpp",
        """std::ostringstream s;
                s << value;
                scoped_lock_t locker (_opt_sync);
                _thread_name_prefix = s.str ();""",
        """scoped_lock_t locker (_opt_sync);
                _thread_name_prefix = std::to_string (value);""",
    ),
    (
        "stream_engine_base.cpp",
        """std::ostringstream buf;
            buf << ":" << cred.uid << ":" << cred.gid << ":" << cred.pid;
            peer_address += buf.str ();""",
        """peer_address += ":" + std::to_string (cred.uid) + ":" + std::to_string (cred.gid)
                            + ":" + std::to_string (cred.pid);""",
    ),
    (
        "stream_engine_base.cpp",
        """std::ostringstream stream;
    stream << static_cast<int> (_s);
    std::string fd_string = stream.str ();""",
        """std::string fd_string = std::to_string (static_cast<int> (_s));""",
    ),
]


def cache() -> Path:
    """The folder that all checkouts of a user share, as in env.sh."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/root", ".cache"))
    return Path(os.environ.get("TQ_CACHE") or home / "transferqueue")


def fetch(folder: Path) -> Path:
    """The sdist, through pip, so that the user's index and proxy serve it.

    An index that cannot be reached is given up soon, whatever pip is configured to: there are builds without libzmq.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{SDIST} --hash=sha256:{SHA256}\n")
    command = ["download", "-q", "--require-hashes", "--no-deps", "--no-binary=pyzmq"]
    command += ["--retries", "1", "--timeout", "20", "-d", str(folder), "-r", str(wanted)]
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode != 0:
        pip = [shutil.which("pip") or "pip"]
    subprocess.run([*pip, *command], check=True, stdout=sys.stderr, timeout=PATIENCE_S)
    (sdist,) = folder.glob("pyzmq-*.tar.gz")
    if (found := hashlib.sha256(sdist.read_bytes()).hexdigest()) != SHA256:
        raise ValueError(f"{sdist.name}: sha256 {found}, want {SHA256}")
    return sdist


def unpack(sdist: Path, target: Path) -> Path:
    """The source of libzmq out of the sdist."""
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if m.name.startswith(FOLDER) and m.isfile() and ".." not in m.name]
        for member in members:
            path = target / member.name.removeprefix(FOLDER)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None
            path.write_bytes(content.read())
    return target


def compile_all(source: Path, cc: str, cxx: str, ar: str) -> Path:
    """libzmq.a of the source, compiled where it lies so that no path gets into it."""
    src = source / "src"
    (src / "platform.hpp").write_text(PLATFORM)
    for name, wrong, right in CHANGES:
        text = (src / name).read_text()
        if text.count(wrong) != 1:
            raise ValueError(f"{name} is not the one that is to be changed")
        (src / name).write_text(text.replace(wrong, right))
    sources = sorted(path.name for path in src.glob("*.cpp"))
    names = [*(name for name in sources if not name.startswith(LEFT_OUT)), "tweetnacl.c"]

    def one(name: str) -> str:
        compiler = [*cc.split(), "-std=gnu99"] if name.endswith(".c") else [*cxx.split(), "-std=gnu++11"]
        output = Path(name).with_suffix(".o").name
        flags = [OPTIMIZE.get(name, OPTIMIZE["*"]), *FLAGS, "-I../include", "-I."]
        subprocess.run([*compiler, *flags, "-c", name, "-o", output], cwd=src, check=True)
        return output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(one, names))
    subprocess.run([*ar.split(), "rcsD", "libzmq.a", *objects], cwd=src, check=True)
    return src / "libzmq.a"


def prepare() -> Path:
    """The folder of the library, made when it is not there yet."""
    cc, cxx, ar = (os.environ.get(name) or default for name, default in (("CC", "gcc"), ("CXX", "g++"), ("AR", "ar")))
    key = hashlib.sha256(
        "\n".join([SHA256, PLATFORM, str(CHANGES), str(OPTIMIZE), *FLAGS, cc, cxx]).encode()
    ).hexdigest()[:16]
    target = cache() / f"libzmq-{key}"
    if target.is_dir():
        return target
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / "libzmq.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():  # made by another checkout meanwhile
            return target
        with tempfile.TemporaryDirectory(prefix="libzmq-", dir=cache()) as temporary:
            folder = Path(temporary)
            source = unpack(fetch(folder), folder / "source")
            made = folder / "made"
            (made / "include").mkdir(parents=True)
            shutil.copy(compile_all(source, cc, cxx, ar), made)
            for name in ("include/zmq.h", "COPYING", "COPYING.LESSER"):
                shutil.copy(source / name, made / name)
            os.replace(made, target)
    return target


def main() -> int:
    """Print the folder, or why there is none."""
    try:
        print(prepare())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"error: libzmq was not built from {SDIST}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
