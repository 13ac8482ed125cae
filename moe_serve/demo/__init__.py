"""The demo: a real MoE model writes text through the service while its experts move. `moe-serve
demo`."""
