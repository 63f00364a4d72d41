"""GPU kinds and their memory, as their makers state it (1 GB = 1e9 bytes)."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvq.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Gpu:
    """A row. Blackwell's memory is sold as 192 GB a chip and offered as 180 GB in NVIDIA's own servers: two rows."""

    name: str
    title: str
    gigabytes: int
    source: str

    @property
    def memory_bytes(self) -> int:
        return self.gigabytes * 10**9


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", "NVIDIA H100 SXM", 80, "NVIDIA H100 Tensor Core GPU datasheet: 80 GB HBM3"),
        Gpu("h200", "NVIDIA H200 SXM", 141, "NVIDIA H200 Tensor Core GPU datasheet: 141 GB HBM3e"),
        Gpu("b200", "NVIDIA B200 (DGX, HGX)", 180, "NVIDIA DGX B200 datasheet: 1,440 GB for 8 GPUs"),
        Gpu("b200-192", "NVIDIA B200 (whole chip)", 192, "NVIDIA Blackwell announcement, March 2024: 192 GB HBM3e"),
        Gpu("mi300x", "AMD Instinct MI300X", 192, "AMD Instinct MI300X datasheet: 192 GB HBM3"),
    )
}


def find_gpu(name: str) -> Gpu:
    """Raises RecipeError for a kind that is not in the table."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise RecipeError(f"--gpu {name}: not in kvq's table (publish/gpus.py). Give one of {', '.join(GPUS)}.")
    return gpu
