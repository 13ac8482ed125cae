"""The shard: one rank's expert weights, and the computation over them.

Responsible for slots, memory, compute and copies of one device. Must never choose a placement.
Called by routers over the wire and by the controller through its port.
"""
