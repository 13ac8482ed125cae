"""Expert computation of a rank: one interface, three backends.

Responsible for gate-weighted partial sums of rows over slots. Must never know layers, experts, tags
or calls. Called by the shard's core.
"""
