"""Proving: what was said equals what was done, the split run equals one device, and the bytes are the bytes predicted."""
