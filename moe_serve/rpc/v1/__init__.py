"""Generated code of the public API, by `protos/generate.py`; import `moe_serve.rpc` instead."""
