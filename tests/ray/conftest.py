from ray_transports import all_actors, lend, way

__all__ = ["all_actors", "lend", "way"]
