"""How parameters are cut into pieces that are staged at once, for both backends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.weight_sync.buckets import buckets
from rljob_trainer.weight_sync.ipc import packed_update

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)
bucket_sizes = st.integers(1, 60)


def parameters(sizes: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter of each size in bytes, named by its position."""
    return ((str(index), torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes))


@given(sizes=sizes, bucket_bytes=bucket_sizes)
def test_buckets_hold_every_parameter_once_in_order_within_their_size(sizes: list[int], bucket_bytes: int) -> None:
    cut = list(buckets(parameters(sizes), bucket_bytes))
    assert [name for bucket in cut for name, _ in bucket] == [str(index) for index in range(len(sizes))]
    for bucket in cut:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes


@given(sizes=sizes, bucket_bytes=bucket_sizes)
def test_buckets_are_as_full_as_they_may_be(sizes: list[int], bucket_bytes: int) -> None:
    cut = list(buckets(parameters(sizes), bucket_bytes))
    for bucket, following in pairwise(cut):
        assert sum(tensor.nbytes for _, tensor in bucket) + following[0][1].nbytes > bucket_bytes


def test_a_packed_update_says_how_to_cut_the_buffer_again() -> None:
    bucket = [("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(5, dtype=torch.float32))]
    update = packed_update(bucket, {"GPU-0": ("handle",)})
    assert update["names"] == ["a", "b"]
    assert update["dtype_names"] == ["bfloat16", "float32"]
    assert update["shapes"] == [[2, 3], [5]]
    assert update["tensor_sizes"] == [12, 20]
    assert update["packed"] is True
