"""What a Program costs: compute, collectives, memory; and `Figures`, the one type for predicted and measured."""
