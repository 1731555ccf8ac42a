"""Rounds between nodes: an agent on each, and the exchange of shards between them."""
