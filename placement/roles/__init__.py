"""The pure halves of the other parts: what a shard, a router and an admission queue decide.
No I/O, no clock.
"""
