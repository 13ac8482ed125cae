"""Which replicas of a layer may go, and what that would lose. Everything is in `kernels`.

Responsible for the victims of evictions and overwrites. Must never drop one. Called by the
incremental policy.
"""
