"""Finds the best plan: every mesh of the given strategies, what is legal, what fits, what is fastest."""

from partita.search.candidates import candidates, factors
from partita.search.choices import Choice, Choices, Rejected
from partita.search.searching import search

__all__ = ["Choice", "Choices", "Rejected", "candidates", "factors", "search"]
