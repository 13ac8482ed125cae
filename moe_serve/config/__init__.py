"""The service file: YAML in, one frozen checked `ServiceConfig` out, every fault at once with its
place."""

from moe_serve.config.load import ConfigFault, ConfigInvalid, load_config, parse_config
from moe_serve.config.schema import (
    FleetConfig,
    LimitsConfig,
    ModelConfig,
    PortsConfig,
    ProfileConfig,
    RankGroup,
    SecurityConfig,
    ServiceConfig,
)

__all__ = [
    "ConfigFault",
    "ConfigInvalid",
    "FleetConfig",
    "LimitsConfig",
    "ModelConfig",
    "PortsConfig",
    "ProfileConfig",
    "RankGroup",
    "SecurityConfig",
    "ServiceConfig",
    "load_config",
    "parse_config",
]
