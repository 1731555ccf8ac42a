"""Weights that one process publishes and any other process reads, only the newest version.

A publisher has a publication server: memory that readers of its node map, and a socket that hands
this memory to them. On another node, an agent reads for all processes of that node, and has such a
server of its own.
"""
