"""Turns results into text and JSON: the only place that formats numbers."""
