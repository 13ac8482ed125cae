"""Hand-over to engines that place and dispatch experts themselves, in the forms they read.

Responsible for one module an engine: `vllm` (its policy interface, its map), `sglang` (its file of
initial locations, its dumps of load) and `trtllm` (its file of initial assignments); `maps` turns
placements into what all three hold and back, `own` is this service's form. Pure: mappings, JSON
text and arrays in and out; whoever calls opens files. Must never import an engine or torch. Called
by users' own start-up code and by the command line.

These engines share an expert's tokens equally among its replicas, so plans made here are scored by
that rule, not by the router's.
"""
