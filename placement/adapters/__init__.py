"""Hand-over to engines that place and dispatch experts themselves, in the forms they read.

Responsible for one module an engine: `vllm` (its policy interface) and `sglang` (its file of
initial locations, its dumps of load). Pure: mappings, JSON text and arrays in and out; whoever
calls opens files. Must never import an engine or torch. Called by users' own start-up code.

Both engines share an expert's tokens equally among its replicas, so plans made here are scored by
that rule, not by the router's.
"""
