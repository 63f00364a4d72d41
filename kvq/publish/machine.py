"""What `kvq doctor` looks at: Python and packages against kvq's own ranges, memory, GPUs, a disk, the Hub, engines.

Each look is a Finding; none changes anything, and the disk's two files are removed.
"""

import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.version import Version

from kvq.checkpoint.hub import ask_hub, client_errors, describe, redact
from kvq.publish.serving import SGLANG_FLAGS

Status = Literal["ok", "note", "bad"]
DISK_BYTES = 256 * 2**20
FULL_BYTES = 64 * 2**20  # less is as good as nothing
DISK_CHUNK = 16 * 2**20
DISK_SECONDS = 3.0
FEW_BYTES_A_SECOND = 200e6
HUB_SECONDS = 10.0
PYTHONS = ((3, 11), (3, 13))


@dataclass(frozen=True, slots=True)
class Finding:
    """`bad` stops kvq from doing its main job here, `note` is worth knowing."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """What kvq knows of a serving engine: the versions whose source its serving notes were read in."""

    package: str
    first: str | None
    last: str | None
    flags: tuple[str, ...]


ENGINES = (Engine("sglang", "0.5.17", "0.5.23", SGLANG_FLAGS), Engine("vllm", None, None, ()))


def examine(folder: Path, online: bool) -> Iterator[Finding]:
    """All findings, one after the other. `folder` is where outputs would go."""
    yield check_python()
    yield from check_packages()
    yield check_memory()
    yield from check_gpus()
    yield from check_disk(folder)
    yield check_hub() if online else Finding("Hub", "note", "not asked")
    yield from (check_engine(engine) for engine in ENGINES)


def as_dict(findings: list[Finding]) -> dict[str, Any]:
    return {
        "schema": "kvq.doctor/1",
        "passed": all(finding.status != "bad" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def dependency_versions() -> dict[str, str]:
    """Installed versions of what kvq needs, by name; "missing" where there is none. Nothing is imported."""
    return {requirement.name: _installed(requirement.name) or "missing" for requirement in _requirements()}


def _requirements() -> list[Requirement]:
    try:
        lines = requires("kvq") or []
    except PackageNotFoundError:
        return []
    parsed = [Requirement(line) for line in lines]
    return [requirement for requirement in parsed if requirement.marker is None or requirement.marker.evaluate()]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_python() -> Finding:
    found, (first, last) = sys.version_info[:2], PYTHONS
    title = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if first <= found <= last:
        return Finding("Python", "ok", title)
    return Finding("Python", "bad", title, f"use Python {first[0]}.{first[1]} to {last[0]}.{last[1]}")


def check_packages() -> Iterator[Finding]:
    """Every dependency against the range that kvq's own metadata states."""
    requirements = _requirements()
    if not requirements:
        yield Finding("packages", "note", "kvq is not installed as a package: no ranges to compare with", "pip install")
        return
    for requirement in requirements:
        found = _installed(requirement.name)
        if found is None:
            yield Finding(requirement.name, "bad", "missing", f"pip install '{requirement}'")
        elif not requirement.specifier.contains(found, prereleases=True):
            yield Finding(requirement.name, "bad", found, f"kvq needs {requirement.specifier}")
        else:
            yield Finding(requirement.name, "ok", found)


def check_memory() -> Finding:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Finding("host memory", "ok", f"{pages * size / 1e9:.1f} GB, {os.cpu_count()} processors")


def check_gpus() -> Iterator[Finding]:
    """CUDA devices as torch sees them."""
    try:
        import torch
    except ImportError as error:
        yield Finding("GPU", "bad", f"torch cannot be imported ({error})", "install torch for this machine")
        return
    if not torch.cuda.is_available():
        built = "for CUDA " + torch.version.cuda if torch.version.cuda else "for CPUs only"
        yield Finding("GPU", "note", f"none (torch {torch.__version__}, {built})", "kvq works on the CPU, in float32")
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        found = f"{properties.name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, capability {properties.major}."
        yield Finding(f"GPU {number}", "ok", f"{found}{properties.minor}, CUDA {torch.version.cuda}")


def check_disk(folder: Path, limit: int = DISK_BYTES, seconds: float = DISK_SECONDS) -> Iterator[Finding]:
    """Free space, and how fast a file is written (fsync included) and read back past the page cache."""
    try:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        if free < FULL_BYTES or not os.access(folder, os.W_OK):
            found = f"{free / 1e9:.1f} GB free in {folder}" if free < FULL_BYTES else f"{folder} is not writable"
            yield Finding("disk space", "bad", found, "make room, or give another folder: --disk DIR")
            return
        yield Finding("disk space", "ok", f"{free / 1e9:.1f} GB free in {folder}")
        if free < 2 * limit:
            yield Finding("disk speed", "note", "not measured: too little space")
            return
        with tempfile.TemporaryFile(dir=folder) as file:
            written, wrote = _write(file.fileno(), limit, seconds)
            read = _read(file.fileno(), written, seconds)
    except OSError as error:
        yield Finding("disk", "bad", f"{folder}: {error.strerror}", "give a folder that can be written: --disk DIR")
        return
    found = f"writes {wrote / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s, over {written / 1e6:.0f} MB"
    slow = min(wrote, read) < FEW_BYTES_A_SECOND
    yield Finding("disk speed", "note" if slow else "ok", found, "400 GB take long there" if slow else "")


def _write(file: int, limit: int, seconds: float) -> tuple[int, float]:
    """Bytes written in the time allowed, and bytes a second until they are on the disk."""
    data, done, started = os.urandom(DISK_CHUNK), 0, time.perf_counter()
    while done < limit and (done == 0 or time.perf_counter() - started < seconds):
        done += os.write(file, data)
        os.fsync(file)
    return done, done / (time.perf_counter() - started)


def _read(file: int, size: int, seconds: float) -> float:
    """Bytes a second. The kernel is asked to forget the file first; a file system may ignore that."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    done, started = 0, time.perf_counter()
    while done < size and (done == 0 or time.perf_counter() - started < seconds):
        done += len(os.pread(file, DISK_CHUNK, done))
    return done / (time.perf_counter() - started)


def check_hub() -> Finding:
    """Whether the Hub answers, and whether there is a token and it is good. The token itself is never shown."""
    try:
        place, who = ask_hub(HUB_SECONDS)
    except client_errors() as error:
        found = redact(describe(error))
        return Finding("Hub", "note", f"not reached: {found}", "local folders work; a Hub id and an upload do not")
    login = f"logged in as {who}" if who else "no token: public models only, no upload"
    return Finding("Hub", "ok" if who else "note", f"{place} answers, {login}", "" if who else "hf auth login")


def check_engine(engine: Engine) -> Finding:
    """Whether an engine could be imported here, and whether kvq's notes cover its version. It is not imported."""
    found = _installed(engine.package)
    if found is None or importlib.util.find_spec(engine.package) is None:
        return Finding(engine.package, "note", "not installed here; needed to serve, not to quantize")
    if engine.first is None or engine.last is None:
        return Finding(engine.package, "note", f"{found}; kvq's notes name no version of it", "try a request first")
    flags = f"serve with {' '.join(engine.flags)}"
    if Version(engine.first) <= Version(found) <= Version(engine.last):
        return Finding(engine.package, "ok", f"{found}; {flags}")
    return Finding(
        engine.package, "note", f"{found}; {flags}, as read in {engine.first} to {engine.last}", "try a request"
    )
