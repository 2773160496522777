"""`policy_offload`: the weights are in host memory while the engine on the same GPU generates.

Their memory on the device is freed in place (`UntypedStorage.resize_`, as FSDP2 frees gathered parameters): parameters,
shards and views of them stay the same objects, which have no memory until the weights are back. Trained weights are
copied both ways. Weights that are not trained are copied to the host once, or never, and then read from the model's
files again. Everything comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.host_array import HostArray, parts_bytes, parts_like


@dataclass(frozen=True, slots=True)
class _Freed:
    """Device memory that was freed, and the place of its content."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None
    """uint8, in host memory; None: it is read from the model's files."""


class PolicyOffload:
    """The weights of one rank, on its device or in host memory."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: torch.device,
        read_frozen: Callable[[], None] | None = None,
    ) -> None:
        """`models`: the policy, and a reference model if it is another. Parameters that are not on `device` stay where
        they are. `read_frozen`: fills the parameters that are not trained from the model's files; None: a copy of
        them is kept in host memory, once they were offloaded.
        """
        self._models = models
        self._device = device
        self._read_frozen = read_frozen
        self._trained, self._frozen = _HostCopy(device), _HostCopy(device)
        self._freed: list[_Freed] = []
        self.copies: dict[str, Tensor] = {}
        """While the weights are offloaded: the local shard of each trained parameter of the policy, by name. They do
        not change before the weights are offloaded again."""

    @property
    def offloaded(self) -> bool:
        return bool(self._freed)

    def offload(self) -> None:
        """Free the device memory of the weights. Does nothing if that is done.

        Raises `RuntimeError` if the host lacks the memory; the weights are then on the device.
        """
        if self._freed:
            return
        trained, frozen = self._storages(trained=True), self._storages(trained=False)
        copies = [*self._trained.filled(trained), *self._copies_of_frozen(frozen)]
        torch.get_device_module(self._device).synchronize()
        self._freed = [
            _Freed(storage, storage.nbytes(), copy) for storage, copy in zip([*trained, *frozen], copies, strict=True)
        ]
        self.copies.update(self._copies_of_parameters())
        for freed in self._freed:
            freed.storage.resize_(0)

    def bring_back(self) -> None:
        """Bring the weights to the device. Does nothing if they are there.

        If the device lacks the memory, the weights stay offloaded, and all of it is free again.
        """
        if not self._freed:
            return
        try:
            for freed in self._freed:
                freed.storage.resize_(freed.nbytes)
                if freed.copy is not None:
                    _bytes_of(freed.storage).copy_(freed.copy, non_blocking=True)
            if any(freed.copy is None for freed in self._freed):
                assert self._read_frozen is not None
                self._read_frozen()
        except BaseException:
            torch.get_device_module(self._device).synchronize()
            for freed in self._freed:
                freed.storage.resize_(0)
            raise
        self._freed = []
        self.copies.clear()

    def _storages(self, *, trained: bool) -> list[torch.UntypedStorage]:
        """Device memory of trained parameters or of all others, each once.

        Without memory that torch cannot free, since something else refers to it: on a CPU, a numpy array.
        """
        found: dict[int, torch.UntypedStorage] = {}
        for _, parameter in self._parameters():
            shard = local(parameter)
            storage = shard.untyped_storage()
            here = shard.device.type == self._device.type
            if parameter.requires_grad == trained and here and storage.nbytes() and storage.resizable():
                found[storage._cdata] = storage
        return list(found.values())

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model in self._models:
            yield from model.named_parameters()

    def _copies_of_frozen(self, storages: list[torch.UntypedStorage]) -> Sequence[Tensor | None]:
        if self._read_frozen is not None:
            return [None] * len(storages)
        return self._frozen.filled(storages, only_once=True)

    def _copies_of_parameters(self) -> dict[str, Tensor]:
        copies = {freed.storage._cdata: freed.copy for freed in self._freed if freed.copy is not None}
        found: dict[str, Tensor] = {}
        for name, parameter in self._models[0].named_parameters():
            shard = local(parameter)
            if parameter.requires_grad and (copy := copies.get(shard.untyped_storage()._cdata)) is not None:
                begin = shard.storage_offset()
                found[name] = copy.view(shard.dtype)[begin : begin + shard.numel()].view(shard.shape)
            elif parameter.requires_grad:
                found[name] = shard  # it has no rows, or stays
        return found


class _HostCopy:
    """A copy of storages in one host array."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._array: HostArray | None = None
        self._sizes: list[int] = []

    def filled(self, storages: Sequence[torch.UntypedStorage], *, only_once: bool = False) -> list[Tensor]:
        """The copy of each storage, uint8. On a GPU the copies are complete once it is synchronized.

        `only_once`: the content has not changed since the last call.
        """
        contents = [_bytes_of(storage) for storage in storages]
        sizes = [content.nbytes for content in contents]
        is_copied = self._array is not None and self._sizes == sizes
        if not is_copied:
            self._array = None  # first, so that both do not exist at once
            self._array = HostArray(
                parts_bytes(contents),
                torch.uint8,
                pinned=self._pinned,
                purpose="the policy's weights",
                advice="write memory.policyOffload: Disabled",
            )
        assert self._array is not None
        parts = parts_like(contents, self._array.tensor)
        self._sizes = sizes
        if not (is_copied and only_once):
            for part, content in zip(parts, contents, strict=True):
                part.copy_(content, non_blocking=True)
        return parts


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
