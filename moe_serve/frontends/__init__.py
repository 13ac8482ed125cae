"""Adapters that put model front ends (attention and gate) in front of the service. `transformers`
is the first."""
