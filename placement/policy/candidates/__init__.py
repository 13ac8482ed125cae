"""Changes of one layer worth trying, ranked by an estimate. Everything is in `kernels`.

Responsible for the shortlist of the incremental policy's search. Must never change hosts. Called by
`policy.kernels`.
"""
