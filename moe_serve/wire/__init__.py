"""Messages between routers and shards over ZeroMQ: fixed headers and raw buffers, never pickle."""
