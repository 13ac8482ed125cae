"""Read a service file for a command, with what the command line adds to it.

Responsible for `--i-accept-insecure`, which stands for `security.accept_insecure: true` in the
file, and for where relative paths start. Everything else about the file is `config`'s. Called by
validate and up.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from moe_serve.config import ConfigInvalid, ServiceConfig, load_config, parse_config

FLAG = "--i-accept-insecure"


def read_service_file(file: Path, *, accept_insecure: bool = False) -> ServiceConfig:
    """The checked file, its paths absolute. Raises ConfigInvalid with every fault and its
    place."""
    return _accepted(file, accept_insecure).rooted(file.parent)


def _accepted(file: Path, accept_insecure: bool) -> ServiceConfig:
    if not accept_insecure:
        return load_config(file)
    try:
        config = load_config(file)
    except ConfigInvalid as found:
        # The flag helps only where it is the one thing that is missing; positions of all other
        # faults are those of the file as it is written.
        others = tuple(fault for fault in found.faults if FLAG not in fault.problem)
        if others:
            raise ConfigInvalid(others) from None
        try:
            return parse_config(_accepting(file.read_bytes()), str(file))
        except (ConfigInvalid, OSError, yaml.YAMLError):
            raise found from None
    security = config.security.model_copy(update={"accept_insecure": True})
    return config.model_copy(update={"security": security})


def _accepting(data: bytes) -> bytes:
    tree = yaml.safe_load(data)
    if not isinstance(tree, dict) or not isinstance(tree.get("security", {}), dict):
        return data
    tree["security"] = {**tree.get("security", {}), "accept_insecure": True}
    return yaml.safe_dump(tree).encode()
