"""What is placed and where it can be placed: the model's MoE layers, and the ranks that hold expert
slots.

Responsible for the plain facts every other module reads. Holds no load and no decision. Used by
everyone.

Words (the numbers of the example are DeepSeek-V3's): a *logical expert* is an expert of the model,
`expert` in [0, num_experts); a *physical expert* is one resident form of it in a *slot* of a
*rank*. 256 logical experts and 32 redundant ones over 32 ranks make 288 physical experts a layer, 9
slots a rank and layer. Slots are a pool a rank shares over its layers, so a rank of 58 layers has
58 x 9 = 522 slots plus its empty staging slots.

`layer` is the ordinal of an MoE layer, 0..num_layers-1; dense layers are not counted.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Phase(IntEnum):
    """Forward phase of a token: the whole prompt at once, or one token a sequence."""

    PREFILL = 0
    DECODE = 1


NUM_PHASES = len(Phase)


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a model's routed experts.

    `expert_bytes` are the canonical bytes of one expert in the serving dtype; `slot_bytes` adds
    what a compute backend derives from them (>= expert_bytes) and is what a slot costs in memory.
    """

    model: str
    weights_version: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    expert_bytes: int
    slot_bytes: int

    @property
    def num_keys(self) -> int:
        """Number of (layer, expert) keys: num_layers * num_experts."""
        return self.num_layers * self.num_experts

    @property
    def flops_per_pair(self) -> int:
        """Floating point operations of one (token, expert) pair: three matrix products of H x F."""
        return 6 * self.hidden_size * self.intermediate_size

    def key(self, layer: int, expert: int) -> int:
        """Flat id of (layer, expert), as it stands in `ExpertLayout.slots`. key(2, 5) with 32
        experts is 69."""
        return layer * self.num_experts + expert


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Declared or measured figures of one device, in SI units. The cost model turns them into
    seconds."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    overhead_s: float = 0.0
    """Fixed seconds of one layer call on the device (launch, message)."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One position in the EP group. `num_slots` is what its byte budget allows now, staging slots
    included."""

    rank: int
    node: str
    failure_domain: str
    num_slots: int
    profile: str
    alive: bool = True
    draining: bool = False
    fill_max: int = -1
    """Slots that may be filled whatever the budget, for the others are not given back yet; -1 = no
    such limit."""

    def room(self, staging_slots: int) -> int:
        """Slots that may be filled, with `staging_slots` left empty."""
        room = self.num_slots - staging_slots
        return max(0, room if self.fill_max < 0 else min(room, self.fill_max))


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks, in order of `rank` (0..num_ranks-1), and the device profiles they name."""

    ranks: tuple[RankSpec, ...]
    profiles: tuple[DeviceProfile, ...]
    cross_node_bytes_per_s: float = 1e9

    @property
    def num_ranks(self) -> int:
        """Length of the EP group, lost ranks included: a rank keeps its number."""
        return len(self.ranks)

    @property
    def max_slots(self) -> int:
        """Widest rank: second dimension of a layout's slot matrix."""
        return max((r.num_slots for r in self.ranks), default=0)

    def profile_of(self, rank: int) -> DeviceProfile:
        """Device figures of a rank."""
        name = self.ranks[rank].profile
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise KeyError(
            f"rank {rank} names device profile {name!r}, which the topology does not declare"
        )

    def usable(self, rank: int) -> bool:
        """Whether new replicas may be put on the rank: alive and not draining."""
        spec = self.ranks[rank]
        return spec.alive and not spec.draining
