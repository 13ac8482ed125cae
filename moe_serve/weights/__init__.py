"""Hugging Face checkpoints: opened safely, proved complete, read expert by expert.

Responsible for: safetensors files of the supported families, the canonical form of an expert, and
the manifest of digests.
Must never: unpickle anything, open a file outside the checkpoint's root, allocate by a declared
size that was not checked, or load the model.
Called by: bootstrap, shard, front ends, CLI.

    checkpoint = Checkpoint.open("/models/OLMoE-1B-7B")
    manifest = load_or_build(checkpoint, "bfloat16", cache_dir, progress)
    content = checkpoint.read_expert(layer=0, expert=5, dtype="bfloat16", manifest=manifest)
"""

from moe_serve.weights.canonical import (
    ExpertViews,
    canonical_digest,
    canonical_from_projections,
    canonical_views,
    expert_bytes,
)
from moe_serve.weights.checkpoint import Checkpoint, CheckpointSpec
from moe_serve.weights.dtypes import SERVING_DTYPES, ServingDtype, numpy_dtype, serving_dtype
from moe_serve.weights.errors import WeightsError
from moe_serve.weights.manifest import Manifest, check_canonical_digest
from moe_serve.weights.manifest_cache import load_or_build

__all__ = [
    "SERVING_DTYPES",
    "Checkpoint",
    "CheckpointSpec",
    "ExpertViews",
    "Manifest",
    "ServingDtype",
    "WeightsError",
    "canonical_digest",
    "canonical_from_projections",
    "canonical_views",
    "check_canonical_digest",
    "expert_bytes",
    "load_or_build",
    "numpy_dtype",
    "serving_dtype",
]
