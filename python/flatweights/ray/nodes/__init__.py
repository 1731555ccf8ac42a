"""Rounds between nodes: one agent for each node, and the streams between them."""
