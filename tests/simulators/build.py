# SPDX-License-Identifier: Apache-2.0
"""Building the simulators' extension on first use, once for any number of processes."""

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "native"
ROOT = Path(__file__).parents[2]

_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra")
_JOBS = 2  # each takes about 1 GB


class NoCompilerError(RuntimeError):
    """There is no C++ compiler."""


VENDORS = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so.7"}
"""The libraries of simulated drivers, by their sources in `native/vendors/`."""
DECOY = "libamdhip64.so"
"""The name by which a second HIP runtime would be found, as in AMD's development packages."""


def library() -> Path:
    """Return the built extension, building it if there is none of these sources and this torch.

    The libraries of the drivers are in the folder beside it, that has its name without suffix.

    Raises `NoCompilerError`, or `RuntimeError` with what the compiler said. Warnings of the
    compiler are errors.
    """
    folder = ROOT / "build" / "simulators"
    built = folder / f"{_fingerprint()}.so"
    if built.exists():
        return built
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompilerError("the simulated accelerators need a C++ compiler: apt-get install g++")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, also when this process dies
        if not built.exists():
            _build(compiler, built)
    return built


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {torch.__file__} {_FLAGS}".encode())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(compiler: str, target: Path) -> None:
    """Compile each source and link them; the library appears whole or not at all."""
    torch_folder = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    includes = torch_folder / "include"  # not ours to keep free of warnings
    flags = [*_FLAGS, "-Werror", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", str(includes)]
    libraries = torch_folder / "lib"
    needed = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10", "-pthread"]

    with tempfile.TemporaryDirectory(dir=target.parent) as work:

        def compile_one(source: Path) -> str:
            compiled = str(Path(work, f"{source.stem}.o"))
            _run([compiler, *flags, "-c", str(source), "-o", compiled])
            return compiled

        with ThreadPoolExecutor(_JOBS) as pool:
            compiled = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
        linked = Path(work, target.name)
        _run([compiler, "-shared", *compiled, "-o", str(linked), *needed])
        drivers = target.with_suffix("")
        drivers.mkdir(exist_ok=True)
        for source, name, file in (
            *((source, name, name) for source, name in VENDORS.items()),
            ("hip", DECOY, "second.so"),
        ):
            _link(compiler, SOURCES / "vendors" / f"{source}.cpp", name, drivers / file)
        linked.rename(target)


def _link(compiler: str, source: Path, name: str, target: Path) -> None:
    """Make a library that is found by a name once it is loaded, whatever its file is called."""
    named = f"-Wl,-soname,{name}"
    _run([compiler, *_FLAGS, "-Werror", "-shared", str(source), named, "-o", str(target)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
