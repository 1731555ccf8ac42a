from ray_ways import all_actors, lend, way

__all__ = ["all_actors", "lend", "way"]
