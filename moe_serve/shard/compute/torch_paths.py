"""Ways to compute the parts of a batch with torch alone: a loop over slots, and grouped matrix
products over slabs.

Responsible for parts[p] = expert(slot of sorted pair p)(row of p), before gates. Must never gather
weights. Called by the torch backend; the third way, a kernel of our own, is in `triton_path`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from moe_serve.shard.compute.device_slabs import DeviceSlabs
from moe_serve.shard.compute.order import PairOrder

GROUP_LIMIT = 1023
"""Most groups one grouped matrix product takes on CUDA."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in float32, returned in the dtype of `gate_up` [n, 2F]; result [n, F]."""
    gate, up = gate_up.float().chunk(2, dim=1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)


def loop_parts(
    sorted_rows: torch.Tensor, order: PairOrder, slabs: DeviceSlabs, parts: torch.Tensor
) -> None:
    """Two matrix products a slot; sorted_rows [P, H] in the serving dtype, parts float32 [P, H]
    (written).
    """
    for slot, begin, end in zip(
        order.slots.tolist(), order.begin.tolist(), order.end.tolist(), strict=True
    ):
        act = silu_mul(sorted_rows[begin:end] @ slabs.gate_up(slot))
        parts[begin:end] = act @ slabs.down(slot)


def grouped_parts(
    sorted_rows: torch.Tensor,
    order: PairOrder,
    slabs: DeviceSlabs,
    slab_slots: int,
    parts: torch.Tensor,
) -> None:
    """Two grouped matrix products a slab that the batch touches, over all its places; untouched
    places get no rows.
    """
    slab_of_group = order.slots // slab_slots
    cuts = np.flatnonzero(np.diff(slab_of_group, prepend=-1, append=-1)).tolist()
    for first, last in pairwise(cuts):
        slab_id = int(slab_of_group[first])
        begin, end = int(order.begin[first]), int(order.end[last - 1])
        rows_of_place = np.zeros(slab_slots, np.int32)
        rows_of_place[order.slots[first:last] % slab_slots] = (order.end - order.begin)[first:last]
        offsets = torch.from_numpy(np.cumsum(rows_of_place, dtype=np.int32)).to(sorted_rows.device)
        gate_up = F.grouped_mm(sorted_rows[begin:end], slabs.slab_gate_up(slab_id), offs=offsets)
        parts[begin:end] = F.grouped_mm(silu_mul(gate_up), slabs.slab_down(slab_id), offs=offsets)
