"""Collect SGLang 0.5.17 and what it imports on an H200, as parts small enough to copy one by one.

    python benchmarks/sglang/bundle.py OUT [--part-mb 28] [--with-fa3]

For a GPU machine without a network that has Python 3.12 and torch 2.11 (the torch that SGLang 0.5.17 pins). Needs a
package index here. OUT/parts holds sglang.tar.xz in pieces; `install.sh` puts them together. Left out: kernels for
other GPUs, and FlashAttention 3 (1.1 GB unpacked), so attention must be told to use other kernels, as
`compare_served.py` does.
"""

import argparse
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

GLIBC = (39, 34, 31, 28, 27, 24, 17, 12, 5)
PLATFORMS = [*(f"manylinux_2_{n}_x86_64" for n in GLIBC), "manylinux2014_x86_64", "manylinux2010_x86_64",
             "manylinux1_x86_64"]  # fmt: skip
WITH_DEPENDENCIES = (
    "fastapi", "uvicorn", "pyzmq", "msgspec", "orjson", "ipython", "setproctitle", "partial-json-parser", "interegular",
    "openai==2.6.1", "openai-harmony==0.0.4", "python-multipart", "jsonschema", "opentelemetry-api",
    "opentelemetry-sdk", "opentelemetry-semantic-conventions", "soundfile", "pybase64", "dill", "distro", "watchfiles",
    "blobfile", "loguru", "requests",
)  # fmt: skip
ALONE = (
    "xgrammar==0.2.1", "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0", "gguf",
    "flashinfer-python==0.6.15.post1",
    "transformers==5.12.1", "tokenizers==0.22.2", "sgl-deep-gemm==0.1.5.post1", "torch_memory_saver", "llguidance",
    "kernels==0.14.1", "nvidia-cutlass-dsl==4.6.0", "cuda-python", "outlines==0.1.11", "anthropic", "docstring-parser",
    "multiprocess", "xxhash", "prometheus-client", "sglang==0.5.17", "sglang-kernel==0.4.5",
)  # fmt: skip
ON_THE_MACHINE = ("numpy-", "lxml-", "filelock-", "psutil-")
FA3 = "sgl_kernel/flash_ops"
OTHER_GPUS = ("sgl_kernel/infllm_ops", "sgl_kernel/sm100/")


def download(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version", "3.12",
               "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none", "-d",
               str(folder)]  # fmt: skip
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *arguments], check=True)


def thin_kernels(wheels: Path, target: Path, with_fa3: bool) -> None:
    """Unpack the kernel wheel without what this GPU does not run, and drop the wheel."""
    (wheel,) = wheels.glob("sglang_kernel-*.whl")
    left_out = OTHER_GPUS if with_fa3 else (*OTHER_GPUS, FA3)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if not name.startswith(left_out)])
    wheel.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part-mb", type=int, default=28, help="megabytes of a part")
    parser.add_argument("--with-fa3", action="store_true", help="keep FlashAttention 3: about 240 MB more")
    arguments = parser.parse_args()
    parts = arguments.out / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=arguments.out) as scratch:
        wheels, kernels = Path(scratch, "wheels"), Path(scratch, "kernels")
        download(wheels, *WITH_DEPENDENCIES)
        for package in ALONE:
            download(wheels, "--no-deps", package)
        for wheel in wheels.iterdir():
            if wheel.name.startswith(ON_THE_MACHINE):
                wheel.unlink()
        thin_kernels(wheels, kernels, arguments.with_fa3)
        packed = Path(scratch, "sglang.tar.xz")
        with lzma.open(packed, "wb", preset=2) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
            archive.add(wheels, "wheels")
            archive.add(kernels, "kernels")
        with packed.open("rb") as file:
            number = 0
            while piece := file.read(arguments.part_mb * 1_000_000):
                (parts / f"sglang.tar.xz.{number:02d}").write_bytes(piece)
                number += 1
    sys.stdout.write(f"{number} parts in {parts}\n")


if __name__ == "__main__":
    main()
