"""Kernels: ops whose local form on a shard is another op."""
