"""Division of parameters into pieces that are staged together, for both backends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.weight_sync.transfer import buckets, largest_unit_bytes, layout, packed, unit_of

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)
bucket_sizes = st.integers(1, 60)


def parameters(sizes: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter of each size in bytes, each in a module of its own."""
    return ((named(index), torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes))


def named(index: int) -> str:
    return f"model.layers.{index}.mlp.up_proj.weight"


@given(sizes=sizes, bucket_bytes=bucket_sizes)
def test_buckets_hold_every_parameter_once_in_order_within_their_size(sizes: list[int], bucket_bytes: int) -> None:
    cut = list(buckets(parameters(sizes), bucket_bytes))
    assert [name for bucket in cut for name, _ in bucket] == [named(index) for index in range(len(sizes))]
    for bucket in cut:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes


@given(sizes=sizes, bucket_bytes=bucket_sizes)
def test_buckets_are_as_full_as_they_may_be(sizes: list[int], bucket_bytes: int) -> None:
    cut = list(buckets(parameters(sizes), bucket_bytes))
    for bucket, following in pairwise(cut):
        assert sum(tensor.nbytes for _, tensor in bucket) + following[0][1].nbytes > bucket_bytes


@given(bucket_bytes=bucket_sizes)
def test_weights_that_the_engine_fuses_share_a_bucket(bucket_bytes: int) -> None:
    siblings = [
        f"model.layers.{layer}.{module}.weight"
        for layer in range(3)
        for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    ]
    sent = [(name, torch.zeros(7, dtype=torch.uint8)) for name in siblings]
    bucket_of = {name: number for number, bucket in enumerate(buckets(sent, bucket_bytes)) for name, _ in bucket}
    assert list(bucket_of) == siblings
    for name in siblings:
        assert bucket_of[name] == bucket_of[next(other for other in siblings if unit_of(other) == unit_of(name))]
    assert largest_unit_bytes((name, tensor.nbytes) for name, tensor in sent) == 3 * 7


@given(sizes=sizes)
def test_a_packed_bucket_is_cut_again_by_its_layout(sizes: list[int]) -> None:
    bucket = [(str(size), torch.randn(size, 2, dtype=torch.float64).to(torch.bfloat16)) for size in sizes]
    how = layout(bucket)
    assert how["dtype_names"] == ["bfloat16"] * len(sizes)
    parts = packed(bucket).split(how["tensor_sizes"])
    for (_, tensor), part, shape in zip(bucket, parts, how["shapes"], strict=True):
        assert torch.equal(part.view(torch.bfloat16).view(shape), tensor)
