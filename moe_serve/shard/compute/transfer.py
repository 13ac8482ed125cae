"""Batches to a torch device and back, through memory that is pinned and kept.

Responsible for staging buffers and the compute stream. Must never start a batch before the last one
came back: the buffers are reused. Called by the torch backend from one thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray


class Transfer:
    """Staging for one device. On a CPU nothing is pinned and the staging buffers are what is
    computed on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if self._pinned
            else None
        )
        self._rows = self._host(1, torch.float32)
        self._tables = self._host(1, torch.int32)
        self._fetched = self._host(1, torch.float32)

    def stream(self) -> AbstractContextManager[object]:
        """Context in which a batch runs: the compute stream of a CUDA device."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def rows(self, rows: NDArray[np.float32]) -> torch.Tensor:
        """float32 rows on the device, same shape; valid until the next call."""
        self._rows = self._grown(self._rows, rows.size)
        staged = self._rows[: rows.size].view(rows.shape)
        np.copyto(staged.numpy(), rows)
        return staged.to(self._device, non_blocking=True)

    def tables(self, tables: list[NDArray[np.int32]]) -> list[torch.Tensor]:
        """int32 tables on the device in one transfer, shapes kept; the first begins on 8 bytes."""
        total = sum(table.size for table in tables)
        self._tables = self._grown(self._tables, total)
        begin = 0
        for table in tables:
            view = self._tables[begin : begin + table.size].view(table.shape)
            np.copyto(view.numpy(), table)
            begin += table.size
        on_device = self._tables[:total].to(self._device, non_blocking=True)
        ends = np.cumsum([table.size for table in tables]).tolist()
        return [
            on_device[end - table.size : end].view(table.shape)
            for end, table in zip(ends, tables, strict=True)
        ]

    def fetch(self, result: torch.Tensor, out: NDArray[np.float32]) -> None:
        """Write a float32 result of the device into `out` (same shape), waiting for everything
        queued before.
        """
        if self._stream is None:
            np.copyto(out, result.numpy())
            return
        self._fetched = self._grown(self._fetched, out.size)
        staged = self._fetched[: out.size].view(out.shape)
        staged.copy_(result, non_blocking=True)
        self._stream.synchronize()
        np.copyto(out, staged.numpy())

    def _grown(self, buffer: torch.Tensor, elements: int) -> torch.Tensor:
        """The buffer, or one twice as large where it is too small."""
        if elements <= buffer.shape[0]:
            return buffer
        return self._host(max(elements, 2 * buffer.shape[0]), buffer.dtype)

    def _host(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=self._pinned)
