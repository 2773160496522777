"""Backend for colocated roles on the CPU, the engine's side. Imported only by vLLM's factory, since it imports vLLM."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from rljob_trainer.weight_sync.layerwise_engine import BucketLayout, LayerwiseEngine


@dataclass
class ObjectStoreInitInfo(WeightTransferInitInfo):
    """Empty: Ray locates the tensors."""


@dataclass
class ObjectStoreUpdateInfo(BucketLayout):
    """One bucket of weights."""

    buffer: npt.NDArray[np.uint8]
    """The tensors end to end, read-only in shared memory."""


class ObjectStoreWeightTransferEngine(LayerwiseEngine[ObjectStoreInitInfo, ObjectStoreUpdateInfo]):
    """Loads tensors that Ray's object store maps into this process."""

    init_info_cls = ObjectStoreInitInfo
    update_info_cls = ObjectStoreUpdateInfo

    def init_transfer_engine(self, init_info: ObjectStoreInitInfo) -> None:
        pass

    def receive_weights(self, update_info: ObjectStoreUpdateInfo) -> None:
        with warnings.catch_warnings():
            # torch has no read-only tensors; nothing writes to these.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            buffer = torch.from_numpy(update_info.buffer)
        self.model.load_weights(update_info.unpacked(buffer))
