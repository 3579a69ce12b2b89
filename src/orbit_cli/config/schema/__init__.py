"""The typed config: dataclasses without torch. One string under each field is its manual."""

from orbit_cli.config.schema.root import OrbitConfig

__all__ = ["OrbitConfig"]
