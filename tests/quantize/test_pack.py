"""The bytes that engines read.

Shape suffixes: O = out_features, I = in_features, G = groups.
"""

import pytest
import torch
from torch import Tensor

from kvq.quantize.pack import HostBlocks, pack_batch
from tests import reference


def pack_module(name: str, codes_OI: Tensor, scale_OG: Tensor) -> dict[str, Tensor]:
    """The second of three equal matrices, all its rows."""
    packed = pack_batch(codes_OI.expand(3, -1, -1), scale_OG.expand(3, -1, -1), HostBlocks())
    return packed.module(name, 1, slice(None))


def test_golden_words() -> None:
    codes_OI = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0], [7] * 8 + [-8] * 8], dtype=torch.int8)
    tensors = pack_module("m", codes_OI, torch.ones(2, 1, dtype=torch.bfloat16))
    words = [[word & 0xFFFFFFFF for word in row] for row in tensors["m.weight_packed"].tolist()]
    assert words == [[0xFEA98710, 0x88888888], [0xFFFFFFFF, 0x00000000]]


def test_golden_bytes() -> None:
    codes_OI = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int8)
    tensors = pack_module("m", codes_OI, torch.tensor([[0.25]], dtype=torch.bfloat16))
    written = {name: bytes(tensor.view(torch.uint8).flatten().tolist()) for name, tensor in tensors.items()}
    assert written == {
        "m.weight_packed": bytes.fromhex("10 32 54 76 98 ba dc fe"),
        "m.weight_scale": bytes.fromhex("80 3e"),
        "m.weight_shape": bytes.fromhex("01 00 00 00 00 00 00 00 10 00 00 00 00 00 00 00"),
    }


def test_names_types_and_shapes() -> None:
    codes_OI = torch.zeros(3, 64, dtype=torch.int8)
    tensors = pack_module("model.layers.3.mlp.experts.1.up_proj", codes_OI, torch.ones(3, 2, dtype=torch.bfloat16))
    prefix = "model.layers.3.mlp.experts.1.up_proj.weight"
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert kinds == {
        f"{prefix}_packed": (torch.int32, (3, 8)),
        f"{prefix}_scale": (torch.bfloat16, (3, 2)),
        f"{prefix}_shape": (torch.int64, (2,)),
    }
    assert tensors[f"{prefix}_shape"].tolist() == [3, 64]
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (7, 64), (40, 96)])
def test_packing_equals_reference_both_ways(rows: int, columns: int) -> None:
    codes_OI = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed = pack_module("m", codes_OI, torch.ones(rows, 1, dtype=torch.bfloat16))["m.weight_packed"]
    assert torch.equal(packed, reference.pack(codes_OI))
    assert torch.equal(reference.unpack(packed), codes_OI)


def test_rows_of_a_stack_are_packed_whole() -> None:
    codes_OI = torch.randint(-8, 8, (6, 64), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scale_OG = torch.arange(1, 13).reshape(6, 2).to(torch.bfloat16)
    tensors = pack_batch(codes_OI.unsqueeze(0), scale_OG.unsqueeze(0), HostBlocks()).module("m", 0, slice(2, 4))
    assert torch.equal(reference.unpack(tensors["m.weight_packed"]), codes_OI[2:4])
    assert tensors["m.weight_scale"].tolist() == [[5, 6], [7, 8]]


def carved(host: HostBlocks, *sizes: int) -> list[Tensor]:
    return [host.carve(torch.Size((size,)), torch.int16).fill_(number) for number, size in enumerate(sizes)]


def test_carved_tensors_share_blocks_and_no_bytes() -> None:
    tensors = carved(HostBlocks(page_locked=False, block_bytes=1024), 200, 3, 250, 900, 1)
    for number, tensor in enumerate(tensors):
        assert tensor.is_contiguous() and set(tensor.tolist()) == {number}
        assert tensor.data_ptr() % 64 == 0
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert storages[0] == storages[1] == storages[2]  # 400, 6 and 500 bytes, in 64ths: 1,024
    assert len(set(storages)) == 3  # 1,800 bytes get a block of their own


def test_only_what_is_carved_next_holds_a_block() -> None:
    host = HostBlocks(page_locked=False, block_bytes=128)
    full, other = carved(host, 64, 32)
    assert host._left.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert host._left.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


def test_what_is_on_the_host_is_not_copied() -> None:
    value = torch.arange(6).reshape(2, 3)
    assert HostBlocks().copy(value).data_ptr() == value.data_ptr()
    assert HostBlocks().copy(value.T).is_contiguous()


def test_scales_that_are_not_what_is_stored_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="float32"):
        pack_module("m", torch.zeros(1, 32, dtype=torch.int8), torch.ones(1, 1))
