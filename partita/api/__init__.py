"""The verbs: short walks to the rooms below.  `partita/__init__.py` says which verb is where, and loads no other.

- planning: plan, estimate, load
- probing: probe
- running: train
- proving: prove, check_strategy
- sessions: spawn, session
- reporting: report
"""
